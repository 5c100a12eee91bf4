"""Entries come, are cancelled, expire, run and leave in any order; an oracle of plain lists looks on."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from waiting_entries import BULK, INTERACTIVE, SHARE, entry_of

from app.runtime.entry import Entry
from app.runtime.request import Priority
from app.runtime.runner import RowGroup
from app.runtime.scheduler import BULK_TURN, Scheduler
from app.runtime.slots import SlotMove


class Schedule(RuleBasedStateMachine):
    """Entries come, are cancelled, expire, run and leave in any order; an oracle of plain lists looks on."""

    @initialize(
        lengths=st.lists(st.integers(1, 12), min_size=1, max_size=3, unique=True).map(sorted),
        max_rows=st.integers(1, 5),
        budget=st.integers(1, 40),
        company=st.integers(1, 4),
        max_held_steps=st.integers(0, 3),
    )
    def start(
        self, lengths: list[int], max_rows: int, budget: int, company: int, max_held_steps: int
    ) -> None:
        self.lengths, self.max_rows, self.budget = lengths, max_rows, budget
        self.company, self.max_held_steps = company, max_held_steps
        self.max_bulk_rows = max(1, int(max_rows * SHARE))
        groups = [RowGroup(source_length=length, max_rows=max_rows) for length in lengths]
        self.scheduler = Scheduler(
            groups,
            max_admission_tokens=budget,
            company=company,
            max_held_steps=max_held_steps,
            max_bulk_share=SHARE,
        )
        self.now_s = 0.0
        self.waiting: list[Entry] = []  # by arrival
        self.slots: list[list[Entry]] = [[] for _ in lengths]  # what the runner's buffers would hold
        self.left: list[Entry] = []
        self.turns: dict[tuple[int, Priority], list[int]] = {}  # requests, the next one first
        self.passed_over = [0] * len(lengths)
        self.waited_for_a_step: dict[int, int] = {}
        self.num_held_steps = [0] * len(lengths)  # since somebody was seated
        self.held: set[int] = set()  # groups whose newcomers wait for company in this turn

    def group_of(self, entry: Entry) -> int:
        return next(i for i, length in enumerate(self.lengths) if entry.num_source_tokens <= length)

    def queue(self, group: int, priority: Priority) -> list[Entry]:
        return [e for e in self.waiting if self.group_of(e) == group and e.priority is priority]

    def has_room(self, group: int, priority: Priority) -> bool:
        slots = self.slots[group]
        num_bulk = sum(entry.priority is BULK for entry in slots)
        return len(slots) < self.max_rows and (priority is INTERACTIVE or num_bulk < self.max_bulk_rows)

    def seatable(self, priority: Priority) -> set[int]:
        """Groups for which somebody of this priority waits, has room, and need not wait for company."""
        groups = set(range(len(self.lengths))) - self.held
        return {g for g in groups if self.queue(g, priority) and self.has_room(g, priority)}

    def hold(self) -> None:
        """Whose newcomers wait for company: too few of them, and enough to do without them."""
        self.held = set()
        for group, slots in enumerate(self.slots):
            num_waiting = sum(len(self.queue(group, priority)) for priority in Priority)
            if 0 < num_waiting < self.company <= len(slots):
                self.num_held_steps[group] += 1
                if self.num_held_steps[group] <= self.max_held_steps:
                    self.held.add(group)

    def head(self, group: int, priority: Priority) -> Entry:
        """Whose turn it is."""
        request = self.turns[group, priority][0]
        return next(entry for entry in self.queue(group, priority) if entry.request == request)

    def has_lapsed(self, entry: Entry) -> bool:
        return entry.cancelled or (entry.deadline_s is not None and entry.deadline_s <= self.now_s)

    def forget_turns(self) -> None:
        for (group, priority), turns in self.turns.items():
            requests = {entry.request for entry in self.queue(group, priority)}
            turns[:] = [request for request in turns if request in requests]

    @rule(
        share=st.floats(0, 1),
        request=st.integers(0, 5),
        allowed_s=st.none() | st.integers(0, 8),
        copies=st.integers(1, 4),
    )
    def arrive(self, share: float, request: int, allowed_s: int | None, copies: int) -> None:
        for _ in range(copies):
            entry = entry_of(
                1 + int(share * (self.lengths[-1] - 1)),
                request=request,
                priority=BULK if request % 2 else INTERACTIVE,
                deadline_s=None if allowed_s is None else self.now_s + allowed_s,
            )
            self.scheduler.add(entry)
            self.waiting.append(entry)
            turns = self.turns.setdefault((self.group_of(entry), entry.priority), [])
            if request not in turns:
                turns.append(request)

    @rule(seconds=st.integers(1, 3))
    def time_passes(self, seconds: int) -> None:
        self.now_s += seconds

    @precondition(lambda self: self.waiting or any(self.slots))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from([*self.waiting, *(e for slots in self.slots for e in slots)]))
        entry.cancel()
        entry.cancel()

    @rule()
    def turn(self) -> None:
        lapses = self.scheduler.release(self.now_s)
        assert set(lapses.never_ran) == {entry for entry in self.waiting if self.has_lapsed(entry)}
        assert len(lapses.never_ran) == len(set(lapses.never_ran))
        self.waiting = [entry for entry in self.waiting if not self.has_lapsed(entry)]
        self.forget_turns()
        assert {departure.entry for departure in lapses.departures} == {
            entry for slots in self.slots for entry in slots if self.has_lapsed(entry)
        }
        self.left += lapses.never_ran
        for departure in lapses.departures:
            self.depart(departure.group, departure.entry, departure.move)

        self.hold()
        num_tokens = 0
        for number, admission in enumerate(self.scheduler.schedule()):
            entry, group = admission.entry, admission.group
            assert not self.has_lapsed(entry), "cancelled and expired entries never run"
            assert group == self.group_of(entry)
            assert group not in self.held, "few newcomers wait for company"
            self.num_held_steps[group] = 0
            assert self.has_room(group, entry.priority)
            assert entry is self.head(group, entry.priority), "requests take turns, the oldest entry first"
            assert admission.slot == len(self.slots[group]), "newcomers sit behind the running rows"
            due = {g for g in self.seatable(BULK) if self.passed_over[g] == BULK_TURN - 1}
            if entry.priority is BULK:
                assert group in due or not self.seatable(INTERACTIVE), "bulk does not go first"
                candidates = due or self.seatable(BULK)
                self.passed_over[group] = 0
            else:
                assert not due, "bulk that was passed over long enough comes first"
                candidates = self.seatable(INTERACTIVE)
            heads = [self.head(candidate, entry.priority) for candidate in candidates]
            assert entry is min(heads, key=self.waiting.index), "the longest-waiting head comes first"
            num_tokens += entry.num_source_tokens
            assert number == 0 or num_tokens <= self.budget, "only a lone head may exceed the budget"
            if entry.priority is INTERACTIVE:
                for other in self.seatable(BULK):
                    self.passed_over[other] += 1
            self.waiting.remove(entry)
            self.slots[group].append(entry)
            turns = self.turns[group, entry.priority]
            turns.append(turns.pop(0))
            self.forget_turns()
        if left_out := self.seatable(INTERACTIVE):
            assert num_tokens, "somebody is always admitted"
            due = {g for g in self.seatable(BULK) if self.passed_over[g] == BULK_TURN - 1}
            least = min(
                self.head(group, priority).num_source_tokens
                for groups, priority in ((due, BULK), (left_out, INTERACTIVE))
                for group in groups
            )
            longest = max(self.lengths)
            assert num_tokens + max(least, longest) > self.budget, "whoever fits is admitted"
        elif self.seatable(BULK):
            assert num_tokens, "somebody is always admitted"

        self.step()

    def step(self) -> None:
        group = self.scheduler.next_group()
        busy = {index for index, slots in enumerate(self.slots) if slots}
        assert (group is None) == (not busy)
        if group is None:
            return
        assert group in busy
        self.waited_for_a_step = {
            other: self.waited_for_a_step.get(other, 0) + 1 for other in busy if other != group
        }
        # Each group once, or the others' interactive turns between two of bulk, for each group of bulk.
        assert all(steps <= BULK_TURN * len(self.lengths) for steps in self.waited_for_a_step.values())

    @precondition(lambda self: any(self.slots))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from([i for i, slots in enumerate(self.slots) if slots]))
        entry = data.draw(st.sampled_from(self.slots[group]))
        departure = self.scheduler.leave(group, entry)
        assert departure.entry is entry
        self.depart(group, entry, departure.move)

    @precondition(lambda self: any(self.slots))
    @rule(data=st.data())
    def step_fails(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from([i for i, slots in enumerate(self.slots) if slots]))
        assert list(self.scheduler.clear_group(group)) == self.slots[group]
        self.left += self.slots[group]
        self.slots[group] = []

    def depart(self, group: int, entry: Entry, move: SlotMove | None) -> None:
        slots = self.slots[group]
        if move is not None:
            assert move.from_slot == len(slots) - 1, "the last row moves"
            assert slots[move.to_slot] is entry, "into the slot that became free"
            slots[move.to_slot] = slots[move.from_slot]
        else:
            assert slots[-1] is entry
        slots.pop()
        self.left.append(entry)

    @invariant()
    def slots_are_dense_and_nobody_is_lost_or_doubled(self) -> None:
        if not hasattr(self, "slots"):
            return
        for group, slots in enumerate(self.slots):
            assert list(self.scheduler.running(group)) == slots
        assert self.scheduler.num_running == sum(map(len, self.slots))
        assert self.scheduler.has_work == bool(self.waiting or any(self.slots))
        assert len(self.left) == len(set(self.left)), "an entry leaves once"
        present = {*self.waiting, *(entry for slots in self.slots for entry in slots)}
        assert all(entry in self.scheduler for entry in present)
        assert not any(entry in self.scheduler for entry in self.left)

    def teardown(self) -> None:
        if hasattr(self, "slots"):
            rest = self.scheduler.clear()
            assert len(rest) == len(set(rest))
            assert set(rest) == {*self.waiting, *(entry for slots in self.slots for entry in slots)}
            assert not self.scheduler.has_work


TestSchedule = Schedule.TestCase
TestSchedule.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
