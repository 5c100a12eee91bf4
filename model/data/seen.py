"""A set of 64-bit hashes that takes little more than their own bytes."""

from __future__ import annotations

import hashlib
from array import array

_NUM_SLOTS_AT_FIRST = 1 << 12


class SeenTexts:
    """Which texts came before, by a BLAKE2b hash of 8 bytes each; 12 to 24 bytes of memory a text.

    Among n texts a new one is taken for a known one with a probability of n / 2**64.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self._slots = array("Q", bytes(8 * _NUM_SLOTS_AT_FIRST))  # 0: free
        self._num_used = 0

    def __len__(self) -> int:
        """Different texts."""
        return self._num_used

    def __contains__(self, text: str) -> bool:
        """Whether the text was added."""
        return self._slots[self._place(_hash(text))] != 0

    def add(self, text: str) -> None:
        """Remember a text."""
        digest = _hash(text)
        place = self._place(digest)
        if not self._slots[place]:
            self._slots[place] = digest
            self._num_used += 1
            if 3 * self._num_used > 2 * len(self._slots):
                self._grow()

    def _place(self, digest: int) -> int:
        """Where a hash lies, or the free place where it would (linear probing)."""
        slots = self._slots
        mask = len(slots) - 1
        place = digest & mask
        while slots[place] and slots[place] != digest:
            place = (place + 1) & mask
        return place

    def _grow(self) -> None:
        known = self._slots
        self._slots = array("Q", bytes(2 * len(known) * known.itemsize))
        for digest in known:
            if digest:
                self._slots[self._place(digest)] = digest


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") or 1
