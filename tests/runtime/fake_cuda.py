"""A CUDA driver library in Python: the callables that `app.runtime.gpu.cuda_driver` looks up, and no GPU."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

SUCCESS, INVALID_VALUE, NO_DEVICE, INVALID_CONTEXT, SYSTEM_DRIVER_MISMATCH, UNKNOWN = 0, 1, 100, 201, 803, 999
_TEXTS = {
    INVALID_VALUE: ("CUDA_ERROR_INVALID_VALUE", "invalid argument"),
    NO_DEVICE: ("CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"),
    INVALID_CONTEXT: ("CUDA_ERROR_INVALID_CONTEXT", "invalid device context"),
    SYSTEM_DRIVER_MISMATCH: ("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "system has unsupported driver"),
}
_HANDLE_OF_DEVICE = 70
_GLOBAL, _RELAXED = 0, 2


@dataclass
class FakeGpu:
    """One GPU of the fake driver."""

    name: str = "Fake H200"
    compute_capability: tuple[int, int] = (9, 0)
    total_bytes: int = 140 << 30
    free_bytes: int = 100 << 30


@dataclass
class FakeCuda:
    """The library; every function checks what the real one would insist on.

    Attributes:
        gpus: the GPUs.
        version: as cuDriverGetVersion packs it.
        failing: function -> the status it returns instead of working.
        calls: names of all functions called.
        current: the calling thread's context stack, contexts by GPU.
        num_retained: how often each GPU's primary context was retained.
    """

    gpus: list[FakeGpu] = field(default_factory=lambda: [FakeGpu()])
    version: int = 13_000
    failing: dict[str, int] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    current: list[int] = field(default_factory=list)
    num_retained: dict[int, int] = field(default_factory=dict)
    capture_mode: int = _GLOBAL
    num_streams: int = 0
    initialised: bool = False

    def __getattr__(self, name: str) -> Any:
        """A driver's function by its exported name."""
        if not name.startswith("cu"):
            raise AttributeError(name)
        work = getattr(type(self), f"_{name}")

        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name in self.failing:
                return self.failing[name]
            if not self.initialised and name not in (
                "cuInit",
                "cuDriverGetVersion",
                "cuGetErrorName",
                "cuGetErrorString",
            ):
                return 3  # CUDA_ERROR_NOT_INITIALIZED
            status = work(self, *(getattr(argument, "_obj", argument) for argument in arguments))
            return SUCCESS if status is None else int(status)

        return call

    def _gpu(self, device: ctypes.c_int) -> FakeGpu:
        return self.gpus[device.value - _HANDLE_OF_DEVICE]

    def _cuInit(self, flags: ctypes.c_uint) -> int | None:  # noqa: N802
        self.initialised = flags.value == 0
        return None if self.gpus else NO_DEVICE

    def _cuDriverGetVersion(self, version: ctypes.c_int) -> None:  # noqa: N802
        version.value = self.version

    def _cuGetErrorName(self, status: ctypes.c_int, text: ctypes.c_char_p) -> int | None:  # noqa: N802
        return self._text(status, text, part=0)

    def _cuGetErrorString(self, status: ctypes.c_int, text: ctypes.c_char_p) -> int | None:  # noqa: N802
        return self._text(status, text, part=1)

    @staticmethod
    def _text(status: ctypes.c_int, text: ctypes.c_char_p, *, part: int) -> int | None:
        if status.value not in _TEXTS:
            text.value = None
            return INVALID_VALUE
        text.value = _TEXTS[status.value][part].encode()
        return None

    def _cuDeviceGetCount(self, count: ctypes.c_int) -> None:  # noqa: N802
        count.value = len(self.gpus)

    def _cuDeviceGet(self, device: ctypes.c_int, ordinal: ctypes.c_int) -> int | None:  # noqa: N802
        if ordinal.value not in range(len(self.gpus)):
            return 101
        device.value = _HANDLE_OF_DEVICE + ordinal.value  # no index, so that nobody takes it for one
        return None

    def _cuDeviceGetName(self, name: Any, size: ctypes.c_int, device: ctypes.c_int) -> None:  # noqa: N802
        name.value = self._gpu(device).name.encode()[: size.value - 1]

    def _cuDeviceGetAttribute(  # noqa: N802
        self, value: ctypes.c_int, attribute: ctypes.c_int, device: ctypes.c_int
    ) -> None:
        value.value = self._gpu(device).compute_capability[{75: 0, 76: 1}[attribute.value]]

    def _cuDeviceTotalMem_v2(self, total: ctypes.c_size_t, device: ctypes.c_int) -> None:  # noqa: N802
        total.value = self._gpu(device).total_bytes

    def _cuDevicePrimaryCtxRetain(self, context: ctypes.c_void_p, device: ctypes.c_int) -> None:  # noqa: N802
        self.num_retained[device.value - _HANDLE_OF_DEVICE] = (
            self.num_retained.get(device.value - _HANDLE_OF_DEVICE, 0) + 1
        )
        context.value = (1 << 40) + device.value

    def _cuCtxPushCurrent_v2(self, context: ctypes.c_void_p) -> None:  # noqa: N802
        self.current.append((context.value or 0) - (1 << 40) - _HANDLE_OF_DEVICE)

    def _cuCtxPopCurrent_v2(self, context: ctypes.c_void_p) -> None:  # noqa: N802
        context.value = (1 << 40) + _HANDLE_OF_DEVICE + self.current.pop()

    def _cuCtxSetCurrent(self, context: ctypes.c_void_p) -> None:  # noqa: N802
        self.current[-1:] = [(context.value or 0) - (1 << 40) - _HANDLE_OF_DEVICE]

    def _cuThreadExchangeStreamCaptureMode(self, mode: ctypes.c_int) -> None:  # noqa: N802
        mode.value, self.capture_mode = self.capture_mode, mode.value

    def _cuMemGetInfo_v2(self, free: ctypes.c_size_t, total: ctypes.c_size_t) -> int | None:  # noqa: N802
        if not self.current:
            return INVALID_CONTEXT
        assert self.capture_mode == _RELAXED
        gpu = self.gpus[self.current[-1]]
        free.value, total.value = gpu.free_bytes, gpu.total_bytes
        return None

    def _cuStreamCreate(self, stream: ctypes.c_void_p, flags: ctypes.c_uint) -> int | None:  # noqa: N802
        if not self.current:
            return INVALID_CONTEXT
        assert flags.value == 0
        self.num_streams += 1
        stream.value = (1 << 45) + self.num_streams
        return None
