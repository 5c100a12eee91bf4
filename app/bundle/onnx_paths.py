"""Which files an ONNX graph reads its weights from, found without loading it.

onnxruntime up to at least 1.22 opens whatever path a graph names ("../x", "/etc/x", links), so a
bundle's graphs are looked through before they are loaded. Only the few messages of onnx.proto3 that can
hold a tensor are walked; everything else is skipped by its length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_TENSOR, _ENTRY = "TensorProto", "StringStringEntryProto"
# Message -> field number -> message, as in onnx.proto3.
_FIELDS: Mapping[str, Mapping[int, str]] = {
    "ModelProto": {7: "GraphProto", 20: "TrainingInfoProto", 25: "FunctionProto"},
    "TrainingInfoProto": {1: "GraphProto", 2: "GraphProto"},
    "FunctionProto": {7: "NodeProto", 11: "AttributeProto"},
    "GraphProto": {1: "NodeProto", 5: _TENSOR, 15: "SparseTensorProto"},
    "NodeProto": {5: "AttributeProto"},
    "AttributeProto": {
        5: _TENSOR,
        6: "GraphProto",
        10: _TENSOR,
        11: "GraphProto",
        22: "SparseTensorProto",
        23: "SparseTensorProto",
    },
    "SparseTensorProto": {1: _TENSOR, 2: _TENSOR},
    _TENSOR: {13: _ENTRY},
}


def external_files(model: bytes) -> set[str]:
    """The locations of all external tensors of a serialised ModelProto.

    Raises:
        ValueError: the bytes are not a protobuf message.
    """
    locations: set[str] = set()
    waiting: list[tuple[str, memoryview]] = [("ModelProto", memoryview(model))]
    while waiting:
        message, content = waiting.pop()
        if message == _ENTRY:
            fields = {number: bytes(value) for number, value in _fields(content)}
            if fields.get(1) == b"location":
                locations.add(fields.get(2, b"").decode("utf-8", "backslashreplace"))
            continue
        inside = _FIELDS[message]
        waiting += [(inside[number], value) for number, value in _fields(content) if number in inside]
    return locations


def _fields(content: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Number and content of a message's length-delimited fields, in order."""
    at = 0
    while at < len(content):
        key, at = _varint(content, at)
        number, wire_type = key >> 3, key & 7
        if wire_type == _VARINT:
            _, at = _varint(content, at)
        elif wire_type in (_FIXED64, _FIXED32):
            at += 8 if wire_type == _FIXED64 else 4
        elif wire_type == _BYTES:
            length, at = _varint(content, at)
            if length > len(content) - at:
                raise ValueError("a field is longer than its message")
            yield number, content[at : at + length]
            at += length
        else:
            raise ValueError(f"wire type {wire_type} is not used by ONNX")
    if at != len(content):
        raise ValueError("the message ends inside a field")


def _varint(content: memoryview, at: int) -> tuple[int, int]:
    """The number at `at`, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(content):
            raise ValueError("the message ends inside a number")
        byte = content[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number has more than 10 bytes")
