from __future__ import annotations

import pytest
from fake_runner import make_waiter
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from app.runtime.entry import Entry
from app.runtime.runner import RowGroup
from app.runtime.scheduler import Scheduler
from app.runtime.slots import RowSlots, SlotMove


def entry_of(num_tokens: int) -> Entry:
    return make_waiter(range(1, num_tokens + 1)).entry


class Schedule(RuleBasedStateMachine):
    """Entries come, are cancelled, run and leave in any order; an oracle of plain lists looks on."""

    @initialize(
        lengths=st.lists(st.integers(1, 12), min_size=1, max_size=3, unique=True).map(sorted),
        max_rows=st.integers(1, 4),
        budget=st.integers(1, 40),
    )
    def start(self, lengths: list[int], max_rows: int, budget: int) -> None:
        self.lengths, self.max_rows, self.budget = lengths, max_rows, budget
        groups = [RowGroup(source_length=length, max_rows=max_rows) for length in lengths]
        self.scheduler = Scheduler(groups, max_admission_tokens=budget)
        self.waiting: list[Entry] = []
        self.slots: list[list[Entry]] = [[] for _ in lengths]  # what the runner's buffers would hold
        self.left: list[Entry] = []
        self.passed_by: list[set[int]] = [set() for _ in lengths]

    def group_of(self, entry: Entry) -> int:
        return next(i for i, length in enumerate(self.lengths) if entry.num_source_tokens <= length)

    def oldest_seatable(self) -> Entry | None:
        return next((e for e in self.waiting if len(self.slots[self.group_of(e)]) < self.max_rows), None)

    @rule(share=st.floats(0, 1))
    def arrive(self, share: float) -> None:
        entry = entry_of(1 + int(share * (self.lengths[-1] - 1)))
        self.scheduler.add(entry)
        self.waiting.append(entry)

    @precondition(lambda self: self.waiting or any(self.slots))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from([*self.waiting, *(e for slots in self.slots for e in slots)]))
        entry.cancel()
        entry.cancel()

    @rule()
    def turn(self) -> None:
        never_ran, departures = self.scheduler.remove_cancelled()
        assert set(never_ran) == {entry for entry in self.waiting if entry.cancelled}
        self.waiting = [entry for entry in self.waiting if not entry.cancelled]
        assert {departure.entry for departure in departures} == {
            entry for slots in self.slots for entry in slots if entry.cancelled
        }
        self.left += never_ran
        for departure in departures:
            self.depart(departure.group, departure.entry, departure.move)

        num_tokens = 0
        for number, admission in enumerate(self.scheduler.schedule()):
            entry = admission.entry
            assert not entry.cancelled, "a cancelled entry must never run"
            assert entry is self.oldest_seatable(), "the oldest that has a place comes first"
            assert admission.group == self.group_of(entry)
            assert admission.slot == len(self.slots[admission.group]), "newcomers sit behind the running rows"
            num_tokens += entry.num_source_tokens
            assert number == 0 or num_tokens <= self.budget, "only a lone head may exceed the budget"
            self.waiting.remove(entry)
            self.slots[admission.group].append(entry)
        if (left_out := self.oldest_seatable()) is not None:
            more = num_tokens + left_out.num_source_tokens
            assert num_tokens, "the head is always admitted"
            assert more > self.budget, "whoever fits is admitted"

        group = self.scheduler.next_group()
        busy = {index for index, slots in enumerate(self.slots) if slots}
        assert (group is None) == (not busy)
        if group is not None:
            assert group in busy
            for other, passed_by in enumerate(self.passed_by):
                if other == group or other not in busy:
                    passed_by.clear()
                else:
                    assert group not in passed_by, (
                        "no group takes two turns while another one waits for its own"
                    )
                    passed_by.add(group)

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

    def teardown(self) -> None:
        if hasattr(self, "slots"):
            rest = self.scheduler.clear()
            assert len(rest) == len(set(rest))
            assert set(rest) == {*self.waiting, *(entry for slots in self.slots for entry in slots)}
            assert not self.scheduler.has_work


