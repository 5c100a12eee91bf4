"""What is asked of onnxruntime about CUDA, on a machine where it has none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest

from app.runtime import onnx_providers
from app.runtime.onnx_providers import CUDA_PROVIDER, InstalledRuntime, cuda_provider_fault, installed_runtime


def test_the_installed_runtime_is_described_as_it_describes_itself() -> None:
    runtime = installed_runtime()
    assert runtime.version == onnxruntime.__version__
    assert "CPUExecutionProvider" in runtime.providers
    assert str(InstalledRuntime("1.32.0", ())) == "onnxruntime 1.32.0"
    assert str(InstalledRuntime("1.32.0", (), "13.0")) == "onnxruntime 1.32.0 for CUDA 13.0"


def test_the_graph_that_tries_the_provider_is_one_that_onnxruntime_runs() -> None:
    session = onnxruntime.InferenceSession(onnx_providers._SMALLEST_GRAPH, providers=["CPUExecutionProvider"])
    assert session.run(["y"], {"x": np.array([1.5], dtype=np.float16)})[0] == 3


class FakeRuntime:
    """onnxruntime's functions that the trial uses, as if it were the package for GPUs."""

    def __init__(
        self,
        folder: Path,
        *,
        providers: list[str] | None = None,
        fault: str = "",
        total: float | Exception = 2,
    ) -> None:
        self.__file__ = str(folder / "__init__.py")
        self._providers = providers or []
        self._fault = fault
        self._total = total
        self.severities: list[int] = []
        self.asked: list[Any] = []
        self.SessionOptions = SimpleNamespace

    def set_default_logger_severity(self, severity: int) -> None:
        self.severities.append(severity)

    def preload_dlls(self) -> None:
        print("Failed to load libcublas.so.13")

    def InferenceSession(  # noqa: N802
        self, model: bytes, options: Any, *, providers: Any, enable_fallback: int
    ) -> Any:
        assert enable_fallback == 0
        self.asked = providers
        if self._fault:
            raise RuntimeError(self._fault)
        return SimpleNamespace(get_providers=lambda: self._providers, run=self._run)

    def _run(self, _names: None, given: dict[str, np.ndarray]) -> list[np.ndarray]:
        assert given["x"].dtype == np.float16
        if isinstance(self._total, Exception):
            raise self._total
        return [np.array([self._total], np.float16)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "capi").mkdir()
    return tmp_path


def test_a_provider_that_opens_a_session_has_no_fault(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runtime = FakeRuntime(folder, providers=[CUDA_PROVIDER, "CPUExecutionProvider"])
    monkeypatch.setattr(onnx_providers, "onnxruntime", runtime)
    assert cuda_provider_fault(2) is None
    assert runtime.asked == [(CUDA_PROVIDER, {"device_id": "2"})]
    assert runtime.severities == [4, 2]
    assert capsys.readouterr().out == ""  # translations go there


def test_a_provider_that_was_left_out_is_explained_by_the_loader(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = folder / "capi" / "libonnxruntime_providers_cuda.so"
    library.write_bytes(b"no library")
    monkeypatch.setattr(
        onnx_providers, "onnxruntime", FakeRuntime(folder, providers=["CPUExecutionProvider"])
    )
    fault = cuda_provider_fault(0)
    assert fault is not None
    assert str(library) in fault  # the loader's own words


def test_a_provider_that_was_left_out_for_no_reason_that_is_known_is_a_fault_all_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        onnx_providers, "onnxruntime", FakeRuntime(folder, providers=["CPUExecutionProvider"])
    )
    assert cuda_provider_fault(0) == "onnxruntime left its CUDA provider out and gave no reason"


def test_what_onnxruntime_raises_is_the_fault_and_its_log_is_loud_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = FakeRuntime(folder, fault="CUDA failure 2: out of memory")
    monkeypatch.setattr(onnx_providers, "onnxruntime", runtime)
    assert cuda_provider_fault(0) == "RuntimeError: CUDA failure 2: out of memory"
    assert runtime.severities == [4, 2]


@pytest.mark.parametrize(
    ("total", "fault"),
    [
        (RuntimeError("CUDA failure 209: no kernel image is available"), "CUDA failure 209: no kernel image"),
        (0.0, "it computes 1 + 1 = 0.0"),
    ],
)
def test_a_gpu_that_opens_a_session_and_cannot_add_is_at_fault(
    folder: Path, monkeypatch: pytest.MonkeyPatch, total: float | Exception, fault: str
) -> None:
    runtime = FakeRuntime(folder, providers=[CUDA_PROVIDER], total=total)
    monkeypatch.setattr(onnx_providers, "onnxruntime", runtime)
    assert fault in str(cuda_provider_fault(0))
