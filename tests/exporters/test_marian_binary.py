"""The reader of Marian's binary format: what it reads right, and what it refuses."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marian_writer import RawItem, SyntheticModel, intgemm8, marian_bytes, padded, plain, text_item

from app.errors import CheckpointError
from exporters.marian_binary import parse_marian_binary, read_marian_binary

MATRIX = np.arange(6, dtype=np.float32).reshape(2, 3) - 2.5
INTEGERS = np.array([[1, -2, 3], [-127, 127, 0]], dtype=np.int8)


def small_items() -> list[RawItem]:
    return [
        plain("weights", MATRIX),
        intgemm8("packed", INTEGERS, 12.5),
        text_item("special:model.yml", "type: transformer\n"),
    ]


def parse(content: bytes) -> dict[str, object]:
    return parse_marian_binary(content, source="model.bin")


def test_float_items_come_back_bit_for_bit() -> None:
    items = parse(marian_bytes(small_items()))
    assert list(items) == ["weights", "packed", "special:model.yml"]
    np.testing.assert_array_equal(items["weights"].float32(), MATRIX)
    assert items["weights"].float32().dtype == np.float32


def test_half_precision_items_come_back_as_float32() -> None:
    items = parse(marian_bytes([plain("weights", MATRIX, "float16")]))
    np.testing.assert_array_equal(items["weights"].float32(), MATRIX)


def test_intgemm8_items_give_integers_in_file_order_and_their_multiplier() -> None:
    item = parse(marian_bytes(small_items()))["packed"]
    np.testing.assert_array_equal(item.int8(), INTEGERS.T.reshape(-1))
    assert item.quantization_multiplier() == 12.5


def test_text_ends_at_its_nul() -> None:
    item = parse(marian_bytes([text_item("special:model.yml", b"a: 1\n\0left over")]))["special:model.yml"]
    assert item.text() == "a: 1\n"


def test_a_file_reads_like_its_bytes_and_may_be_deleted_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(marian_bytes(small_items()))
    items = read_marian_binary(path)
    path.unlink()
    np.testing.assert_array_equal(items["weights"].float32(), MATRIX)


def test_a_decoded_tensor_is_writable_and_independent_of_the_file() -> None:
    item = parse(marian_bytes(small_items()))["weights"]
    item.float32()[:] = 0
    np.testing.assert_array_equal(item.float32(), MATRIX)


@pytest.mark.parametrize(
    ("ask", "name"),
    [
        (lambda item: item.float32(), "packed"),
        (lambda item: item.int8(), "weights"),
        (lambda item: item.quantization_multiplier(), "weights"),
        (lambda item: item.text(), "weights"),
    ],
)
def test_reading_an_item_as_another_type_is_refused(ask: Callable[[object], object], name: str) -> None:
    item = parse(marian_bytes(small_items()))[name]
    with pytest.raises(CheckpointError, match=f"{name} is of type {item.type_name}, expected"):
        ask(item)


@pytest.mark.parametrize("multiplier", [0.0, -1.0, float("nan"), float("inf")])
def test_a_multiplier_that_is_no_positive_number_is_refused(multiplier: float) -> None:
    item = parse(marian_bytes([intgemm8("packed", INTEGERS, multiplier)]))["packed"]
    with pytest.raises(CheckpointError, match="quantisation multiplier of packed"):
        item.quantization_multiplier()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_tensor_that_is_not_finite_is_refused(value: float) -> None:
    item = parse(marian_bytes([plain("weights", np.array([[1.0, value]]))]))["weights"]
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        item.float32()


def test_text_that_is_not_utf8_is_refused() -> None:
    item = parse(marian_bytes([text_item("special:model.yml", b"a: \xff")]))["special:model.yml"]
    with pytest.raises(CheckpointError, match="not UTF-8"):
        item.text()


def change_first(**changes: object) -> bytes:
    first, *others = small_items()
    return marian_bytes([replace(first, **changes), *others])


HUGE = 2**64 - 1
VALID = marian_bytes(small_items())
HOSTILE = {
    "empty": (b"", "has 0 bytes|header would take 16"),
    "shorter than the header": (VALID[:15], "has 15 bytes|header would take 16"),
    "another version": (marian_bytes(small_items(), version=2), "format version is 2, expected 1"),
    "a numpy archive": (b"PK\x03\x04" + bytes(200), "marian-conv"),
    "a huge count": (marian_bytes(small_items(), count=HUGE), f"headers of {HUGE} items"),
    "a count whose size overflows 64 bits": (marian_bytes(small_items(), count=2**60), "headers of"),
    "one item too many": (marian_bytes(small_items(), count=4), "expected"),
    "one item too few": (marian_bytes(small_items(), count=2), "expected"),
    "a huge name": (change_first(name_length=HUGE), f"name of item 0 has {HUGE} bytes"),
    "an empty name": (change_first(name=b"\0"), "name of item 0"),
    "a name of no bytes": (change_first(name=b""), "name of item 0"),
    "a name without NUL": (change_first(name=b"weights"), "NUL"),
    "a name with a NUL inside": (change_first(name=b"wei\0ghts\0"), "NUL"),
    "a name that is not UTF-8": (change_first(name=b"\xff\xfe\0"), "not UTF-8"),
    "a name that occurs twice": (change_first(name=b"packed\0"), "'packed' occurs twice"),
    "an unknown type": (change_first(type_code=0x2345), "element type 0x2345, expected one of"),
    "a type beyond 32 bits": (change_first(type_code=HUGE), "element type 0xffff"),
    "hardware-specific packing": (change_first(type_code=0x4102), "marian-conv"),
    "no dimensions": (change_first(num_dimensions=0, shape=()), "has 0 dimensions"),
    "a huge number of dimensions": (change_first(num_dimensions=HUGE), f"has {HUGE} dimensions"),
    "a negative extent": (change_first(shape=(-2, -3)), r"shape of 'weights' is \(-2, -3\)"),
    "an extent of zero": (change_first(shape=(0, 3)), r"shape of 'weights' is \(0, 3\)"),
    "a shape larger than the data": (change_first(shape=(2, 300)), "2400 and less than 256"),
    "a shape whose size overflows": (change_first(shape=(2**31 - 1,) * 4), "bytes of data"),
    "a shape smaller than the data": (change_first(data=bytes(512)), "24 and less than 256"),
    "data longer than the file": (change_first(data_length=1 << 40), "at most the"),
    "data length that overflows": (change_first(data_length=HUGE), "at most the"),
    "no data": (change_first(data=b""), "has 0 bytes of data"),
    "an intgemm8 item without room for its multiplier": (
        marian_bytes([replace(intgemm8("packed", INTEGERS, 1.0), data=bytes(6))]),
        "10 and less than 256",
    ),
    "trailing bytes": (VALID + b"\0", "1 bytes follow the last item"),
    "a second file behind the first": (VALID + VALID, "bytes follow the last item"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_wrong_file_is_refused_by_name_reason_and_remedy(case: str, tmp_path: Path) -> None:
    content, reason = HOSTILE[case]
    path = tmp_path / "model.bin"
    path.write_bytes(content)
    for read in (lambda: parse(content), lambda: read_marian_binary(path)):
        with pytest.raises(CheckpointError, match=reason) as caught:
            read()
        message = caught.value.message
        assert message.startswith("model.bin: ")
        assert "expected" in message
        assert ";" in message, "the remedy follows a semicolon"


def test_huge_padding_is_refused() -> None:
    items = small_items()
    position = VALID.index(struct.pack("<Q", -(len(header_of(items)) + 8) % 256), len(header_of(items)))
    content = VALID[:position] + struct.pack("<Q", HUGE) + VALID[position + 8 :]
    with pytest.raises(CheckpointError, match="padding before the data"):
        parse(content)


def header_of(items: list[RawItem]) -> bytes:
    size = 16 + sum(32 + len(item.name) + 4 * len(item.shape) for item in items)
    return VALID[:size]


@pytest.mark.parametrize(
    "case", ["a huge count", "data longer than the file", "a shape whose size overflows"]
)
def test_a_claimed_size_is_not_allocated(case: str) -> None:
    content, _ = HOSTILE[case]
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            parse(content)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


def test_a_missing_file_or_a_folder_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "model.bin", tmp_path):
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_marian_binary(path)


MODEL = marian_bytes(SyntheticModel().intgemm8_items())
METADATA_BYTES = 6_000
"""Most mutations should hit the part that has structure."""


@settings(max_examples=300, deadline=None)
@given(
    edits=st.lists(
        st.tuples(
            st.integers(0, METADATA_BYTES) | st.integers(0, len(MODEL) - 1), st.binary(min_size=1, max_size=9)
        ),
        max_size=4,
    ),
    length=st.none() | st.integers(0, len(MODEL)),
)
def test_no_damage_raises_anything_but_a_checkpoint_error(
    edits: list[tuple[int, bytes]], length: int | None
) -> None:
    content = bytearray(MODEL)
    for position, replacement in edits:
        content[position : position + len(replacement)] = replacement
    try:
        items = parse(bytes(content[:length]))
    except CheckpointError:
        return
    assert length is None or length >= len(MODEL), "a truncated file was accepted"
    assert all(len(item.data) >= item.num_elements for item in items.values())


@settings(deadline=None)
@given(st.binary(max_size=400))
def test_no_random_bytes_raise_anything_but_a_checkpoint_error(content: bytes) -> None:
    with pytest.raises(CheckpointError):
        parse(content)


@settings(max_examples=50, deadline=None)
@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 80),
    multiplier=st.floats(0.0625, 1024, width=32),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_intgemm8_matrix_survives_the_round_trip(
    rows: int, columns: int, multiplier: float, seed: int
) -> None:
    integers = np.random.default_rng(seed).integers(-128, 128, (rows, columns)).astype(np.int8)
    item = parse(marian_bytes([intgemm8("packed", integers, multiplier)]))["packed"]
    np.testing.assert_array_equal(item.int8().reshape(columns, rows).T, integers)
    assert item.quantization_multiplier() == multiplier


def test_data_without_any_padding_is_read() -> None:
    unpadded = RawItem(b"weights\0", 0x0404, (2, 3), MATRIX.tobytes())
    assert len(padded(unpadded.data)) > len(unpadded.data)
    np.testing.assert_array_equal(parse(marian_bytes([unpadded]))["weights"].float32(), MATRIX)
