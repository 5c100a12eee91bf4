"""The one file of weights that all graphs of a bundle share as ONNX external data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, numpy_helper

WEIGHTS_NAME = "weights.bin"
_ALIGNMENT_BYTES = 64
_MIN_EXTERNAL_BYTES = 512


class WeightStore:
    """Gathers tensors by name; equal names are stored once, whatever graph or variant asks.

    Sharing is what keeps a bundle small: the embedding serves the encoder, the decoder and, turned
    over, the output projection; the fp32 variant computes with the int8 variant's weights times
    their scales.
    """

    def __init__(self) -> None:
        """Create an empty store."""
        self._tensors: dict[str, npt.NDArray[Any]] = {}
        self._offsets: dict[str, int] = {}
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Size of the file so far."""
        return self._num_bytes

    def initializer(self, name: str, values: npt.NDArray[Any]) -> TensorProto:
        """An ONNX initializer for the tensor: external data, or inline when it is tiny.

        Raises:
            ValueError: another tensor was stored under this name.
        """
        values = np.ascontiguousarray(values) if values.ndim else values
        known = self._tensors.setdefault(name, values)
        if known is not values and not (known.dtype == values.dtype and np.array_equal(known, values)):
            raise ValueError(f"two different tensors are named {name}")
        if values.nbytes < _MIN_EXTERNAL_BYTES:
            return numpy_helper.from_array(values, name)
        if name not in self._offsets:
            self._offsets[name] = -(-self._num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            self._num_bytes = self._offsets[name] + values.nbytes
        tensor = TensorProto(
            name=name,
            data_type=numpy_helper.from_array(values[:0] if values.ndim else values).data_type,
            dims=values.shape,
            data_location=TensorProto.EXTERNAL,
        )
        for key, value in (
            ("location", WEIGHTS_NAME),
            ("offset", str(self._offsets[name])),
            ("length", str(values.nbytes)),
        ):
            tensor.external_data.add(key=key, value=value)
        return tensor

    def write(self, path: Path) -> None:
        """Write the gathered tensors, little-endian, each at its offset."""
        with path.open("wb") as file:
            for name, offset in sorted(self._offsets.items(), key=lambda item: item[1]):
                file.write(b"\0" * (offset - file.tell()))
                values = self._tensors[name]
                file.write(values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes())
