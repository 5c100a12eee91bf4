"""Who waits and who runs. Pure: no thread, no clock, no model; the time comes in as a value.

Waiting entries are kept per row group and priority, where requests take turns (`FairQueue`). At every
step `schedule` seats those whose turn it is and whose group has room, as many as the token budget allows.

* `interactive` goes before `bulk`, and a share of each group's rows is never given to bulk, so that it finds
  room. Bulk is passed over by at most ``BULK_TURN - 1`` interactive entries while there is room for it.
* Under load a group takes newcomers a few at a time, since encoding them together is cheaper.
* Groups with running rows take turns (`next_group`): short sentences do not wait for a long one to finish,
  nor the reverse. While interactive rows run, every ``BULK_TURN``-th step is for groups of bulk alone.
* Whoever is cancelled, or past its deadline, leaves before anybody is seated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from app.runtime.deadlines import Deadlines
from app.runtime.entry import Entry
from app.runtime.fair_queue import FairQueue
from app.runtime.request import Priority
from app.runtime.runner import RowGroup
from app.runtime.slots import RowSlots, SlotMove

_INTERACTIVE, _BULK = 0, 1
"""Ranks: indices cost a step nothing, members of an enumeration are hashed in Python."""
BULK_TURN = 8
"""Of so many admissions, and of so many steps, one is for bulk while both priorities want it."""


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


@dataclass(frozen=True)
class Lapses:
    """Whom nobody waits for any more.

    Attributes:
        never_ran: left the queue.
        departures: left a slot.
    """

    never_ran: Sequence[Entry]
    departures: Sequence[Departure]


class Scheduler:
    """Decides, step by step, which entries of one model run."""

    def __init__(
        self,
        groups: Sequence[RowGroup],
        *,
        max_admission_tokens: int,
        min_newcomers: int = 1,
        company: int = 1,
        max_held_steps: int = 0,
        max_bulk_share: float = 0.75,
    ) -> None:
        """Create an empty schedule.

        Args:
            groups: the runner's row groups; those of one beam size with the shortest source length first.
            max_admission_tokens: source tokens encoded at most between two steps, so that
                newcomers do not stall running rows; the first entry is admitted even alone above it.
                Bulk joins only up to half of it, unless it was passed over long enough.
            min_newcomers: while more wait for a group than it has free slots, it takes newcomers only
                this many at once, or a quarter of its slots if that is less: encoding a few sentences
                together is cheaper than one by one.
            company: while a group runs at least so many segments, fewer newcomers than this wait for others,
                for the same reason.
            max_held_steps: steps that they wait for company at most.
            max_bulk_share: share of a group's slots that bulk may hold, rounded down, at least one.
        """
        self._min_newcomers = min_newcomers
        self._company = company
        self._max_held_steps = max_held_steps
        self._num_held_steps = [0] * len(groups)
        self._groups = tuple(groups)
        self._max_admission_tokens = max_admission_tokens
        self._max_bulk_rows = [max(1, int(group.max_rows * max_bulk_share)) for group in groups]
        self._waiting = tuple([FairQueue() for _ in groups] for _rank in (_INTERACTIVE, _BULK))
        self._running: list[RowSlots[Entry]] = [RowSlots(group.max_rows) for group in groups]
        self._num_bulk_rows = [0] * len(groups)
        self._num_bulk_running = 0
        # Interactive entries seated while bulk waited for the group and had room, since bulk last was.
        self._passed_over = [0] * len(groups)
        # There are dozens of groups, most of them empty, and every step asks for the others.
        self._groups_waiting: set[int] = set()
        self._groups_running: set[int] = set()
        self._group_of_waiting: dict[Entry, int] = {}
        self._group_of_running: dict[Entry, int] = {}
        self._num_arrivals = 0
        self._last_group = [-1, -1]  # by rank
        self._num_interactive_steps = 0
        self._cancelled: deque[Entry] = deque()  # filled from any thread
        self._deadlines = Deadlines()

    @property
    def has_work(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self._groups_waiting or self._groups_running)

    @property
    def num_running(self) -> int:
        """Rows in all groups."""
        return len(self._group_of_running)

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
        """Queue an entry behind all of its request that arrived before it.

        Raises:
            ValueError: no row group takes it.
        """
        group = self.group_of(entry)
        self._waiting[_rank_of(entry)][group].add(self._num_arrivals, entry)
        self._group_of_waiting[entry] = group
        self._groups_waiting.add(group)
        self._num_arrivals += 1
        entry.watch_cancellation(self._cancelled.append)
        num_present = len(self._group_of_waiting) + len(self._group_of_running)
        self._deadlines.watch(entry, present=self, num_present=num_present)

    def __contains__(self, entry: object) -> bool:
        """Whether an entry waits or runs here."""
        return entry in self._group_of_waiting or entry in self._group_of_running

    def running(self, group: int) -> tuple[Entry, ...]:
        """The group's running entries by slot."""
        return self._running[group].occupants

    def schedule(self) -> list[Admission]:
        """Seat waiting entries within free slots and the token budget."""
        admissions: list[Admission] = []
        if not self._groups_waiting:
            return admissions
        num_tokens = 0
        in_company = [group for group in self._groups_waiting if not self._is_held(group)]
        open_to = tuple(
            {group for group in in_company if self._takes_newcomers(group, rank)}
            for rank in (_INTERACTIVE, _BULK)
        )
        while (choice := self._next_newcomer(*open_to)) is not None:
            group, rank, max_tokens = choice
            num_tokens += self._waiting[rank][group].head.num_source_tokens
            if admissions and num_tokens > max_tokens:
                break
            admissions.append(self._seat(group, rank))
            if rank == _BULK:
                self._passed_over[group] = 0
            else:
                for passed_over in open_to[_BULK]:
                    self._passed_over[passed_over] += 1
            for of_rank, groups in enumerate(open_to):
                if group in groups and not (self._waiting[of_rank][group] and self._room(group, of_rank)):
                    groups.discard(group)
        return admissions

    def _next_newcomer(self, interactive: set[int], bulk: set[int]) -> tuple[int, int, int] | None:
        """Where from the next newcomer comes: group, rank, and the budget that holds for it."""
        due = [group for group in bulk if self._passed_over[group] >= BULK_TURN - 1]
        if due:
            return self._longest_waiting(due, _BULK), _BULK, self._max_admission_tokens
        if interactive:
            group = self._longest_waiting(interactive, _INTERACTIVE)
            return group, _INTERACTIVE, self._max_admission_tokens
        if bulk:
            # Interactive entries that come meanwhile wait for no more than half a full encoder pass.
            return self._longest_waiting(bulk, _BULK), _BULK, self._max_admission_tokens // 2
        return None

    def _longest_waiting(self, groups: Collection[int], rank: int) -> int:
        """The group whose next entry arrived first; its number is fixed, so its group's turn comes."""
        if len(groups) == 1:
            return next(iter(groups))
        queues = self._waiting[rank]
        return min(groups, key=lambda group: queues[group].head_arrival)

    def _seat(self, group: int, rank: int) -> Admission:
        entry = self._waiting[rank][group].pop()
        del self._group_of_waiting[entry]
        self._forget_if_nobody_waits(group)
        slot = self._running[group].take(entry)
        self._group_of_running[entry] = group
        self._groups_running.add(group)
        self._num_held_steps[group] = 0
        self._num_bulk_rows[group] += rank
        self._num_bulk_running += rank
        return Admission(entry, group, slot)

    def _forget_if_nobody_waits(self, group: int) -> None:
        if not (self._waiting[_INTERACTIVE][group] or self._waiting[_BULK][group]):
            self._groups_waiting.discard(group)

    def _room(self, group: int, rank: int) -> int:
        """Slots that newcomers of this rank find."""
        num_free = self._running[group].num_free
        if rank == _INTERACTIVE:
            return num_free
        return min(num_free, self._max_bulk_rows[group] - self._num_bulk_rows[group])

    def _is_held(self, group: int) -> bool:
        """Whether a group's newcomers wait one more step for company, while others keep the worker busy."""
        num_waiting = sum(len(queues[group]) for queues in self._waiting)
        if num_waiting >= self._company or len(self._running[group]) < self._company:
            return False
        self._num_held_steps[group] += 1
        return self._num_held_steps[group] <= self._max_held_steps

    def _takes_newcomers(self, group: int, rank: int) -> bool:
        """Whether somebody waits, and the group has room for all or for enough to be worth a call."""
        num_waiting = len(self._waiting[rank][group])
        if not num_waiting:
            return False
        room = self._room(group, rank)
        if rank == _BULK and room and self._waiting[_INTERACTIVE][group]:
            # It neither takes the rows that others gather, nor waits for company that may never find room.
            return self._takes_newcomers(group, _INTERACTIVE)
        max_rows = self._max_bulk_rows[group] if rank == _BULK else self._groups[group].max_rows
        # A group of many beams has few slots: it must not run empty to gather company.
        return room >= min(num_waiting, self._min_newcomers, max(1, max_rows // 4))

    def next_group(self) -> int | None:
        """The group whose rows take the next step: round robin over those that have rows."""
        if not self._groups_running:
            return None
        if not self._num_bulk_running:
            return self._next_in_turn(self._groups_running, _INTERACTIVE)
        bulk = {
            group for group in self._groups_running if len(self._running[group]) == self._num_bulk_rows[group]
        }
        interactive = self._groups_running - bulk
        if not bulk or (interactive and self._num_interactive_steps < BULK_TURN - 1):
            self._num_interactive_steps += bool(bulk)
            return self._next_in_turn(interactive, _INTERACTIVE)
        self._num_interactive_steps = 0
        return self._next_in_turn(bulk, _BULK)

    def _next_in_turn(self, groups: set[int], rank: int) -> int:
        later = [group for group in groups if group > self._last_group[rank]]
        self._last_group[rank] = min(later or groups)
        return self._last_group[rank]

    def leave(self, group: int, entry: Entry) -> Departure:
        """Take a running entry out of its slot."""
        slots = self._running[group]
        move = slots.leave(slots.occupants.index(entry))
        del self._group_of_running[entry]
        rank = _rank_of(entry)
        self._num_bulk_rows[group] -= rank
        self._num_bulk_running -= rank
        if not len(slots):
            self._groups_running.discard(group)
        return Departure(entry, group, move)

    def release(self, now_s: float) -> Lapses:
        """Take out every entry that was cancelled or whose deadline has passed.

        Args:
            now_s: monotonic seconds.
        """
        lapsed = self._deadlines.expired(now_s)
        while self._cancelled:
            lapsed.append(self._cancelled.popleft())
        if not lapsed:
            return Lapses((), ())
        never_ran = [entry for entry in dict.fromkeys(lapsed) if entry in self._group_of_waiting]
        for group in {self._group_of_waiting[entry] for entry in never_ran}:
            for queues in self._waiting:
                queues[group].discard(
                    [entry for entry in never_ran if self._group_of_waiting[entry] == group]
                )
            self._forget_if_nobody_waits(group)
        for entry in never_ran:
            del self._group_of_waiting[entry]
        ran = {entry: self._group_of_running[entry] for entry in lapsed if entry in self._group_of_running}
        departures = [
            self.leave(group, entry) for entry, group in sorted(ran.items(), key=lambda item: item[1])
        ]
        return Lapses(never_ran, departures)

    def clear_group(self, group: int) -> tuple[Entry, ...]:
        """Empty a group's slots (its step failed) and return who ran there."""
        self._groups_running.discard(group)
        self._num_bulk_running -= self._num_bulk_rows[group]
        self._num_bulk_rows[group] = 0
        entries = self._running[group].clear()
        for entry in entries:
            del self._group_of_running[entry]
        return entries

    def clear(self) -> list[Entry]:
        """Empty everything and return every entry that was waiting or running."""
        entries = [*self._group_of_waiting, *self._group_of_running]
        for queue in (queue for queues in self._waiting for queue in queues):
            queue.clear()
        for group in range(len(self._groups)):
            self.clear_group(group)
        self._group_of_waiting.clear()
        self._groups_waiting.clear()
        return entries


def _rank_of(entry: Entry) -> int:
    return _BULK if entry.priority is Priority.BULK else _INTERACTIVE
