"""Those who wait for one row group with one priority: their requests take turns. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection

from app.runtime.entry import Entry


class FairQueue:
    """Round robin over requests, the oldest entry first within each.

    A request of thousands of segments delays a newcomer by one of its segments, not by all of them. Nobody
    starves: whoever is at the end of the round is passed by each other request once before its own turn.
    """

    def __init__(self) -> None:
        """Nobody waits."""
        # The request whose turn it is comes first; who has had a turn goes to the end.
        self._entries_of: OrderedDict[int, deque[tuple[int, Entry]]] = OrderedDict()
        self._num_entries = 0

    def __len__(self) -> int:
        """Entries waiting."""
        return self._num_entries

    @property
    def head(self) -> Entry:
        """Whose turn it is; there must be somebody."""
        return self._head_item[1]

    @property
    def head_arrival(self) -> int:
        """The arrival number of whose turn it is."""
        return self._head_item[0]

    @property
    def _head_item(self) -> tuple[int, Entry]:
        return next(iter(self._entries_of.values()))[0]

    def add(self, arrival: int, entry: Entry) -> None:
        """Queue an entry behind those of its request; a request that is new here, at the end of the round.

        Args:
            arrival: grows with every entry.
            entry: who arrives.
        """
        self._entries_of.setdefault(entry.request, deque()).append((arrival, entry))
        self._num_entries += 1

    def pop(self) -> Entry:
        """Take the head out; its request's next turn comes after everybody else's."""
        request, entries = next(iter(self._entries_of.items()))
        _, entry = entries.popleft()
        if entries:
            self._entries_of.move_to_end(request)
        else:
            del self._entries_of[request]
        self._num_entries -= 1
        return entry

    def discard(self, entries: Collection[Entry]) -> None:
        """Take these entries out; a request that has others keeps its turn."""
        gone = frozenset(entries)
        for request in {entry.request for entry in gone}:
            waiting = self._entries_of.get(request, ())
            left = deque(item for item in waiting if item[1] not in gone)
            self._num_entries -= len(waiting) - len(left)
            if left:
                self._entries_of[request] = left
            else:
                self._entries_of.pop(request, None)

    def clear(self) -> list[Entry]:
        """Take everybody out."""
        entries = [entry for waiting in self._entries_of.values() for _, entry in waiting]
        self._entries_of.clear()
        self._num_entries = 0
        return entries
