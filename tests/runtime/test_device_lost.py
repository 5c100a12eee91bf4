"""A GPU that answers nothing any more ends its worker; one that refuses a call, or is full, does not."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
from tiny_models import tiny_checkpoint, tiny_options

from app.runtime.device import Device
from app.runtime.gpu.memory import answers
from app.runtime.gpu.model import DeviceModel, load_device_model
from app.runtime.gpu.runner import DeviceRunner
from app.runtime.runner import DeviceLost, SourceRow
from exporters.export import export_bundle


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DeviceModel:
    folder = tmp_path_factory.mktemp("lost") / "tiny"
    bundle = export_bundle(tiny_checkpoint(), folder, tiny_options(variants=("cpu-fp32", "cuda-fp16")))
    return load_device_model(bundle, variant="cuda-fp16", device=Device())


def _step(runner: DeviceRunner) -> None:
    runner.step(0, np.zeros(1, np.int64), np.zeros(1, np.int64))


def _seated(model: DeviceModel) -> DeviceRunner:
    runner = DeviceRunner(model, max_rows=2)
    runner.admit(0, [SourceRow(slot=0, source_ids=[5, 6, model.manifest.tokens.eos_id], max_target_tokens=4)])
    return runner


def _fails(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, message: str) -> None:
    def fail(*given: Any, **options: Any) -> Any:
        raise RuntimeError(message)

    monkeypatch.setattr(owner, name, fail)


def test_a_device_that_keeps_a_number_answers():
    assert answers(Device())


def test_a_call_that_fails_on_a_device_that_answers_is_only_that(model, monkeypatch):
    runner = _seated(model)
    with monkeypatch.context() as fault:
        _fails(fault, onnxruntime.InferenceSession, "run_with_iobinding", "CUDNN failure 8")
        with pytest.raises(RuntimeError, match="CUDNN failure 8"):
            _step(runner)
    _step(runner)


def test_a_device_that_answers_nothing_is_lost(model, monkeypatch):
    runner = _seated(model)
    lost = "CUDA failure 700: an illegal memory access was encountered"
    _fails(monkeypatch, onnxruntime.InferenceSession, "run_with_iobinding", lost)
    _fails(monkeypatch, onnxruntime.OrtValue, "update_inplace", lost)

    with pytest.raises(DeviceLost, match="cpu answers nothing since CUDA failure 700"):
        _step(runner)


def test_a_full_device_is_not_lost(model, monkeypatch):
    runner = _seated(model)
    full = "Failed to allocate memory for requested buffer of size 1048576"
    _fails(monkeypatch, onnxruntime.InferenceSession, "run_with_iobinding", full)
    _fails(monkeypatch, onnxruntime.OrtValue, "ortvalue_from_numpy", full)

    with pytest.raises(RuntimeError, match="Failed to allocate"):
        _step(runner)
