"""Exporting cuda-fp16: beside the CPU's variants, at no cost to them, or refused with a reason."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import pytest
import torch
from cuda_models import MODELS, calm, cuda_bundle, cuda_checkpoint
from tiny_models import tiny_checkpoint, tiny_options, tiny_texts
from typer.testing import CliRunner

import exporters.cli as cli_module
from app.bundle import Bundle, Manifest, Variant, open_bundle
from app.bundle.manifest import Verification
from app.errors import CheckpointError, VerificationFailed
from exporters.bundle_checkpoint import read_checkpoint
from exporters.bundle_shortlist import check_takes_shortlist
from exporters.checkpoint import Checkpoint
from exporters.export import export_bundle
from exporters.float16 import LARGEST_FLOAT16, check_fits
from exporters.quantization import quantized
from exporters.verification import require_similar

ALL: tuple[Variant, ...] = ("cpu-int8", "cpu-fp32", "cuda-fp16")
GRAPHS = ("encoder", "step", "beam_step", "guided_step", "copy_state", "copy_cross")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def exported(folder: Path, checkpoint: Checkpoint, variants: Sequence[Variant]) -> Bundle:
    options = tiny_options(variants=tuple(variants))
    return export_bundle(checkpoint, folder, dataclasses.replace(options, verification_texts=tiny_texts(3)))


@pytest.mark.parametrize("name", ["attention post relu", "gated post relu", "ssru pre silu"])
def test_the_new_variant_costs_the_others_nothing(tmp_path: Path, name: str) -> None:
    without = exported(tmp_path / "without", cuda_checkpoint(name), ALL[:2]).manifest
    bundle = exported(tmp_path / "with", cuda_checkpoint(name), ALL)
    files = bundle.manifest.files
    new = {f"{role}.cuda-fp16.onnx" for role in GRAPHS}
    assert files.keys() - without.files.keys() == new
    assert {key: files[key] for key in without.files} == without.files
    assert bundle.manifest.variants.keys() == set(ALL)
    assert {key: graphs for key, graphs in bundle.manifest.variants.items() if key != "cuda-fp16"} == (
        without.variants
    )
    assert set(bundle.manifest.variants["cuda-fp16"].file_names) == new
    assert sum(files[key].size_bytes for key in new) < 150_000
    assert open_bundle(bundle.path) == bundle


@pytest.mark.parametrize("name", list(MODELS))
def test_verification_decodes_the_new_variant_and_reports_it(name: str) -> None:
    reports = {report.variant: report for report in cuda_bundle(name).manifest.verification}
    assert reports["cpu-fp32"].num_identical == reports["cpu-fp32"].num_segments
    assert reports["cuda-fp16"].num_segments == reports["cpu-fp32"].num_segments
    assert 0 < reports["cuda-fp16"].max_score_difference < 0.02


def test_a_bundle_with_all_variants_gives_its_checkpoint_back(tmp_path: Path) -> None:
    bundle = cuda_bundle("attention pre gelu")
    again = exported(tmp_path / "two", read_checkpoint(bundle), ALL[1:])
    assert again.manifest.files == bundle.manifest.files


def test_a_shortlist_can_be_replaced_though_the_gpu_graphs_use_none() -> None:
    check_takes_shortlist(cuda_bundle("attention post relu"))


@pytest.mark.parametrize("parameter", ["encoder.0.ffn.inner.bias", "decoder.1.cross_norm.weight"])
@pytest.mark.parametrize("value", [65505.0, -1e9])
def test_a_vector_beyond_float16_is_named(parameter: str, value: float) -> None:
    checkpoint = cuda_checkpoint("attention post relu")
    weights = {
        key: weight.copy() for key, weight in checkpoint.weights.items() if isinstance(weight, np.ndarray)
    }
    weights[parameter][3] = value
    faulty = quantized(dataclasses.replace(checkpoint, weights=weights))
    with pytest.raises(
        CheckpointError, match=rf"{parameter} holds .* float16 ends at 65504.* leave that variant"
    ):
        check_fits(faulty)
    weights[parameter][3] = np.copysign(LARGEST_FLOAT16, value)
    check_fits(quantized(dataclasses.replace(checkpoint, weights=weights)))


def test_a_matrix_beyond_float16_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    checkpoint = cuda_checkpoint("ssru post relu")
    weights = dict(checkpoint.weights)
    large = np.array(weights["decoder.0.ffn.outer.weight"])
    large[2, 1] = 7e4
    weights["decoder.0.ffn.outer.weight"] = large
    with pytest.raises(CheckpointError, match=r"decoder\.0\.ffn\.outer\.weight holds"):
        exported(tmp_path / "tiny", dataclasses.replace(checkpoint, weights=weights), ALL)
    assert list(tmp_path.iterdir()) == []


def test_activations_beyond_float16_are_found_by_verification(tmp_path: Path) -> None:
    """Each weight fits, and their products do not."""
    checkpoint = calm(tiny_checkpoint(norm="pre"))
    weights = dict(checkpoint.weights)
    for name in ("encoder.0.ffn.inner.weight", "encoder.0.ffn.outer.weight"):
        weights[name] = np.array(weights[name]) * np.float32(3e4)
    faulty = dataclasses.replace(checkpoint, weights=weights)
    check_fits(quantized(faulty))
    exported(tmp_path / "exact", faulty, ALL[:2])
    with pytest.raises(VerificationFailed, match=r"cuda-fp16: .* not a finite number.*leave cuda-fp16 out"):
        exported(tmp_path / "tiny", faulty, ALL)
    assert not (tmp_path / "tiny").exists()


@pytest.mark.parametrize(("num_identical", "passes"), [(9, True), (5, True), (4, False), (0, False)])
def test_fewer_than_half_of_the_segments_alike_are_another_model(num_identical: int, passes: bool) -> None:
    report = Verification(
        variant="cuda-fp16", num_segments=9, num_identical=num_identical, max_score_difference=0.01
    )
    if passes:
        require_similar(report)
    else:
        with pytest.raises(VerificationFailed, match=f"{num_identical} of 9 .*limit 50%"):
            require_similar(report)


def lacking_a_copy(variants: dict[str, Any]) -> None:
    del variants["cuda-fp16"]["copy_state"]


def without_copies(variants: dict[str, Any]) -> None:
    variants["cuda-fp16"] |= {"copy_state": None, "copy_cross": None}


def copies_on_the_cpu(variants: dict[str, Any]) -> None:
    variants["cpu-fp32"] |= {role: variants["cuda-fp16"][role] for role in ("copy_state", "copy_cross")}


def shortlist_on_the_gpu(variants: dict[str, Any]) -> None:
    variants["cuda-fp16"] |= {
        role: name
        for role, name in variants["cpu-fp32"].items()
        if role.startswith("shortlist") or role == "candidates"
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lacking_a_copy, "copy_state and copy_cross must be given together"),
        (without_copies, "cuda-fp16: copy_state and copy_cross are graphs of cuda-fp16"),
        (copies_on_the_cpu, "cpu-fp32: copy_state and copy_cross are graphs of cuda-fp16"),
        (shortlist_on_the_gpu, "no shortlist graphs for a GPU"),
    ],
)
def test_a_manifest_gives_each_variant_its_own_graphs(
    change: Callable[[dict[str, Any]], None], message: str
) -> None:
    document = cuda_bundle("attention post relu").manifest.model_dump(mode="json")
    Manifest.model_validate_json(json.dumps(document))
    change(document["variants"])
    with pytest.raises(pydantic.ValidationError, match=message):
        Manifest.model_validate_json(json.dumps(document))


def test_the_command_exports_it_when_it_is_asked_for(tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(tiny_texts(4)), encoding="utf-8")

    def run(*arguments: object) -> str:
        result = CliRunner(env={"COLUMNS": "400"}).invoke(cli_module.app, [*map(str, arguments)])
        assert result.exit_code == 0, result.output
        return result.stderr

    run("weights", cuda_bundle("ssru pre silu").path, tmp_path / "model")
    default = run("trained", tmp_path / "model", "--out", tmp_path / "default", "--verify-with", texts)
    assert "cpu-fp32: 4 of 4" in default
    assert "cuda-fp16" not in default
    words = run(
        *("trained", tmp_path / "model", "--out", tmp_path / "asked", "--verify-with", texts),
        *("--variants", "cuda-fp16, cpu-fp32"),
    )
    assert "cuda-fp16: 4 of 4 segments as PyTorch" in words
    assert list(open_bundle(tmp_path / "asked").manifest.variants) == ["cpu-fp32", "cuda-fp16"]
