"""Model folders: what is saved comes back, appears whole or not at all, and damage is named."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from tiny_models import VOCABULARY_SIZE, tiny_tokenizer
from torch import Tensor, nn

import model.saved_model as module_under_test
from app.errors import CheckpointError
from model.config import TransformerConfig
from model.saved_model import (
    DESCRIPTION_NAME,
    TOKENIZER_NAME,
    WEIGHTS_NAME,
    SavedModel,
    load_model,
    save_model,
)
from model.transformer import Transformer

Randomise = Callable[[nn.Module], None]


@pytest.fixture
def saved(make_config: Callable[..., TransformerConfig], randomise: Randomise) -> SavedModel:
    config = make_config(vocabulary_size=VOCABULARY_SIZE, positions="halves", start_id=3)
    model = Transformer(config)
    randomise(model)
    return SavedModel(
        config=config,
        weights=model.state_dict(),
        tokenizer=tiny_tokenizer(),
        source="en",
        target="pt-BR",
        provenance={"run": "ação 1"},
        max_source_tokens=64,
    )


def with_weights(saved: SavedModel, **changes: Tensor) -> SavedModel:
    renamed = {name.replace("__", "."): tensor for name, tensor in changes.items()}
    return dataclasses.replace(saved, weights={**saved.weights, **renamed})


def damage(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    document = json.loads(path.read_bytes())
    change(document)
    path.write_text(json.dumps(document))


@pytest.mark.parametrize("cell", ["attention", "gated_attention", "ssru"])
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_a_saved_model_comes_back_equal(saved: SavedModel, tmp_path: Path, cell: str, norm: str) -> None:
    config = dataclasses.replace(saved.config, decoder_cell=cell, norm=norm)  # type: ignore[arg-type]
    saved = dataclasses.replace(saved, config=config, weights=Transformer(config).state_dict())
    save_model(saved, tmp_path / "new" / "m")
    loaded = load_model(tmp_path / "new" / "m")
    for each in dataclasses.fields(SavedModel):
        if each.name != "weights":
            assert getattr(loaded, each.name) == getattr(saved, each.name)
    assert loaded.weights.keys() == saved.weights.keys()
    assert all(torch.equal(loaded.weights[name], tensor) for name, tensor in saved.weights.items())


def test_a_description_of_before_the_decoder_had_heads_of_its_own_is_read(
    saved: SavedModel, tmp_path: Path
) -> None:
    save_model(saved, tmp_path / "m")
    damage(
        tmp_path / "m" / DESCRIPTION_NAME,
        lambda document: document["config"].pop("decoder_query_heads"),  # type: ignore[attr-defined]
    )
    assert load_model(tmp_path / "m").config == saved.config


def test_the_decoders_own_heads_come_back(saved: SavedModel, tmp_path: Path) -> None:
    config = dataclasses.replace(saved.config, decoder_cell="gated_attention", decoder_query_heads=8)
    saved = dataclasses.replace(saved, config=config, weights=Transformer(config).state_dict())
    save_model(saved, tmp_path / "m")
    assert load_model(tmp_path / "m").config.num_query_heads == 8


def test_a_loaded_module_computes_what_the_saved_one_did(saved: SavedModel, tmp_path: Path) -> None:
    save_model(saved, tmp_path / "m")
    before, after = saved.module(), load_model(tmp_path / "m").module()
    source, mask = torch.randint(0, VOCABULARY_SIZE, (2, 5)), torch.ones(2, 5, dtype=torch.bool)
    assert not after.training
    assert torch.equal(before(source, mask, source), after(source, mask, source))


def test_the_files_are_the_same_each_time(saved: SavedModel, tmp_path: Path) -> None:
    for name in "ab":
        save_model(saved, tmp_path / name)
    for name in (WEIGHTS_NAME, DESCRIPTION_NAME, TOKENIZER_NAME):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_tensors_that_share_memory_and_other_float_types_are_stored_as_float32(
    saved: SavedModel, tmp_path: Path
) -> None:
    shared = torch.randn(2, 16)
    halved = with_weights(
        saved,
        encoder__0__self_norm__bias=shared[0],
        encoder__1__self_norm__bias=shared[0],
        output_bias=torch.ones(VOCABULARY_SIZE, dtype=torch.bfloat16),
    )
    save_model(halved, tmp_path / "m")
    loaded = load_model(tmp_path / "m").weights
    assert torch.equal(loaded["encoder.1.self_norm.bias"], shared[0])
    assert {tensor.dtype for tensor in loaded.values()} == {torch.float32}


def test_changing_a_module_does_not_change_the_saved_model(saved: SavedModel) -> None:
    before = saved.weights["output_bias"].clone()
    with torch.no_grad():
        saved.module().output_bias.fill_(9)
    assert torch.equal(saved.weights["output_bias"], before)


def test_an_older_model_is_replaced_and_nothing_else_left(saved: SavedModel, tmp_path: Path) -> None:
    save_model(saved, tmp_path / "m")
    save_model(dataclasses.replace(saved, source="de"), tmp_path / "m")
    assert load_model(tmp_path / "m").source == "de"
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("failing", ["_write_through", "_sync_folder", "Path.rename"])
def test_a_failure_leaves_the_old_model_or_none(
    saved: SavedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existing: bool, failing: str
) -> None:
    folder = tmp_path / "m"
    if existing:
        save_model(saved, folder)

    rename = Path.rename

    def fail(*arguments: object) -> Path:
        if failing == "Path.rename" and "-" not in Path(str(arguments[0])).name:
            return rename(*arguments)  # type: ignore[arg-type]
        raise OSError(28, "No space left on device")

    if failing == "Path.rename":
        monkeypatch.setattr(Path, "rename", fail)
    else:
        monkeypatch.setattr(module_under_test, failing, fail)
    with pytest.raises(OSError, match="No space"):
        save_model(dataclasses.replace(saved, source="de"), folder)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == (["m"] if existing else [])
    if existing:
        assert load_model(folder).source == "en"


def test_after_a_crash_between_two_renames_the_old_model_is_named(saved: SavedModel, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    save_model(saved, folder)
    folder.rename(tmp_path / ".m.previous")
    with pytest.raises(CheckpointError, match=r"interrupted: rename .*\.m\.previous to m"):
        load_model(folder)
    save_model(dataclasses.replace(saved, source="de"), folder)
    assert load_model(folder).source == "de"
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_folder_with_other_files_is_never_replaced(saved: SavedModel, tmp_path: Path) -> None:
    save_model(saved, tmp_path / "m")
    (tmp_path / "m" / "notes.txt").write_text("keep me")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / WEIGHTS_NAME).write_bytes(b"")
    for name, words in (("m", r"holds notes\.txt"), ("other", f"holds {WEIGHTS_NAME}")):
        with pytest.raises(CheckpointError, match=words):
            save_model(saved, tmp_path / name)
    assert (tmp_path / "m" / "notes.txt").read_text() == "keep me"


def test_weights_that_do_not_fit_the_configuration_are_named(saved: SavedModel, tmp_path: Path) -> None:
    lacking = {name: tensor for name, tensor in saved.weights.items() if "encoder.1" not in name}
    for wrong, words in (
        (dataclasses.replace(saved, weights=lacking), "16 tensors are missing: encoder.1.ffn.inner.bias"),
        (with_weights(saved, encoder__2__x=torch.ones(1)), "1 tensors are superfluous: encoder.2.x"),
        (with_weights(saved, output_bias=torch.ones(3)), r"output_bias has the shape \[3\], expected \[96\]"),
        (with_weights(saved, output_bias=torch.full((96,), float("nan"))), "output_bias holds values"),
    ):  # fmt: skip
        for attempt in (wrong.module, lambda wrong=wrong: save_model(wrong, tmp_path / "m")):
            with pytest.raises(CheckpointError, match=words):
                attempt()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(format_version=2), r"states format version 2; .*reads 1"),
        (lambda d: d.pop("format_version"), "states format version None"),
        (lambda d: d.update(colour=1), "colour: Extra inputs"),
        (lambda d: d.pop("source"), "source: Field required"),
        (lambda d: d.update(target="Portuguese!"), "target: String should match"),
        (lambda d: d.update(unknown_id="1"), "unknown_id: Input should be a valid integer"),
        (lambda d: d.update(unknown_id=96), "unknown_id is 96, outside the vocabulary of 96"),
        (lambda d: d["config"].update(eos_id=-1), "eos_id is -1, outside"),
        (lambda d: d["config"].pop("norm"), "config lacks norm; "),
        (lambda d: d["config"].update(moe=8), "config has moe; "),
        (lambda d: d["config"].update(d_model="16"), "config.d_model: Input should be a valid integer"),
        (lambda d: d["config"].update(num_heads=5), "multiple of num_heads"),
        (
            lambda d: d["config"].update(decoder_query_heads=4 * 10**18),
            "decoder_query_heads: Input should be less",
        ),
        (lambda d: d["config"].update(decoder_query_heads=6), "must be a multiple of num_heads"),
        (lambda d: d["config"].update(norm="rms"), "config.norm: Input should be 'post' or 'pre'"),
        (lambda d: d["config"].update(encoder_layers=10**9), "encoder_layers: Input should be less"),
        (lambda d: d["config"].update(encoder_layers=3), "16 tensors are missing: encoder.2"),
        (lambda d: d["config"].update(ffn_size=32), r"has the shape \[24.*expected \[32"),
        (lambda d: d["config"].update(vocabulary_size=95), "shape"),
        (lambda d: d.update(max_source_tokens=0), "max_source_tokens"),
    ],
)
def test_a_description_that_is_wrong_is_refused(
    saved: SavedModel, tmp_path: Path, change: Callable[[dict[str, object]], object], words: str
) -> None:
    save_model(saved, tmp_path / "m")
    damage(tmp_path / "m" / DESCRIPTION_NAME, change)
    with pytest.raises(CheckpointError, match=words):
        load_model(tmp_path / "m")


@pytest.mark.parametrize("name", [WEIGHTS_NAME, DESCRIPTION_NAME, TOKENIZER_NAME])
def test_a_file_that_is_cut_short_absent_or_noise_is_named(
    saved: SavedModel, tmp_path: Path, name: str
) -> None:
    save_model(saved, tmp_path / "m")
    path = tmp_path / "m" / name
    content = path.read_bytes()
    for damaged in (
        content[:-1] if name != DESCRIPTION_NAME else content[:-3],
        content[:40],
        b"",
        b"\xff" * 99,
    ):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=name):
            load_model(tmp_path / "m")
    path.unlink()
    with pytest.raises(CheckpointError, match=name):
        load_model(tmp_path / "m")


def test_weights_damaged_in_their_values_or_types_are_refused(saved: SavedModel, tmp_path: Path) -> None:
    save_model(saved, tmp_path / "m")
    path = tmp_path / "m" / WEIGHTS_NAME
    weights = safetensors.torch.load(path.read_bytes())
    weights["output_bias"][5] = float("inf")
    path.write_bytes(safetensors.torch.save(weights))
    with pytest.raises(CheckpointError, match="output_bias holds values that are not finite"):
        load_model(tmp_path / "m")
    weights["output_bias"] = weights["output_bias"].half()
    path.write_bytes(safetensors.torch.save(weights))
    with pytest.raises(CheckpointError, match="output_bias is not float32"):
        load_model(tmp_path / "m")


def test_a_vocabulary_of_another_size_is_refused(saved: SavedModel, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the vocabulary has 80 pieces, the model 96"):
        save_model(dataclasses.replace(saved, tokenizer=tiny_tokenizer(80)), tmp_path / "m")
    assert list(tmp_path.iterdir()) == []
