"""A bundle gives back the checkpoint it was made from: its module, its files, its scales."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from tiny_models import tiny_checkpoint, tiny_options

from app.bundle import Bundle, Variant, default_directory, open_bundle
from app.errors import CheckpointError
from exporters.bundle_checkpoint import read_checkpoint
from exporters.checkpoint import AlignmentHeads, Checkpoint, QuantizedWeight
from exporters.export import _write_graphs, export_bundle, without_unknown
from exporters.quantization import quantized
from exporters.torch_reference import to_module
from model.saved_model import parameter_shapes

SHIPPED = ("en-pt", "pt-en")
KINDS: dict[str, dict[str, object]] = {
    "attention": {},
    "ssru": {"decoder_cell": "ssru", "positions": "halves"},
    "gated": {"decoder_cell": "gated_attention", "decoder_query_heads": 8},
    "gated, heads as elsewhere": {"decoder_cell": "gated_attention", "norm": "pre"},
    "more queries": {"decoder_query_heads": 12},
    "pre": {"norm": "pre", "activation": "gelu", "layer_norm_epsilon": 1e-5, "start_id": 7},
    "silu": {
        "decoder_cell": "ssru",
        "activation": "silu",
        "eos_id": 2,
        "encoder_layers": 1,
        "d_model": 2 * 16,
    },
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def matrix_names(checkpoint: Checkpoint) -> list[str]:
    return [name for name, shape in parameter_shapes(checkpoint.config).items() if len(shape) == 2]


def assert_same_module(checkpoint: Checkpoint, other: Checkpoint) -> None:
    ours, theirs = to_module(checkpoint).state_dict(), to_module(other).state_dict()
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def exported(checkpoint: Checkpoint, folder: Path, *variants: Variant) -> Bundle:
    """A bundle verified on one sentence; other tests see to it that exports are exact."""
    options = tiny_options("tiny", variants or ("cpu-int8", "cpu-fp32"))
    options = dataclasses.replace(options, verification_texts=options.verification_texts[:1])
    return export_bundle(checkpoint, folder, options)


def assert_same_files(checkpoint: Checkpoint, bundle: Bundle, folder: Path) -> None:
    """Exporting the checkpoint again gives the bundle's graphs and weights."""
    limits = bundle.manifest.limits
    options = dataclasses.replace(
        tiny_options(variants=tuple(bundle.manifest.variants)),
        max_source_tokens=limits.max_source_tokens,
        max_target_tokens=limits.max_target_tokens,
    )
    folder.mkdir()
    _write_graphs(quantized(without_unknown(checkpoint)), folder, options)
    written = {path.name for path in folder.iterdir()}
    assert written == {name for name in bundle.manifest.files if name.endswith((".onnx", "weights.bin"))}
    for name in written:
        assert (folder / name).read_bytes() == bundle.file(name).read_bytes(), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_comes_back_out_of_its_bundle(tmp_path: Path, kind: str) -> None:
    original = tiny_checkpoint(shortlist=True, **KINDS[kind])
    bundle = exported(original, tmp_path / "b")
    back = read_checkpoint(bundle)
    config = dataclasses.replace(original.config, dropout=back.config.dropout)
    assert back.config == config
    assert_same_module(back, quantized(without_unknown(original)))
    assert back.shortlist == original.shortlist
    assert back.tokenizer == original.tokenizer
    assert back.activation_scales == {}
    assert (back.alignment, back.unknown_id) == (original.alignment, original.unknown_id)
    assert_same_files(back, bundle, tmp_path / "again")


def test_a_bundle_of_float32_graphs_alone_can_be_read(tmp_path: Path) -> None:
    original = tiny_checkpoint(activation_scales={"encoder.0.ffn.inner.weight": 0.1})
    bundle = exported(original, tmp_path / "b", "cpu-fp32")
    back = read_checkpoint(bundle)
    assert_same_module(back, quantized(without_unknown(original)))
    assert (back.activation_scales, back.shortlist) == ({}, None)


