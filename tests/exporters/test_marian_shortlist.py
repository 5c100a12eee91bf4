"""The reader of Marian's binary shortlists."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marian_writer import shortlist_bytes, with_checksum

from app.errors import CheckpointError
from exporters.marian_shortlist import marian_checksum, read_marian_shortlist

LISTS = [[3, 7], [], [0, 5, 19], *[[i] for i in range(17)]]
VALID = shortlist_bytes(LISTS, num_frequent=4)


def test_the_lists_come_back_as_written() -> None:
    shortlist = read_marian_shortlist(VALID, source="lex.bin")
    assert (shortlist.vocabulary_size, shortlist.num_frequent, shortlist.num_entries) == (20, 4, 16)
    for source_id, expected in enumerate(LISTS):
        # The four frequent ids are candidates anyway.
        np.testing.assert_array_equal(
            shortlist.targets_of(source_id), [target for target in expected if target >= 4]
        )


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=100))
def test_the_checksum_is_that_of_64_bit_arithmetic(body: bytes) -> None:
    content = with_checksum(body)
    assert marian_checksum(content) == struct.unpack_from("<Q", content, 8)[0]


def header(**changes: int) -> bytes:
    fields = {"num_frequent": 4, "best": 50, "num_offsets": 21, "num_targets": 22} | changes
    return with_checksum(struct.pack("<4Q", *fields.values()) + VALID[48:])


def with_word(position: int, value: int, word_format: str) -> bytes:
    body = bytearray(VALID[16:])
    struct.pack_into(word_format, body, position - 16, value)
    return with_checksum(bytes(body))


FIRST_TARGET = 48 + 8 * 21
HUGE = 2**64 - 1
HOSTILE = {
    "empty": (b"", "has 0 bytes, expected at least 48"),
    "cut inside the header": (VALID[:47], "has 47 bytes"),
    "another magic number": (b"\0" + VALID[1:], "starts with 0xF11A48D501341700"),
    "truncated": (VALID[:-1], "has 303 bytes, expected 304"),
    "trailing bytes": (VALID + b"\0", "has 305 bytes, expected 304"),
    "a wrong checksum": (shortlist_bytes(LISTS, num_frequent=4, right_checksum=False), "has the checksum"),
    "a changed target": (VALID[:-12] + b"\1" + VALID[-11:], "has the checksum"),
    "a huge number of offsets": (header(num_offsets=HUGE), f"number of offsets is {HUGE}"),
    "no offsets": (header(num_offsets=0), "number of offsets is 0"),
    "a huge number of targets": (header(num_targets=HUGE), f"number of target ids is {HUGE}"),
    "counts that overflow to the right size": (header(num_targets=22 + 2**62), "number of target ids"),
    "more frequent ids than words": (header(num_frequent=21), "frequent ids is 21, expected at most 20"),
    "an offset beyond the targets": (with_word(56, 23, "<Q"), "an offset is 23, expected at most 22"),
    "a huge offset": (with_word(56, HUGE, "<Q"), f"an offset is {HUGE}"),
    "offsets that fall": (with_word(56, 6, "<Q"), "offsets must rise"),
    "offsets that do not start at 0": (with_word(48, 1, "<Q"), "offsets must rise"),
    "offsets that do not end at the end": (with_word(48 + 8 * 20, 21, "<Q"), "offsets must rise"),
    "a target beyond the vocabulary": (
        with_word(FIRST_TARGET, 20, "<I"),
        "a target id is 20, expected ids below 20",
    ),
    "a target that is negative as int32": (
        with_word(FIRST_TARGET, 2**32 - 1, "<I"),
        "a target id is 4294967295",
    ),
    "targets out of order": (with_word(FIRST_TARGET, 8, "<I"), "strictly ascending"),
    "a target twice": (with_word(FIRST_TARGET, 7, "<I"), "strictly ascending"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_wrong_shortlist_is_refused_by_name_reason_and_remedy(case: str) -> None:
    content, reason = HOSTILE[case]
    with pytest.raises(CheckpointError, match=reason) as caught:
        read_marian_shortlist(content, source="lex.bin")
    assert caught.value.message.startswith("lex.bin: ")
    assert "import without a shortlist" in caught.value.message


@settings(max_examples=200, deadline=None)
@given(
    position=st.integers(16, len(VALID) - 1),
    replacement=st.binary(min_size=1, max_size=8),
    extra=st.integers(-9, 9),
)
def test_no_damage_behind_a_right_checksum_raises_anything_but_a_checkpoint_error(
    position: int, replacement: bytes, extra: int
) -> None:
    content = bytearray(VALID)
    content[position : position + len(replacement)] = replacement
    body = bytes(content[16:extra]) if extra < 0 else bytes(content[16:]) + bytes(extra)
    try:
        shortlist = read_marian_shortlist(with_checksum(body), source="lex.bin")
    except CheckpointError:
        return
    for source_id in range(shortlist.vocabulary_size):
        assert len(shortlist.candidates([source_id])) <= shortlist.vocabulary_size
