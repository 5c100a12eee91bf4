"""What the NVIDIA driver says of this machine's GPUs, asked through its own library and nothing else.

Functions and constants are those of ``cuda.h`` (CUDA driver API). GPUs are numbered as the driver numbers
them, which honours ``CUDA_VISIBLE_DEVICES``; onnxruntime counts likewise.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from app.errors import DeviceUnavailable

LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"

_SUCCESS = 0
_NO_DEVICE = 100
_COMPUTE_CAPABILITY_MAJOR = 75
_COMPUTE_CAPABILITY_MINOR = 76
_STREAM_DEFAULT = 0
_CAPTURE_MODE_RELAXED = 2
_NAME_BYTES = 256


@dataclass(frozen=True)
class Gpu:
    """A GPU that this process may use.

    Attributes:
        index: as in ``cuda:<index>``.
        name: the product's.
        compute_capability: major and minor.
        total_bytes: its memory.
    """

    index: int
    name: str
    compute_capability: tuple[int, int]
    total_bytes: int


class GpuMemory(NamedTuple):
    """A GPU's memory at a moment, whoever uses it."""

    free_bytes: int
    total_bytes: int


class CudaDriver:
    """The driver, initialised; its methods may be called from any thread.

    Attributes:
        version: the newest CUDA that it runs, major and minor.
        gpus: those it shows to this process.
    """

    def __init__(self, library: Any, *, version: tuple[int, int], gpus: tuple[Gpu, ...]) -> None:
        """Wrap the driver's library, which has been initialised; see `probe`."""
        self._library = library
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self.version = version
        self.gpus = gpus

    def memory_info(self, index: int) -> GpuMemory:
        """A GPU's memory now; takes some microseconds, and the calling thread's context stays as it was.

        Raises:
            DeviceUnavailable: the driver refuses; names its error.
        """
        self._call("cuCtxPushCurrent_v2", self._context(index))
        try:
            # Another thread that captures a graph must not be disturbed, nor disturb this call.
            mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
            self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
            try:
                free, total = ctypes.c_size_t(), ctypes.c_size_t()
                self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
            finally:
                self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        return GpuMemory(free.value, total.value)

    def create_stream(self, index: int) -> int:
        """A new stream with default flags; the GPU's primary context becomes the calling thread's.

        Returns:
            The stream's handle, which lives as long as the process.

        Raises:
            DeviceUnavailable: the driver refuses; names its error.
        """
        self._call("cuCtxSetCurrent", self._context(index))
        stream = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(_STREAM_DEFAULT))
        return stream.value or 0

    def _context(self, index: int) -> ctypes.c_void_p:
        """The primary context, which onnxruntime uses too; retained once and never released."""
        if index not in self._contexts:
            context = ctypes.c_void_p()
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), _device(self._library, index))
            self._contexts[index] = context
        return self._contexts[index]

    def _call(self, function: str, *arguments: object) -> None:
        _call(self._library, function, *arguments)


def probe(load: Callable[[str], Any] = ctypes.CDLL) -> CudaDriver:
    """Load and initialise the driver and list its GPUs; up to some tenths of a second.

    Args:
        load: opens a shared library by name.

    Raises:
        DeviceUnavailable: there is no driver, or it does not start; says which call failed and with what.
    """
    try:
        library = load(LIBRARY)
    except OSError as error:
        raise DeviceUnavailable(
            f"the NVIDIA driver's library {LIBRARY} cannot be loaded ({error}); install the driver, or let "
            "the container have it (docker run --gpus all)",
            has_gpu=False,
        ) from error
    packed = ctypes.c_int()
    _call(library, "cuDriverGetVersion", ctypes.byref(packed))
    version = packed.value // 1000, packed.value % 1000 // 10
    status = library.cuInit(ctypes.c_uint(0))
    if status != _SUCCESS:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise DeviceUnavailable(
            f"the NVIDIA driver (for CUDA {version[0]}.{version[1]}) does not start: cuInit returned "
            f"{_error_text(library, status)}; nvidia-smi shows what it sees, and CUDA_VISIBLE_DEVICES is "
            + ("not set" if visible is None else repr(visible)),
            has_gpu=status != _NO_DEVICE,
        )
    count = ctypes.c_int()
    _call(library, "cuDeviceGetCount", ctypes.byref(count))
    gpus = tuple(_gpu(library, index) for index in range(count.value))
    return CudaDriver(library, version=version, gpus=gpus)


def _gpu(library: Any, index: int) -> Gpu:
    device = _device(library, index)
    name = ctypes.create_string_buffer(_NAME_BYTES)
    _call(library, "cuDeviceGetName", name, ctypes.c_int(_NAME_BYTES), device)
    capability = []
    for attribute in (_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR):
        value = ctypes.c_int()
        _call(library, "cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(attribute), device)
        capability.append(value.value)
    total = ctypes.c_size_t()
    _call(library, "cuDeviceTotalMem_v2", ctypes.byref(total), device)
    return Gpu(index, name.value.decode(errors="replace"), (capability[0], capability[1]), total.value)


def _device(library: Any, index: int) -> ctypes.c_int:
    device = ctypes.c_int()
    _call(library, "cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
    return device


def _call(library: Any, function: str, *arguments: object) -> None:
    """Call a function of the driver.

    Raises:
        DeviceUnavailable: it did not succeed; names the function and the driver's error.
    """
    status = getattr(library, function)(*arguments)
    if status != _SUCCESS:
        raise DeviceUnavailable(
            f"the NVIDIA driver refuses {function}: {_error_text(library, status)}; nvidia-smi shows "
            "the state of the GPUs"
        )


def _error_text(library: Any, status: int) -> str:
    """A CUresult as its name and what it means: ``CUDA_ERROR_NO_DEVICE (no CUDA-capable device ...)``."""
    texts = []
    for function in (library.cuGetErrorName, library.cuGetErrorString):
        text = ctypes.c_char_p()
        known = function(ctypes.c_int(status), ctypes.byref(text)) == _SUCCESS and text.value is not None
        texts.append((text.value or b"").decode(errors="replace") if known else "")
    name, meaning = texts
    return f"{name or f'CUresult {status}'}{f' ({meaning})' if meaning else ''}"
