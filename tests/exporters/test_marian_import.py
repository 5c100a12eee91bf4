"""From a folder with a Marian model to a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from marian_writer import (
    OPTIONS,
    RawItem,
    SyntheticModel,
    intgemm8,
    marian_bytes,
    plain,
    shortlist_bytes,
    tokenizer_bytes,
    with_item,
    without_item,
    write_folder,
)

from app.errors import CheckpointError
from exporters.checkpoint import Checkpoint, QuantizedWeight
from exporters.marian import config_from_options, import_marian
from exporters.marian_shortlist import read_marian_shortlist
from model.config import TransformerConfig
from model.transformer import Transformer

SHORTLIST = shortlist_bytes([[i, i + 1] for i in range(31)] + [[]], num_frequent=4)
SELF_ATTENTION = {**OPTIONS, "transformer-decoder-autoreg": "self-attention", "dec-cell": "gru"}


@pytest.fixture(scope="module")
def tokenizer() -> bytes:
    return tokenizer_bytes()


@pytest.fixture
def import_items(tmp_path: Path, tokenizer: bytes):
    def run(items: list[RawItem]) -> Checkpoint:
        return import_marian(write_folder(tmp_path, marian_bytes(items), tokenizer, SHORTLIST))

    return run


def floats(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    return {
        name: weight.to_float() if isinstance(weight, QuantizedWeight) else weight
        for name, weight in checkpoint.weights.items()
    }


def test_the_options_become_our_configuration() -> None:
    config = config_from_options(OPTIONS, source="model.bin")
    assert config == TransformerConfig(
        vocabulary_size=32,
        d_model=4,
        num_heads=2,
        encoder_layers=2,
        decoder_layers=1,
        ffn_size=6,
        activation="relu",
        norm="post",
        positions="halves",
        decoder_cell="ssru",
        layer_norm_epsilon=1e-6,
        eos_id=0,
        start_id=None,
    )


def test_swish_is_silu_and_self_attention_is_the_papers_decoder() -> None:
    config = config_from_options(
        {**SELF_ATTENTION, "transformer-ffn-activation": "swish"}, source="model.bin"
    )
    assert (config.activation, config.decoder_cell) == ("silu", "attention")


@pytest.mark.parametrize("options", [OPTIONS, SELF_ATTENTION], ids=["ssru", "self-attention"])
def test_the_transformer_takes_every_weight_and_misses_none(
    import_items, options: Mapping[str, object]
) -> None:
    checkpoint = import_items(SyntheticModel(options).intgemm8_items())
    model = Transformer(checkpoint.config)
    model.load_state_dict(
        {name: torch.from_numpy(array) for name, array in floats(checkpoint).items()}, strict=True
    )


@pytest.mark.parametrize("type_name", ["float32", "float16"])
def test_float_matrices_are_transposed_and_the_embedding_is_not(import_items, type_name: str) -> None:
    model = SyntheticModel()
    weights = floats(import_items(model.float_items(type_name)))

    def stored(name: str) -> np.ndarray:
        return model.floats[name].astype(type_name).astype(np.float32)

    np.testing.assert_array_equal(weights["embedding.weight"], stored("Wemb"))
    np.testing.assert_array_equal(weights["encoder.1.ffn.inner.weight"], stored("encoder_l2_ffn_W1").T)
    np.testing.assert_array_equal(
        weights["encoder.0.self_attention.key.weight"], stored("encoder_l1_self_Wk").T
    )
    np.testing.assert_array_equal(weights["decoder.0.cell.forget.bias"], stored("decoder_l1_rnn_bf")[0])


def test_quantised_and_float_files_of_one_model_give_the_same_weights(
    tmp_path: Path, tokenizer: bytes
) -> None:
    model = SyntheticModel()
    checkpoints = []
    for name, items in (("float", model.float_items()), ("int8", model.intgemm8_items())):
        folder = tmp_path / name
        folder.mkdir()
        checkpoints.append(import_marian(write_folder(folder, marian_bytes(items), tokenizer, SHORTLIST)))
    from_float, from_int8 = map(floats, checkpoints)
    assert from_float.keys() == from_int8.keys()
    for name in from_float:
        # float32(1 / m) * i against i / m: both round once, so they differ by one unit in the last place.
        np.testing.assert_array_max_ulp(from_float[name], from_int8[name], maxulp=2)


def test_integers_are_kept_as_they_are_with_the_inverse_multiplier(import_items) -> None:
    model = SyntheticModel()
    weights = import_items(model.intgemm8_items()).weights
    outer = weights["encoder.0.ffn.outer.weight"]
    assert isinstance(outer, QuantizedWeight)
    assert outer.values.dtype == np.int8
    np.testing.assert_array_equal(outer.values, model.integers["encoder_l1_ffn_W2"].T)
    assert outer.scale.dtype == np.float32
    assert outer.scale.shape == ()
    assert outer.scale == np.float32(1 / model.multipliers["encoder_l1_ffn_W2"])
    embedding = weights["embedding.weight"]
    assert isinstance(embedding, QuantizedWeight)
    np.testing.assert_array_equal(embedding.values, model.integers["Wemb"])


def test_activation_scales_are_inverse_alphas_under_our_names(import_items) -> None:
    model = SyntheticModel()
    checkpoint = import_items(model.intgemm8_items())
    quantized = {name for name, weight in checkpoint.weights.items() if isinstance(weight, QuantizedWeight)}
    assert checkpoint.activation_scales.keys() == quantized
    for ours, theirs in (
        ("embedding.weight", "Wemb"),
        ("decoder.0.cell.candidate.weight", "decoder_l1_rnn_W"),
        ("decoder.0.cross_attention.output.weight", "decoder_l1_context_Wo"),
    ):
        assert checkpoint.activation_scales[ours] == pytest.approx(1 / model.alphas[theirs], rel=1e-6)


def test_a_file_without_alphas_has_no_activation_scales(import_items) -> None:
    assert import_items(SyntheticModel().intgemm8_items(alphas=False)).activation_scales == {}


def test_the_checkpoint_outlives_its_folder_and_says_where_it_came_from(
    tmp_path: Path, tokenizer: bytes
) -> None:
    folder = write_folder(tmp_path, marian_bytes(SyntheticModel().intgemm8_items()), tokenizer, SHORTLIST)
    checkpoint = import_marian(folder)
    for path in folder.iterdir():
        path.unlink()
    assert checkpoint.tokenizer == tokenizer
    assert checkpoint.shortlist == read_marian_shortlist(SHORTLIST, source="shortlist")
    assert checkpoint.provenance["marian_version"] == "v1.test"
    assert checkpoint.provenance["marian_weights"] == "intgemm8"
    assert checkpoint.provenance["model_file"] == "model.test.bin"
    assert len(checkpoint.provenance["shortlist_sha256"]) == 64
    assert all(np.isfinite(array).all() for array in floats(checkpoint).values())


def test_a_model_is_imported_without_its_shortlist_only_on_request(tmp_path: Path, tokenizer: bytes) -> None:
    folder = write_folder(tmp_path, marian_bytes(SyntheticModel().float_items()), tokenizer, None)
    with pytest.raises(CheckpointError, match=r"lex\*\.bin.*import without a shortlist"):
        import_marian(folder)
    assert import_marian(folder, shortlist=False).shortlist is None


UNSUPPORTED = [
    ("type", "s2s"),
    ("tied-embeddings-all", False),
    ("tied-embeddings-all", 1),
    ("transformer-preprocess", "n"),
    ("transformer-postprocess", "da"),
    ("transformer-postprocess", "dhn"),
    ("transformer-postprocess", None),
    ("transformer-postprocess-emb", "nd"),
    ("transformer-postprocess-top", "n"),
    ("transformer-decoder-autoreg", "average-attention"),
    ("dec-cell", "gru"),
    ("transformer-ffn-activation", "gelu"),
    ("transformer-ffn-activation", ["relu"]),
    ("transformer-ffn-depth", 3),
    ("transformer-train-position-embeddings", True),
    ("transformer-no-projection", True),
    ("transformer-tied-layers", [1, 1]),
    ("lemma-dim-emb", -1),
    ("input-types", ["sequence", "class"]),
    ("right-left", True),
    ("dim-vocabs", [32, 40]),
    ("dim-vocabs", [32]),
    ("dim-vocabs", "32"),
    ("dim-vocabs", [True, True]),
    ("dim-emb", "4"),
    ("dim-emb", None),
    ("transformer-heads", 0),
    ("enc-depth", 10**30),
    ("dec-depth", 1.5),
]


@pytest.mark.parametrize(("option", "value"), UNSUPPORTED)
def test_what_we_do_not_implement_is_refused_by_name(option: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=f"model.bin: the Marian option {option} is .*; expected "):
        config_from_options({**OPTIONS, option: value}, source="model.bin")


@pytest.mark.parametrize("option", ["type", "tied-embeddings-all", "dim-vocabs", "dim-emb", "enc-depth"])
def test_an_option_without_a_default_must_be_there(option: str) -> None:
    options = {name: value for name, value in OPTIONS.items() if name != option}
    with pytest.raises(CheckpointError, match=option):
        config_from_options(options, source="model.bin")


def test_heads_that_do_not_divide_the_width_are_refused() -> None:
    with pytest.raises(CheckpointError, match="describes no Transformer"):
        config_from_options({**OPTIONS, "transformer-heads": 3}, source="model.bin")


def items() -> list[RawItem]:
    return SyntheticModel().intgemm8_items()


def with_options(**changes: object) -> list[RawItem]:
    options = {**OPTIONS, **{name.replace("_", "-"): value for name, value in changes.items()}}
    return [*items()[:-1], SyntheticModel(options).config_item()]


def with_yaml(content: bytes) -> list[RawItem]:
    return with_item(items(), "special:model.yml", data=content + b"\0", shape=(len(content) + 1,))


WRONG_MODELS = {
    "a deeper configuration": (lambda: with_options(enc_depth=3), "no tensor 'encoder_l3_self_Wq'"),
    "a shallower configuration": (
        lambda: with_options(enc_depth=1),
        "tensors have no place.*encoder_l2_ffn_W1",
    ),
    "another cell": (
        lambda: with_options(transformer_decoder_autoreg="self-attention"),
        "decoder_l1_self_Wq",
    ),
    "another width": (lambda: with_options(dim_emb=8), r"'Wemb' has the shape \(32, 4\), expected \(32, 8\)"),
    "a missing bias": (lambda: without_item(items(), "encoder_l1_self_bq"), "no tensor 'encoder_l1_self_bq'"),
    "an extra tensor": (lambda: [*items(), plain("encoder_l1_extra", np.ones((1, 4)))], "encoder_l1_extra"),
    "an extra embedding": (
        lambda: [*items(), intgemm8("decoder_Wemb", np.ones((32, 4), np.int8), 1)],
        "decoder_W",
    ),
    "an alpha of nothing": (
        lambda: [*items(), plain("encoder_l1_self_bq_QuantMultA", np.ones((1, 1)))],
        "no place",
    ),
    "an alpha of zero": (
        lambda: with_item(items(), "none_QuantMultA", data=bytes(256)),
        "multiplier of 'none_QuantMultA' is 0.0",
    ),
    "an alpha of two numbers": (
        lambda: with_item(items(), "none_QuantMultA", shape=(1, 2)),
        "'none_QuantMultA' has the shape",
    ),
    "an integer bias": (
        lambda: with_item(items(), "encoder_l1_self_bq", type_code=0x0104),
        "encoder_l1_self_bq is of type int32, expected float32",
    ),
    "no configuration": (lambda: items()[:-1], "no item 'special:model.yml'"),
    "a configuration of another type": (
        lambda: with_item(items(), "special:model.yml", type_code=0x0404, shape=(1, 1), data=bytes(4)),
        "special:model.yml is of type float32, expected int8",
    ),
    "a configuration that is no YAML": (lambda: with_yaml(b"type: [transformer"), "not YAML"),
    "a configuration that is a list": (lambda: with_yaml(b"- type\n- transformer"), "no mapping"),
    "a configuration with odd keys": (lambda: with_yaml(b"1: 2"), "no mapping of names"),
    "a configuration that makes objects": (
        lambda: with_yaml(b"type: !!python/object/apply:os.system ['true']"),
        "anchor, alias or tag",
    ),
    "a configuration that expands": (
        lambda: with_yaml(b"a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]"),
        "anchor, alias or tag",
    ),
    "a configuration with an impossible date": (lambda: with_yaml(b"a: 2021-13-45"), "not YAML"),
    "a configuration nested too deep": (
        lambda: with_yaml(b"a: " + b"[" * 20_000),
        "nested, expected a depth of",
    ),
    "a configuration of a hundred kilobytes": (
        lambda: with_yaml(b"#" * 100_000),
        "has 100001 bytes, expected at",
    ),
}


@pytest.mark.parametrize("case", WRONG_MODELS)
def test_a_model_that_contradicts_itself_is_refused(import_items, case: str) -> None:
    make_items, reason = WRONG_MODELS[case]
    with pytest.raises(CheckpointError, match=reason) as caught:
        import_items(make_items())
    assert caught.value.message.startswith("model.test.bin: ")


@pytest.mark.parametrize(
    ("remove", "add", "reason"),
    [
        ("model.test.bin", None, r"no file matches model\*\.bin, expected one, a Marian binary model"),
        ("model.test.bin", "model.test.bin.gz", r"model\*\.bin.*decompress them with gunzip"),
        ("vocab.test.spm", None, r"no file matches \*\.spm"),
        (None, "model.other.bin", r"2 files match model\*\.bin \(model.other.bin, model.test.bin\)"),
        (None, "vocab.other.spm", r"2 files match \*\.spm"),
        (None, "lex.other.bin", r"2 files match lex\*\.bin"),
    ],
)
def test_absent_and_ambiguous_files_are_named(
    tmp_path: Path, tokenizer: bytes, remove: str | None, add: str | None, reason: str
) -> None:
    write_folder(tmp_path, marian_bytes(items()), tokenizer, SHORTLIST)
    if remove is not None:
        (tmp_path / remove).unlink()
    if add is not None:
        (tmp_path / add).write_bytes(b"")
    with pytest.raises(CheckpointError, match=reason):
        import_marian(tmp_path)


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no file matches model\*\.bin"):
        import_marian(tmp_path / "nowhere")


def test_files_of_another_model_are_refused(tmp_path: Path, tokenizer: bytes) -> None:
    model = marian_bytes(items())
    write_folder(tmp_path, model, b"no SentencePiece model", SHORTLIST)
    with pytest.raises(CheckpointError, match="vocabulary cannot be loaded"):
        import_marian(tmp_path)
    write_folder(tmp_path, model, tokenizer_bytes(30), SHORTLIST)
    with pytest.raises(CheckpointError, match="number of pieces is 30, expected 32"):
        import_marian(tmp_path)
    write_folder(tmp_path, model, tokenizer, shortlist_bytes([[0]] * 9, num_frequent=4))
    with pytest.raises(CheckpointError, match="vocabulary of 9, the model's has 32"):
        import_marian(tmp_path)
    write_folder(tmp_path, model, tokenizer, SHORTLIST[:-1])
    with pytest.raises(CheckpointError, match=r"lex\.50\.50\.test\.s2t\.bin"):
        import_marian(tmp_path)


MODEL = marian_bytes(items())
CONFIG_START = MODEL.index(b"dec-cell: ssru")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    edits=st.lists(
        st.tuples(
            st.integers(0, 6_000)
            | st.integers(CONFIG_START, len(MODEL) - 1)
            | st.integers(0, len(MODEL) - 1),
            st.binary(min_size=1, max_size=3)
            | st.sampled_from([b"!!int ", b"&a ", b"*a", b"0x", b"\n- ", b": "]),
        ),
        max_size=3,
    ),
    length=st.none() | st.integers(0, len(MODEL)),
)
def test_no_damaged_model_raises_anything_but_a_checkpoint_error(
    tmp_path: Path, tokenizer: bytes, edits: list[tuple[int, bytes]], length: int | None
) -> None:
    content = bytearray(MODEL)
    for position, replacement in edits:
        content[position : position + len(replacement)] = replacement
    folder = write_folder(tmp_path, bytes(content[:length]), tokenizer, SHORTLIST)
    try:
        checkpoint = import_marian(folder)
    except CheckpointError:
        return
    assert dataclasses.replace(checkpoint.config).vocabulary_size == 32
    assert all(np.isfinite(array).all() for array in floats(checkpoint).values())