@pytest.mark.parametrize("kind", ["attention", "ssru", "gated"])
@pytest.mark.parametrize("shared", [True, False], ids=["together", "one by one"])
def test_activation_scales_come_back(tmp_path: Path, kind: str, shared: bool) -> None:
    original = tiny_checkpoint(**KINDS[kind])
    names = matrix_names(original)
    # One layer has none, so its rows are scaled by their own largest value.
    scales = {name: 0.03 if shared else 0.01 * (1 + n) for n, name in enumerate(names) if n != 3}
    original = dataclasses.replace(original, activation_scales=scales)
    bundle = exported(original, tmp_path / "b")
    back = read_checkpoint(bundle)
    assert back.activation_scales == pytest.approx(scales, rel=1e-6)
    assert_same_files(back, bundle, tmp_path / "again")


def test_integers_of_an_importer_come_back_as_they_were(tmp_path: Path) -> None:
    choice = np.random.default_rng(3)
    original = tiny_checkpoint(decoder_cell="ssru")
    weights = dict(original.weights)
    for name in matrix_names(original):
        values = choice.integers(-127, 128, np.shape(weights[name])).astype(np.int8)
        weights[name] = QuantizedWeight(values, np.array(choice.uniform(1e-3, 1e-2), np.float32))
    original = dataclasses.replace(original, weights=weights)
    back = read_checkpoint(exported(original, tmp_path / "b"))
    for name in matrix_names(original):
        before, after = weights[name], back.weights[name]
        assert isinstance(before, QuantizedWeight)
        assert isinstance(after, QuantizedWeight)
        assert np.array_equal(before.values, after.values)
        assert before.scale.shape == after.scale.shape
        assert np.array_equal(before.scale, after.scale)


@pytest.mark.parametrize(
    "alignment", [AlignmentHeads(layer=0), AlignmentHeads(heads=(1, 3)), AlignmentHeads(layer=0, heads=(2,))]
)
def test_alignment_heads_come_back(tmp_path: Path, alignment: AlignmentHeads) -> None:
    original = dataclasses.replace(tiny_checkpoint(), alignment=alignment)
    bundle = exported(original, tmp_path / "b", "cpu-fp32")
    assert read_checkpoint(bundle).alignment == alignment


@pytest.mark.parametrize("name", SHIPPED)
def test_the_shipped_bundles_come_back_file_by_file(name: str, tmp_path: Path) -> None:
    bundle = open_bundle(default_directory() / name, verify=False)
    back = read_checkpoint(bundle)
    assert back.activation_scales.keys() == set(matrix_names(back))
    assert_same_files(back, bundle, tmp_path / "again")


def test_a_bundle_without_float32_graphs_is_refused(tmp_path: Path) -> None:
    bundle = exported(tiny_checkpoint(), tmp_path / "b")
    variants = {"cpu-int8": bundle.manifest.variants["cpu-int8"]}
    lacking = Bundle(bundle.path, bundle.manifest.model_copy(update={"variants": variants}))
    with pytest.raises(CheckpointError, match="bundle tiny has no cpu-fp32 graphs"):
        read_checkpoint(lacking)


def test_a_graph_of_another_kind_is_refused(tmp_path: Path) -> None:
    bundle = exported(tiny_checkpoint(), tmp_path / "b", "cpu-fp32")
    path = bundle.path / "step.cpu-fp32.onnx"
    whole = onnx.load(str(path), load_external_data=False)
    for position, tensor in enumerate(whole.graph.initializer):
        if tensor.name == "decoder.0.self_norm.bias":
            del whole.graph.initializer[position]
            break
    for content, words in (
        (whole.SerializeToString(), "there is no tensor decoder.0.self_norm.bias"),
        (b"\xff\xff", "not an ONNX graph"),
    ):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=words):
            read_checkpoint(bundle)
