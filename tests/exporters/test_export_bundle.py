from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from tiny_models import tiny_checkpoint, tiny_options, tiny_texts

import exporters.export as export_module
from app.bundle import MANIFEST_NAME, Bundle, open_bundle
from app.bundle.manifest import Verification
from app.errors import BundleError, CheckpointError, VerificationFailed
from exporters.checkpoint import Checkpoint
from exporters.export import export_bundle
from exporters.graphs import GraphContext
from exporters.quantization import quantized
from exporters.step_graphs import StepKind
from exporters.verification import require_equal, verify


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def shift_last_bias(model: onnx.ModelProto) -> onnx.ModelProto:
    """Add a little to one inline tensor of a decoder step: what a wrong weight would look like."""
    for tensor in model.graph.initializer:
        if tensor.name == "decoder.1.ffn_norm.bias":
            values = numpy_helper.to_array(tensor).copy()
            values[0] += 0.05
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
            return model
    raise AssertionError("the tensor to be changed is not in the graph")


def perturbing(*, of_shortlist: bool) -> Callable[..., onnx.ModelProto]:
    original = export_module.decoder_step

    def build(context: GraphContext, kind: StepKind, *, shortlist: bool) -> onnx.ModelProto:
        model = original(context, kind, shortlist=shortlist)
        return shift_last_bias(model) if shortlist is of_shortlist else model

    return build


def test_an_exported_bundle_opens_and_holds_what_it_says(tmp_path: Path) -> None:
    messages: list[str] = []
    bundle = export_bundle(
        tiny_checkpoint(shortlist=True), tmp_path / "new" / "tiny", tiny_options(), progress=messages.append
    )
    assert open_bundle(tmp_path / "new" / "tiny") == bundle
    names = {path.name for path in bundle.path.iterdir()}
    assert names == {*bundle.manifest.files, MANIFEST_NAME}
    assert bundle.path.stat().st_mode & 0o777 == 0o755
    assert [path.name for path in bundle.path.parent.iterdir()] == ["tiny"]
    assert messages[0] == "building the graphs"
    assert [message.split(":")[0] for message in messages[1:]] == 2 * ["verifying cpu-int8"] + 2 * [
        "verifying cpu-fp32"
    ]


def test_the_same_checkpoint_gives_the_same_bytes(tmp_path: Path) -> None:
    bundles = [export_bundle(tiny_checkpoint(), tmp_path / name, tiny_options()) for name in "ab"]
    assert bundles[0].manifest.files == bundles[1].manifest.files


def test_both_variants_share_their_weights(tmp_path: Path) -> None:
    both = export_bundle(tiny_checkpoint(), tmp_path / "both", tiny_options())
    one = export_bundle(tiny_checkpoint(), tmp_path / "one", tiny_options(variants=("cpu-fp32",)))
    sizes = [bundle.manifest.files["weights.bin"].size_bytes for bundle in (both, one)]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("of_shortlist", [True, False])
def test_a_step_graph_that_differs_from_pytorch_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_shortlist: bool
) -> None:
    monkeypatch.setattr(export_module, "decoder_step", perturbing(of_shortlist=of_shortlist))
    with pytest.raises(VerificationFailed, match="no bundle was written"):
        export_bundle(tiny_checkpoint(shortlist=True), tmp_path / "tiny", tiny_options())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_failing_export_leaves_nothing_and_an_empty_destination_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(export_module, "verify", fail)
    (tmp_path / "tiny").mkdir()
    with pytest.raises(type(error)):
        export_bundle(tiny_checkpoint(), tmp_path / "tiny", tiny_options())
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]
    assert list((tmp_path / "tiny").iterdir()) == []


@pytest.mark.parametrize("kind", ["a file", "a folder with something in it"])
def test_a_taken_destination_is_refused_and_not_touched(tmp_path: Path, kind: str) -> None:
    taken = tmp_path / "tiny"
    inside = taken if kind == "a file" else taken / "notes.txt"
    inside.parent.mkdir(exist_ok=True)
    inside.write_text("mine")
    with pytest.raises(BundleError, match="exists and is not empty"):
        export_bundle(tiny_checkpoint(), taken, tiny_options())
    assert inside.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_an_empty_destination_is_taken(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    export_bundle(tiny_checkpoint(), tmp_path / "tiny", tiny_options())
    assert open_bundle(tmp_path / "tiny").manifest.id == "tiny"


def test_a_diverged_checkpoint_is_refused(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint()
    weights = dict(checkpoint.weights)
    broken = np.array(weights["encoder.0.ffn.inner.weight"])
    broken[0, 0] = np.nan
    weights["encoder.0.ffn.inner.weight"] = broken
    with pytest.raises(CheckpointError, match="not finite"):
        export_bundle(dataclasses.replace(checkpoint, weights=weights), tmp_path / "tiny", tiny_options())
    assert list(tmp_path.iterdir()) == []


def exported(tmp_path: Path) -> tuple[Bundle, Checkpoint]:
    checkpoint = tiny_checkpoint()
    return export_bundle(checkpoint, tmp_path / "tiny", tiny_options()), checkpoint


def test_another_models_weights_do_not_pass_for_this_ones(tmp_path: Path) -> None:
    bundle, checkpoint = exported(tmp_path)
    bias = np.array(checkpoint.weights["output_bias"])
    bias[30] += 5.0
    weights = {**checkpoint.weights, "output_bias": bias}
    other = quantized(dataclasses.replace(checkpoint, weights=weights))
    report = verify(bundle, other, tiny_texts(), variant="cpu-fp32")
    with pytest.raises(VerificationFailed):
        require_equal(report)


def test_texts_that_do_not_fit_cannot_verify_anything(tmp_path: Path) -> None:
    bundle, checkpoint = exported(tmp_path)
    with pytest.raises(VerificationFailed, match="no verification text fits"):
        verify(bundle, quantized(checkpoint), ["word " * 200], variant="cpu-fp32")


@pytest.mark.parametrize(
    ("num_identical", "difference", "passes"),
    [(9, 9e-5, True), (9, 1.1e-4, False), (8, 0.0, False)],  # no number: `verify` itself refuses it
)
def test_fp32_must_agree_in_every_segment_and_in_the_score(
    num_identical: int, difference: float, passes: bool
) -> None:
    report = Verification(
        variant="cpu-fp32", num_segments=9, num_identical=num_identical, max_score_difference=difference
    )
    if passes:
        require_equal(report)
    else:
        with pytest.raises(VerificationFailed):
            require_equal(report)


def test_an_export_that_nothing_would_hold_exact_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="cpu-fp32 must be one of them"):
        export_bundle(tiny_checkpoint(), tmp_path / "bundle", tiny_options(variants=("cpu-int8",)))
    assert list(tmp_path.iterdir()) == []
