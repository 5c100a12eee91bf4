"""Reader of Marian's binary model format, version 1.

Layout, little-endian (marian-dev, src/common/binary.cpp, ``loadItems``)::

    u64  version                                     always 1
    u64  number of items
    per item: u64 name length, u64 type, u64 number of dimensions, u64 data length
    per item: the name, its terminating NUL included in the length
    per item: i32 per dimension
    u64  padding, then that many bytes               aligns the data to 256 bytes
    per item: the data; the file ends with the last

No length is believed before it was compared with what is left of the file, so the memory used
is proportional to the size of the file, whatever the file says.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from app.errors import CheckpointError
from exporters.checkpoint import Float32Array, Int8Array

FORMAT_VERSION = 1
MAX_DIMENSIONS = 8
"""Marian writes at most four; more is damage."""
MAX_NAME_BYTES = 1024
DATA_ALIGNMENT_BYTES = 256
"""Marian rounds the size of a tensor's memory up to this; the surplus is in the file."""

_HEADER = struct.Struct("<QQ")
_ITEM_HEADER = struct.Struct("<4Q")
_U64 = struct.Struct("<Q")

# src/common/types.h: the low byte is the size of an element, the others are its class.
_TYPE_NAMES: Mapping[int, str] = {
    0x0101: "int8",
    0x0104: "int32",
    0x0204: "uint32",
    0x0402: "float16",
    0x0404: "float32",
    0x4101: "intgemm8",
}
_NUMPY_TYPES: Mapping[str, np.dtype[np.generic]] = {
    "int8": np.dtype("<i1"),
    "int32": np.dtype("<i4"),
    "uint32": np.dtype("<u4"),
    "float16": np.dtype("<f2"),
    "float32": np.dtype("<f4"),
    "intgemm8": np.dtype("<i1"),
}
_QUANTIZATION_MULTIPLIER_BYTES = 4
_DAMAGED = "the file is damaged or no Marian model; download or convert it again"


@dataclass(frozen=True)
class MarianItem:
    """One tensor, or one block of text, of a Marian file.

    Attributes:
        name: Marian's parameter name, or ``special:...``.
        type_name: element type in Marian's words, for instance ``float32`` or ``intgemm8``.
        shape: as written; every extent is at least 1.
        data: the item's bytes in the file, padding included; read-only.
        source: the file, for messages.
    """

    name: str
    type_name: str
    shape: tuple[int, ...]
    data: memoryview
    source: str

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return math.prod(self.shape)

    def float32(self) -> Float32Array:
        """The values of a float32 or float16 item, float32 [*shape], as a copy.

        Raises:
            CheckpointError: the item is of another type, or holds a NaN or an infinity.
        """
        if self.type_name not in ("float32", "float16"):
            raise self._wrong_type("float32")
        values = self._elements().astype(np.float32).reshape(self.shape)
        if not np.isfinite(values).all():
            raise damaged(self.source, f"{self.name} holds NaN or infinite values", "finite numbers")
        return values

    def int8(self) -> Int8Array:
        """The integers of an intgemm8 item in the order of the file, int8 [num_elements], as a copy.

        Marian keeps them as [out, in] for every matrix but the embedding, whatever the shape says;
        see ``exporters.marian``.

        Raises:
            CheckpointError: the item is of another type.
        """
        if self.type_name != "intgemm8":
            raise self._wrong_type("intgemm8")
        return self._elements().astype(np.int8)

    def quantization_multiplier(self) -> float:
        """The multiplier behind an intgemm8 item's integers: ``real value = integer / multiplier``.

        Raises:
            CheckpointError: the item is of another type, or the multiplier is no positive number.
        """
        if self.type_name != "intgemm8":
            raise self._wrong_type("intgemm8")
        (multiplier,) = struct.unpack_from("<f", self.data, self.num_elements)
        if not (math.isfinite(multiplier) and multiplier > 0.0):
            raise damaged(
                self.source,
                f"the quantisation multiplier of {self.name} is {multiplier}",
                "a positive, finite number",
            )
        return float(multiplier)

    def text(self) -> str:
        """The text of an int8 item, up to its first NUL.

        Raises:
            CheckpointError: the item is of another type or not UTF-8.
        """
        if self.type_name != "int8":
            raise self._wrong_type("int8")
        raw = bytes(self.data[: self.num_elements]).partition(b"\0")[0]
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise damaged(self.source, f"{self.name} is not UTF-8 ({error.reason})", "UTF-8 text") from error

    def _elements(self) -> npt.NDArray[np.generic]:
        return np.frombuffer(self.data, dtype=_NUMPY_TYPES[self.type_name], count=self.num_elements)

    def _wrong_type(self, expected: str) -> CheckpointError:
        return CheckpointError(
            f"{self.source}: {self.name} is of type {self.type_name}, expected {expected}; "
            "convert the model with marian-conv --gemm-type float32 or intgemm8"
        )


def damaged(source: str, found: str, expected: str) -> CheckpointError:
    """The error for a file whose content contradicts the format."""
    return CheckpointError(f"{source}: {found}, expected {expected}; {_DAMAGED}")


