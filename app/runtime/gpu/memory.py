"""Tensors in a device's memory, made once and never moved, and how much of it the service holds."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from app.errors import DeviceUnavailable
from app.runtime.device import Device

Array = npt.NDArray[Any]

_ALIGNMENT_BYTES = 256
"""Of what cudaMalloc returns; kernels that load several elements at a time rely on part of it."""
_MIB = 1 << 20


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that has yet to be made.

    Attributes:
        shape: of all its rows.
        dtype: numpy's element type.
    """

    shape: tuple[int, ...]
    dtype: npt.DTypeLike

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class DeviceTensor:
    """A tensor on a device, zero at first; any rows of its first axis can be bound to a graph, in place."""

    def __init__(self, device: Device, spec: TensorSpec) -> None:
        """Allocate and clear it; on a GPU this waits for the copy."""
        self._device = device
        self._dtype = np.dtype(spec.dtype)
        self._shape = spec.shape
        self._row_bytes = math.prod(spec.shape[1:]) * self._dtype.itemsize
        self._value = onnxruntime.OrtValue.ortvalue_from_numpy(
            np.zeros(spec.shape, self._dtype), device.kind, device.index
        )
        self._address = self._value.data_ptr()

    def bind_input(
        self, binding: onnxruntime.IOBinding, name: str, *, num_rows: int, first_row: int = 0
    ) -> None:
        """Let a graph's input be these rows."""
        binding.bind_input(
            name,
            self._device.kind,
            self._device.index,
            self._dtype.type,
            [num_rows, *self._shape[1:]],
            self._address + first_row * self._row_bytes,
        )

    def bind_output(
        self, binding: onnxruntime.IOBinding, name: str, *, num_rows: int, first_row: int = 0
    ) -> None:
        """Have a graph's output written into these rows."""
        binding.bind_output(
            name,
            self._device.kind,
            self._device.index,
            self._dtype.type,
            [num_rows, *self._shape[1:]],
            self._address + first_row * self._row_bytes,
        )

    def write(self, values: Array) -> None:
        """Copy the whole tensor from the host; it is there when this returns."""
        self._value.update_inplace(values)

    def read(self) -> Array:
        """Copy the whole tensor to the host; of a CPU device it may be the memory itself."""
        return np.asarray(self._value.numpy())


def answers(device: Device) -> bool:
    """Whether the device still keeps a number.

    After a fault such as an illegal address a GPU refuses every call of the process, for ever.
    """
    try:
        tensor = DeviceTensor(device, TensorSpec((1,), np.int32))
        tensor.write(np.ones(1, np.int32))
        return bool(tensor.read()[0] == 1)
    except Exception:  # noqa: BLE001 - onnxruntime has no base class for what a device raises
        return False


class PackedTensors:
    """Small tensors side by side in one piece of a device's memory, so that one copy carries them all.

    Attributes:
        host: the same tensors in the host's memory, by name; `upload` carries them over.
    """

    def __init__(self, device: Device, specs: Mapping[str, TensorSpec]) -> None:
        """Allocate and clear them."""
        self._device = device
        self._specs = dict(specs)
        self._offsets: dict[str, int] = {}
        num_bytes = 0
        for name, spec in specs.items():
            self._offsets[name] = num_bytes
            num_bytes += _aligned(spec.num_bytes)
        self._value = onnxruntime.OrtValue.ortvalue_from_numpy(
            np.zeros(num_bytes, np.uint8), device.kind, device.index
        )
        self._address = self._value.data_ptr()
        self._mirror = np.zeros(num_bytes, np.uint8)
        self.host: dict[str, Array] = self._views(self._mirror)

    @staticmethod
    def num_bytes(specs: Mapping[str, TensorSpec]) -> int:
        """What such tensors take."""
        return sum(_aligned(spec.num_bytes) for spec in specs.values())

    def bind_input(
        self,
        binding: onnxruntime.IOBinding,
        name: str,
        *,
        shape: tuple[int, ...],
        place: str | None = None,
    ) -> None:
        """Let a graph's input be the first elements of the tensor `place`, by default its namesake."""
        place = place or name
        binding.bind_input(
            name,
            self._device.kind,
            self._device.index,
            np.dtype(self._specs[place].dtype).type,
            shape,
            self._address + self._offsets[place],
        )

    def bind_output(self, binding: onnxruntime.IOBinding, name: str, *, shape: tuple[int, ...]) -> None:
        """Have a graph's output written into the first elements of the tensor of its name, in this shape."""
        binding.bind_output(
            name,
            self._device.kind,
            self._device.index,
            np.dtype(self._specs[name].dtype).type,
            shape,
            self._address + self._offsets[name],
        )

    def upload(self) -> None:
        """Copy all of `host` to the device; it is there when this returns."""
        self._value.update_inplace(self._mirror)

    def download(self) -> dict[str, Array]:
        """Copy all from the device; of a CPU device the arrays may be the memory itself."""
        return self._views(np.asarray(self._value.numpy()))

    def _views(self, content: Array) -> dict[str, Array]:
        return {
            name: content[self._offsets[name] : self._offsets[name] + spec.num_bytes]
            .view(spec.dtype)
            .reshape(spec.shape)
            for name, spec in self._specs.items()
        }


class MemoryLedger:
    """Bytes that the service holds on each device: weights as measured, row slots as computed.

    For any thread. What onnxruntime needs besides, while it runs a graph, is not in it.
    """

    def __init__(self) -> None:
        """Nothing is held."""
        # Taken again by the same thread when garbage is collected in between, which gives memory back.
        self._lock = threading.RLock()
        self._held: Counter[Device] = Counter()

    def held_bytes(self, device: Device) -> int:
        """Bytes held there."""
        with self._lock:
            return self._held[device]

    def take(self, device: Device, num_bytes: int, *, what: str, limit_bytes: int | None) -> None:
        """Hold so many bytes more.

        Args:
            device: where.
            num_bytes: how many.
            what: they are for, for the message.
            limit_bytes: most that may be held there, or None.

        Raises:
            DeviceUnavailable: the limit would be passed; nothing is taken then.
        """
        with self._lock:
            held = self._held[device]
            if limit_bytes is not None and held + num_bytes > limit_bytes:
                raise DeviceUnavailable(
                    f"{what} need {_mib(num_bytes)} MiB on {device}, where {_mib(held)} MiB are in use and "
                    f"the limit is {_mib(limit_bytes)} MiB; lower DRAGOMAN_MAX_ROWS or raise "
                    "DRAGOMAN_GPU_MEMORY_MB"
                )
            self._held[device] += num_bytes

    def give_back(self, device: Device, num_bytes: int) -> None:
        """Hold so many bytes less."""
        with self._lock:
            self._held[device] -= num_bytes


LEDGER = MemoryLedger()
"""The process's."""


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _mib(num_bytes: int) -> int:
    return -(-num_bytes // _MIB)
