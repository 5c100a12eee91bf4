"""Whose time is up: the deadlines of the entries of one scheduler. Pure; the time comes in as a value."""

from __future__ import annotations

import heapq
from collections.abc import Container

from app.runtime.entry import Entry

_MIN_KEPT = 64
"""So few are never worth tidying up."""


class Deadlines:
    """Entries by deadline. Those that left in time are forgotten in passing, so they do not pile up."""

    def __init__(self) -> None:
        """Nobody has a deadline."""
        self._heap: list[tuple[float, int, Entry]] = []
        self._num_watched = 0

    def __len__(self) -> int:
        """Entries kept, those that left in time and are not forgotten yet included."""
        return len(self._heap)

    def watch(self, entry: Entry, *, present: Container[Entry], num_present: int) -> None:
        """Remember an entry's deadline, if it has one.

        Args:
            entry: the newcomer, already one of those present.
            present: everybody who has not left.
            num_present: how many they are.
        """
        if entry.deadline_s is None:
            return
        if len(self._heap) > max(_MIN_KEPT, 2 * num_present):
            self._heap = [item for item in self._heap if item[2] in present]
            heapq.heapify(self._heap)
        # The number keeps the order of those with one deadline, and entries themselves have none.
        heapq.heappush(self._heap, (entry.deadline_s, self._num_watched, entry))
        self._num_watched += 1

    def expired(self, now_s: float) -> list[Entry]:
        """Take out everybody whose deadline has passed, whether or not they left before."""
        entries = []
        while self._heap and self._heap[0][0] <= now_s:
            entries.append(heapq.heappop(self._heap)[2])
        return entries
