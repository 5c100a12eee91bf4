"""Who waits and who runs. Pure: no thread, no clock, no model.

Waiting entries are kept in arrival order per row group. At every step `schedule` seats the oldest
entries whose group has room, as many as the token budget allows; the oldest of all is never passed
over while its group has room, and within a group nobody overtakes, so none is starved. Under load a
group takes newcomers a few at a time, since encoding them together is cheaper.
Groups with running rows take turns (`next_group`): short sentences do not wait for a long one to
finish, nor the reverse.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from app.runtime.entry import Entry
from app.runtime.runner import RowGroup
from app.runtime.slots import RowSlots, SlotMove


@dataclass(frozen=True)
class Admission:
    """An entry that joins the running rows now."""

    entry: Entry
    group: int
    slot: int


@dataclass(frozen=True)
class Departure:
    """An entry that left its slot, and the copy that keeps the rows dense."""

    entry: Entry
    group: int
    move: SlotMove | None


class Scheduler:
    """Decides, step by step, which entries of one model run."""

    def __init__(
        self, groups: Sequence[RowGroup], *, max_admission_tokens: int, min_newcomers: int = 1
    ) -> None:
        """Create an empty schedule.

        Args:
            groups: the runner's row groups; those of one beam size with the shortest source length first.
            max_admission_tokens: source tokens encoded at most between two steps, so that
                newcomers do not stall running rows; the oldest entry is admitted even alone above it.
            min_newcomers: while more wait for a group than it has free slots, it takes newcomers only
                this many at once, or a quarter of its slots if that is less: encoding a few sentences
                together is cheaper than one by one.
        """
        self._min_newcomers = min_newcomers
        self._groups = tuple(groups)
        self._max_admission_tokens = max_admission_tokens
        self._waiting: list[deque[tuple[int, Entry]]] = [deque() for _ in groups]
        self._running: list[RowSlots[Entry]] = [RowSlots(group.max_rows) for group in groups]
        # There are dozens of groups, most of them empty, and every step asks for the others.
        self._groups_waiting: set[int] = set()
        self._groups_running: set[int] = set()
        self._num_arrivals = 0
        self._last_group = -1
        self._cancellation_noted = False

    def _note_cancellation(self) -> None:
        self._cancellation_noted = True

    @property
    def has_work(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self._groups_waiting or self._groups_running)

    @property
    def num_running(self) -> int:
        """Rows in all groups."""
        return sum(len(self._running[group]) for group in self._groups_running)

    def group_of(self, entry: Entry) -> int:
        """The group of an entry: a property of its segment and options alone."""
        num_beams, kind = entry.search.num_beams, entry.search_kind
        for index, group in enumerate(self._groups):
            if (
                entry.num_source_tokens <= group.source_length
                and num_beams == group.num_beams
                and kind is group.kind
            ):
                return index
        raise ValueError(
            f"no row group takes {entry.num_source_tokens} source tokens and {num_beams} beams "
            f"({kind.value} search); the longest takes {max(group.source_length for group in self._groups)} "
            f"tokens and the widest {max(group.num_beams for group in self._groups)} beams"
        )

    def add(self, entry: Entry) -> None:
        """Queue an entry behind all that arrived before it."""
        entry.watch_cancellation(self._note_cancellation)
        group = self.group_of(entry)
        self._waiting[group].append((self._num_arrivals, entry))
        self._groups_waiting.add(group)
        self._num_arrivals += 1

    def running(self, group: int) -> tuple[Entry, ...]:
        """The group's running entries by slot."""
        return self._running[group].occupants

    def schedule(self) -> list[Admission]:
        """Seat waiting entries, oldest first, within free slots and the token budget."""
        admissions: list[Admission] = []
        num_tokens = 0
        open_groups = [group for group in self._groups_waiting if self._takes_newcomers(group)]
        while open_groups:
            group = min(open_groups, key=lambda group: self._waiting[group][0][0])
            _, entry = self._waiting[group][0]
            num_tokens += entry.num_source_tokens
            if admissions and num_tokens > self._max_admission_tokens:
                break
            self._waiting[group].popleft()
            admissions.append(Admission(entry, group, self._running[group].take(entry)))
            self._groups_running.add(group)
            if not self._waiting[group]:
                self._groups_waiting.discard(group)
            if not (self._waiting[group] and self._running[group].num_free):
                open_groups.remove(group)
        return admissions

    def _takes_newcomers(self, group: int) -> bool:
        """Whether the group, for which someone waits, has room for all or for enough to be worth a call."""
        num_waiting, slots = len(self._waiting[group]), self._running[group]
        # A group of many beams has few slots: it must not run empty to gather company.
        quarter = max(1, self._groups[group].max_rows // 4)
        wanted = min(num_waiting, self._min_newcomers, quarter)
        return slots.num_free >= wanted

    def next_group(self) -> int | None:
        """The group whose rows take the next step: round robin over those that have rows."""
        if not self._groups_running:
            return None
        later = [group for group in self._groups_running if group > self._last_group]
        self._last_group = min(later or self._groups_running)
        return self._last_group

    def leave(self, group: int, entry: Entry) -> Departure:
        """Take a running entry out of its slot."""
        slots = self._running[group]
        move = slots.leave(slots.occupants.index(entry))
        if not len(slots):
            self._groups_running.discard(group)
        return Departure(entry, group, move)

    def remove_cancelled(self) -> tuple[list[Entry], list[Departure]]:
        """Take out every cancelled entry: those that waited, and those that held a slot."""
        if not self._cancellation_noted:
            return [], []
        self._cancellation_noted = False  # before looking: whoever cancels later notes it again
        never_ran: list[Entry] = []
        for group in sorted(self._groups_waiting):
            waiting = self._waiting[group]
            if any(entry.cancelled for _, entry in waiting):
                never_ran += [entry for _, entry in waiting if entry.cancelled]
                self._waiting[group] = deque(item for item in waiting if not item[1].cancelled)
                if not self._waiting[group]:
                    self._groups_waiting.discard(group)
        departures = [
            self.leave(group, entry)
            for group in sorted(self._groups_running)
            for entry in self._running[group].occupants
            if entry.cancelled
        ]
        return never_ran, departures

    def clear_group(self, group: int) -> tuple[Entry, ...]:
        """Empty a group's slots (its step failed) and return who ran there."""
        self._groups_running.discard(group)
        return self._running[group].clear()

    def clear(self) -> list[Entry]:
        """Empty everything and return every entry that was waiting or running."""
        entries = [entry for waiting in self._waiting for _, entry in waiting]
        for waiting in self._waiting:
            waiting.clear()
        for slots in self._running:
            entries += slots.clear()
        self._groups_waiting.clear()
        self._groups_running.clear()
        return entries