def read_marian_binary(path: Path) -> dict[str, MarianItem]:
    """Map a Marian binary model into memory and index its items by name, in the order of the file.

    The items' data are views of the mapped file: nothing is copied until an item is decoded, and
    the mapping is released with the last item.

    Raises:
        CheckpointError: the file cannot be read, is damaged, or holds an element type that this
            reader does not know.
    """
    source = path.name
    try:
        with path.open("rb") as file:
            num_bytes = file.seek(0, 2)
            if num_bytes < _HEADER.size:
                raise damaged(source, f"the file has {num_bytes} bytes", f"at least {_HEADER.size}")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror or type(error).__name__}), "
            "expected a readable Marian model file; check the path and its permissions"
        ) from error
    return parse_marian_binary(memoryview(mapped), source=source)


def parse_marian_binary(content: memoryview | bytes, *, source: str) -> dict[str, MarianItem]:
    """Index the items of a Marian binary model held in memory; ``source`` names it in messages.

    Raises:
        CheckpointError: see ``read_marian_binary``.
    """
    cursor = _Cursor(memoryview(content), source)
    version, num_items = _HEADER.unpack(cursor.take(_HEADER.size, "the header"))
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{source}: the format version is {version}, expected {FORMAT_VERSION} (Marian's binary format); "
            "a .npz model must be converted with marian-conv first"
        )
    headers = list(
        _ITEM_HEADER.iter_unpack(
            cursor.take(num_items * _ITEM_HEADER.size, f"the headers of {num_items} items")
        )
    )
    names = [_name(cursor, length, index) for index, (length, _, _, _) in enumerate(headers)]
    shapes = [_shape(cursor, header[2], name) for header, name in zip(headers, names, strict=True)]
    (num_padding_bytes,) = _U64.unpack(cursor.take(_U64.size, "the length of the padding"))
    cursor.take(num_padding_bytes, "the padding before the data")

    items: dict[str, MarianItem] = {}
    for (_, type_code, _, num_data_bytes), name, shape in zip(headers, names, shapes, strict=True):
        if name in items:
            raise damaged(source, f"the name {name!r} occurs twice", "unique names")
        item = MarianItem(
            name=name,
            type_name=_type_name(type_code, name, source),
            shape=shape,
            data=cursor.take(num_data_bytes, f"the data of {name!r}").toreadonly(),
            source=source,
        )
        _check_size(item)
        items[name] = item
    if cursor.num_left:
        raise damaged(source, f"{cursor.num_left} bytes follow the last item", "the end of the file")
    return items


class _Cursor:
    """A position in the file that cannot leave it."""

    def __init__(self, content: memoryview, source: str) -> None:
        self._content = content
        self._position = 0
        self.source = source

    @property
    def num_left(self) -> int:
        return len(self._content) - self._position

    def take(self, num_bytes: int, what: str) -> memoryview:
        if num_bytes > self.num_left:
            raise damaged(
                self.source,
                f"{what} would take {num_bytes} bytes at offset {self._position}",
                f"at most the {self.num_left} bytes left in the file",
            )
        taken = self._content[self._position : self._position + num_bytes]
        self._position += num_bytes
        return taken


def _name(cursor: _Cursor, num_bytes: int, index: int) -> str:
    if num_bytes > MAX_NAME_BYTES:
        raise damaged(
            cursor.source, f"the name of item {index} has {num_bytes} bytes", f"at most {MAX_NAME_BYTES}"
        )
    raw = bytes(cursor.take(num_bytes, f"the name of item {index}"))
    if len(raw) < 2 or raw.find(b"\0") != len(raw) - 1:
        raise damaged(
            cursor.source, f"the name of item {index} has no NUL at its end alone", "a NUL-terminated name"
        )
    try:
        return raw[:-1].decode("utf-8")
    except UnicodeDecodeError as error:
        raise damaged(
            cursor.source, f"the name of item {index} is not UTF-8 ({error.reason})", "a UTF-8 name"
        ) from error


def _shape(cursor: _Cursor, num_dimensions: int, name: str) -> tuple[int, ...]:
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise damaged(
            cursor.source, f"{name!r} has {num_dimensions} dimensions", f"between 1 and {MAX_DIMENSIONS}"
        )
    raw = cursor.take(4 * num_dimensions, f"the shape of {name!r}")
    shape = struct.unpack(f"<{num_dimensions}i", raw)
    if min(shape) < 1:
        raise damaged(cursor.source, f"the shape of {name!r} is {shape}", "extents of at least 1")
    return shape


def _type_name(type_code: int, name: str, source: str) -> str:
    if type_code not in _TYPE_NAMES:
        raise CheckpointError(
            f"{source}: {name!r} has the element type 0x{type_code:04x}, expected one of "
            f"{', '.join(_TYPE_NAMES.values())}; "
            "convert the model with marian-conv --gemm-type float32 or intgemm8"
        )
    return _TYPE_NAMES[type_code]


def _check_size(item: MarianItem) -> None:
    """Compare an item's shape with the length of its data."""
    num_needed = item.num_elements * _NUMPY_TYPES[item.type_name].itemsize
    if item.type_name == "intgemm8":
        num_needed += _QUANTIZATION_MULTIPLIER_BYTES
    num_surplus = len(item.data) - num_needed
    if not 0 <= num_surplus < DATA_ALIGNMENT_BYTES:
        raise damaged(
            item.source,
            f"{item.name!r}, {item.type_name} of shape {item.shape}, has {len(item.data)} bytes of data",
            f"{num_needed} and less than {DATA_ALIGNMENT_BYTES} bytes of padding",
        )
