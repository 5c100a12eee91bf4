"""Reader of Marian's binary lexical shortlist.

Layout, little-endian (marian-dev, src/data/shortlist.cpp, ``BinaryShortlistGenerator::load``)::

    u64  magic 0xF11A48D5013417F5
    u64  checksum of all that follows                (src/common/hash.h, ``hashMem``)
    u64  frequent                                    ids below it are always candidates
    u64  best                                        longest list; informative
    u64  number of offsets (V + 1), u64 number of ids
    u64  per offset; u32 per id

The ids of each source token are in ascending order, so the file keeps no trace of their probabilities.
"""

from __future__ import annotations

import struct

import numpy as np

from app.decoding.shortlist import MAX_ENTRIES, MAX_VOCABULARY_SIZE, Shortlist
from app.errors import CheckpointError

MAGIC = 0xF11A48D5013417F5

_HEADER = struct.Struct("<6Q")
_CHECKSUM_START = 16
_U64_MASK = (1 << 64) - 1


def marian_checksum(content: bytes) -> int:
    """Marian's hash of the content after the checksum field, in whole 64-bit words.

    ``seed ^= word + 0x9e3779b9 + (seed << 6) + (seed >> 2)``, boost's hash_combine.
    """
    end = len(content) - (len(content) - _CHECKSUM_START) % 8
    seed = 0
    for (word,) in struct.iter_unpack("<Q", memoryview(content)[_CHECKSUM_START:end]):
        seed ^= (word + 0x9E3779B9 + (seed << 6) + (seed >> 2)) & _U64_MASK
    return seed


def read_marian_shortlist(content: bytes, *, source: str) -> Shortlist:
    """Decode a ``lex.*.bin`` file; ``source`` names it in messages.

    Raises:
        CheckpointError: the file is no Marian shortlist, or damaged.
    """

    def damaged(found: str, expected: str) -> CheckpointError:
        return CheckpointError(
            f"{source}: {found}, expected {expected}; the file is damaged or no Marian binary shortlist, "
            "download it again or import without a shortlist"
        )

    if len(content) < _HEADER.size:
        raise damaged(f"the file has {len(content)} bytes", f"at least {_HEADER.size}")
    magic, checksum, num_frequent, _, num_offsets, num_targets = _HEADER.unpack_from(content)
    if magic != MAGIC:
        raise damaged(f"the file starts with 0x{magic:016X}", f"0x{MAGIC:016X}")
    if not 2 <= num_offsets <= MAX_VOCABULARY_SIZE + 1:
        raise damaged(f"the number of offsets is {num_offsets}", f"2 to {MAX_VOCABULARY_SIZE + 1}")
    if num_targets > MAX_ENTRIES:
        raise damaged(f"the number of target ids is {num_targets}", f"at most {MAX_ENTRIES}")
    num_expected_bytes = _HEADER.size + 8 * num_offsets + 4 * num_targets
    if len(content) != num_expected_bytes:
        raise damaged(f"the file has {len(content)} bytes", f"{num_expected_bytes} as its header announces")
    actual = marian_checksum(content)
    if checksum != actual:
        raise damaged(
            f"the content has the checksum 0x{actual:016X}", f"0x{checksum:016X} as its header says"
        )
    offsets = np.frombuffer(content, dtype="<u8", count=num_offsets, offset=_HEADER.size)
    targets = np.frombuffer(content, dtype="<u4", count=num_targets, offset=_HEADER.size + 8 * num_offsets)
    if offsets.max() > num_targets:
        raise damaged(f"an offset is {offsets.max()}", f"at most {num_targets}")
    if targets.max(initial=0) >= num_offsets - 1:
        raise damaged(f"a target id is {targets.max()}", f"ids below {num_offsets - 1}")
    if num_frequent > num_offsets - 1:
        raise damaged(f"the number of frequent ids is {num_frequent}", f"at most {num_offsets - 1}")
    try:
        return Shortlist(offsets.astype(np.int64), targets.astype(np.int32), num_frequent=num_frequent)
    except ValueError as error:
        raise damaged(str(error), "consistent lists") from error
