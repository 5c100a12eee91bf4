"""A manifest that states more positions than its graphs have is refused at load and not by a long text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from tiny_models import tiny_checkpoint, tiny_options

from app.bundle import MANIFEST_NAME, Bundle, open_bundle
from app.errors import BundleCorrupt
from app.runtime.limits_proof import prove_limits
from app.runtime.onnx_model import OnnxModel, load_model
from app.runtime.served_model import ServedModel, load_served_model
from exporters.export import export_bundle


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("original") / "tiny"
    export_bundle(tiny_checkpoint(shortlist=True), path, tiny_options())
    return path


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "tiny"))


def limits_of(folder: Path) -> dict[str, Any]:
    limits: dict[str, Any] = json.loads((folder / MANIFEST_NAME).read_text())["limits"]
    return limits


def state(folder: Path, **limits: int) -> Bundle:
    document = json.loads((folder / MANIFEST_NAME).read_text())
    document["limits"] |= limits
    (folder / MANIFEST_NAME).write_text(json.dumps(document))
    return open_bundle(folder)


def load(bundle: Bundle, *, use_shortlist: bool = False) -> ServedModel:
    return load_served_model(bundle, variant="cpu-int8", max_rows=4, use_shortlist=use_shortlist)


@pytest.mark.parametrize("use_shortlist", [False, True])
@pytest.mark.parametrize("limit", ["max_source_tokens", "max_target_tokens"])
def test_one_position_more_than_there_is_is_refused_with_its_number(
    folder: Path, limit: str, use_shortlist: bool
) -> None:
    number = limits_of(folder)[limit] + 1
    bundle = state(folder, **{limit: number})
    with pytest.raises(BundleCorrupt, match=rf"tiny: the manifest states {limit} {number}, and") as caught:
        load(bundle, use_shortlist=use_shortlist)
    assert ("encoder" in caught.value.message) == (limit == "max_source_tokens")


@pytest.mark.parametrize("limit", ["max_source_tokens", "max_target_tokens"])
def test_the_graphs_of_a_gpu_are_held_to_the_limits_too(tmp_path: Path, limit: str) -> None:
    folder = tmp_path / "tiny"
    export_bundle(tiny_checkpoint(), folder, tiny_options(variants=("cpu-fp32", "cuda-fp16")))
    bundle = state(folder, **{limit: limits_of(folder)[limit] + 1})
    with pytest.raises(BundleCorrupt, match=f"the manifest states {limit}"):
        load_served_model(bundle, variant="cuda-fp16", max_rows=4, use_shortlist=False)


@pytest.mark.parametrize("use_shortlist", [False, True])
def test_as_many_positions_as_there_are_are_fine(folder: Path, use_shortlist: bool) -> None:
    model = load(open_bundle(folder), use_shortlist=use_shortlist)
    assert model.max_source_tokens == limits_of(folder)["max_source_tokens"]


class Failing:
    """A session that refuses what a condition says, and otherwise does as the real one."""

    def __init__(
        self, session: onnxruntime.InferenceSession, refuses: Callable[[tuple[int, ...]], bool]
    ) -> None:
        self._session, self._refuses = session, refuses
        self.shapes: list[tuple[int, ...]] = []

    def run(self, names: object, feeds: dict[str, Any]) -> Any:
        self.shapes.append(feeds["source_ids"].shape)
        if self._refuses(self.shapes[-1]):
            raise RuntimeError("no")
        return self._session.run(names, feeds)


def test_an_encoder_that_takes_no_empty_batch_is_run_over_a_source(folder: Path) -> None:
    bundle = open_bundle(folder)
    model = load_model(bundle, variant="cpu-int8", use_shortlist=False)
    encoder = Failing(model.encoder, lambda shape: shape[0] == 0)
    prove_limits(bundle, OnnxModel(**vars(model) | {"encoder": encoder}))
    assert encoder.shapes[1] == (1, bundle.manifest.limits.max_source_tokens)


@pytest.mark.parametrize("kind", ["beam_step", "guided_step"])
def test_every_kind_of_step_is_tried(folder: Path, kind: str) -> None:
    bundle = open_bundle(folder)
    model = load_model(bundle, variant="cpu-int8", use_shortlist=False)

    class Broken:
        def __init__(self, session: onnxruntime.InferenceSession) -> None:
            self._session = session

        def __getattr__(self, name: str) -> Any:
            return getattr(self._session, name)

        def run_with_iobinding(self, _binding: object) -> None:
            raise RuntimeError("no")

    broken = OnnxModel(**vars(model) | {kind: Broken(getattr(model, kind))})
    with pytest.raises(BundleCorrupt, match=f"{kind.removesuffix('_step')}.* search"):
        prove_limits(bundle, broken)
