"""What the installed onnxruntime can run on, and whether its CUDA part loads."""

from __future__ import annotations

import contextlib
import ctypes
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime

CUDA_PROVIDER = "CUDAExecutionProvider"
_CUDA_LIBRARIES = ("libonnxruntime_providers_cuda.so", "onnxruntime_providers_cuda.dll")
_WARNING, _FATAL = 2, 4
"""Severities of onnxruntime's log; the former is its default."""
_SMALLEST_GRAPH = bytes.fromhex(
    "08083a350a0e0a01780a017812017922034164641201675a0f0a0178120a0a08080a12040a020801"
    "620f0a0179120a0a08080a12040a02080142040a00100d"
)
"""An ONNX model of one node, y = Add(x, x), both float16 [1]; IR version 8, operator set 13.

An addition and no copy: it needs a kernel that was compiled for this GPU.
"""


@dataclass(frozen=True)
class InstalledRuntime:
    """The onnxruntime of this environment.

    Attributes:
        version: its own.
        providers: execution providers that it was built with, whether or not their libraries load.
        cuda_version: the CUDA that it was built for, such as ``13.0``; empty without one.
    """

    version: str
    providers: tuple[str, ...]
    cuda_version: str = ""

    def __str__(self) -> str:
        """``onnxruntime 1.32.0 for CUDA 13.0``."""
        return f"onnxruntime {self.version}" + (f" for CUDA {self.cuda_version}" if self.cuda_version else "")


def installed_runtime() -> InstalledRuntime:
    """The onnxruntime of this environment; loads nothing."""
    return InstalledRuntime(
        onnxruntime.__version__,
        tuple(onnxruntime.get_available_providers()),
        str(getattr(onnxruntime, "cuda_version", "") or ""),
    )


def cuda_provider_fault(index: int) -> str | None:
    """Load the CUDA provider and have it add two numbers; takes as long as the first real session would.

    onnxruntime itself goes on with the CPU where that fails, and says so in its log alone.

    Args:
        index: which of the visible GPUs.

    Returns:
        None if it works, else why not, in the loader's or onnxruntime's words.
    """
    _load_installed_libraries()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _FATAL
    onnxruntime.set_default_logger_severity(_FATAL)  # what it would print is what this function returns
    try:
        session = onnxruntime.InferenceSession(
            _SMALLEST_GRAPH,
            options,
            providers=[(CUDA_PROVIDER, {"device_id": str(index)})],
            enable_fallback=0,
        )
        if CUDA_PROVIDER not in session.get_providers():
            return _loader_fault() or "onnxruntime left its CUDA provider out and gave no reason"
        (total,) = session.run(None, {"x": np.ones(1, np.float16)})
    except Exception as error:  # noqa: BLE001 - onnxruntime has no base class for what its providers raise
        return _loader_fault() or f"{type(error).__name__}: {error}"
    finally:
        onnxruntime.set_default_logger_severity(_WARNING)
    return None if total[0] == 2 else f"it computes 1 + 1 = {total[0]}"


def _load_installed_libraries() -> None:
    """Load CUDA's libraries from their Python packages, where there are any."""
    preload = getattr(onnxruntime, "preload_dlls", None)
    if preload is not None:
        # It prints what it does not find where translations go; whether the provider loads is what counts.
        with contextlib.redirect_stdout(io.StringIO()):
            preload()


def _loader_fault() -> str | None:
    """Why the provider's library does not load; to be asked only after onnxruntime has tried.

    Loaded by anybody else first, the library would not find its host.
    """
    folder = Path(onnxruntime.__file__).parent / "capi"
    for path in (folder / name for name in _CUDA_LIBRARIES):
        if path.is_file():
            try:
                ctypes.CDLL(str(path))
            except OSError as error:
                return str(error)
            return None
    return None