TestSchedule = Schedule.TestCase
TestSchedule.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_every_entry_of_a_full_queue_is_served_in_bounded_turns() -> None:
    scheduler = Scheduler([RowGroup(4, 1), RowGroup(8, 1)], max_admission_tokens=1)
    entries = [entry_of(length) for length in (8, 1, 1, 8, 1, 8)]
    for entry in entries:
        scheduler.add(entry)
    served = []
    for _ in range(2 * len(entries)):
        scheduler.schedule()
        group = scheduler.next_group()
        if group is not None:
            (entry,) = scheduler.running(group)
            scheduler.leave(group, entry)
            served.append(entry)
    assert set(served) == set(entries)


def test_groups_with_rows_take_turns() -> None:
    scheduler = Scheduler([RowGroup(length, 1) for length in (2, 4, 6)], max_admission_tokens=100)
    for length in (2, 4, 6):
        scheduler.add(entry_of(length))
    scheduler.schedule()
    assert [scheduler.next_group() for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_a_source_longer_than_every_group_is_refused_when_it_is_added() -> None:
    scheduler = Scheduler([RowGroup(4, 1)], max_admission_tokens=10)
    with pytest.raises(ValueError, match=r"5 source tokens.*takes 4"):
        scheduler.add(entry_of(5))
    assert not scheduler.has_work


def test_full_slots_refuse_an_occupant_and_empty_slots_cannot_be_left() -> None:
    slots: RowSlots[str] = RowSlots(1)
    with pytest.raises(RuntimeError, match="slot 0 is empty"):
        slots.leave(0)
    assert slots.take("a") == 0
    with pytest.raises(RuntimeError, match="all 1 slots"):
        slots.take("b")
    for slot in (-1, 1):
        with pytest.raises(RuntimeError, match="is empty"):
            slots.leave(slot)
    assert slots.occupants == ("a",)


def running_full(scheduler: Scheduler, num_rows: int, num_more: int) -> list[Entry]:
    """Fill the only group, leave more waiting, and return the running entries."""
    for _ in range(num_rows + num_more):
        scheduler.add(entry_of(2))
    running = [admission.entry for admission in scheduler.schedule()]
    assert len(running) == num_rows
    return running


def test_under_load_newcomers_are_taken_a_few_at_a_time() -> None:
    scheduler = Scheduler([RowGroup(4, 12)], max_admission_tokens=10**6, min_newcomers=3)
    running = running_full(scheduler, 12, 5)
    for entry in running[:2]:
        scheduler.leave(0, entry)
        assert scheduler.schedule() == []
    scheduler.leave(0, running[2])
    assert [admission.slot for admission in scheduler.schedule()] == [9, 10, 11]


def test_nobody_waits_for_company_when_there_is_room_for_all_who_wait() -> None:
    scheduler = Scheduler([RowGroup(4, 8)], max_admission_tokens=10**6, min_newcomers=3)
    running = running_full(scheduler, 8, 1)
    scheduler.leave(0, running[0])
    assert len(scheduler.schedule()) == 1


@pytest.mark.parametrize(("max_rows", "num_free"), [(2, 1), (6, 1), (8, 2), (10, 2)])
def test_a_group_of_few_slots_takes_newcomers_once_a_quarter_of_them_is_free(
    max_rows: int, num_free: int
) -> None:
    scheduler = Scheduler([RowGroup(4, max_rows)], max_admission_tokens=10**6, min_newcomers=8)
    running = running_full(scheduler, max_rows, 20)
    for entry in running[: num_free - 1]:
        scheduler.leave(0, entry)
        assert scheduler.schedule() == []
    scheduler.leave(0, running[num_free - 1])
    assert len(scheduler.schedule()) == num_free


def test_an_entry_cancelled_before_it_is_queued_never_runs() -> None:
    scheduler = Scheduler([RowGroup(4, 2)], max_admission_tokens=10**6)
    entry = entry_of(2)
    entry.cancel()
    scheduler.add(entry)
    assert scheduler.remove_cancelled() == ([entry], [])
    assert scheduler.schedule() == []
