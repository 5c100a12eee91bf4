from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting_entries import BULK, INTERACTIVE, entry_of

from app.runtime.deadlines import Deadlines
from app.runtime.entry import Entry
from app.runtime.request import Priority
from app.runtime.runner import RowGroup
from app.runtime.scheduler import BULK_TURN, Scheduler
from app.runtime.slots import RowSlots


def serve_one(scheduler: Scheduler) -> Entry | None:
    """Seat whoever may, step one group, and let its first row finish."""
    scheduler.schedule()
    group = scheduler.next_group()
    if group is None:
        return None
    entry = scheduler.running(group)[0]
    scheduler.leave(group, entry)
    return entry


@settings(max_examples=40, deadline=None)
@given(
    max_rows=st.integers(1, 6),
    min_newcomers=st.integers(1, 4),
    budget=st.integers(1, 60),
    bulk_lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    data=st.data(),
)
def test_bulk_does_not_starve_however_much_interactive_work_comes(
    max_rows: int, min_newcomers: int, budget: int, bulk_lengths: list[int], data: st.DataObject
) -> None:
    groups = [RowGroup(length, max_rows) for length in (4, 8, 12)]
    scheduler = Scheduler(groups, max_admission_tokens=budget, min_newcomers=min_newcomers)
    bulk = [entry_of(length, priority=BULK) for length in bulk_lengths]
    for entry in bulk:
        scheduler.add(entry)
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=8))
    waiting_bulk, running, num_waiting, num_added = set(bulk), dict[Entry, int](), 0, 0
    # Each entry takes two steps. Every group may have bulk of its own, and each waits for its turns.
    limit = 40 * BULK_TURN * (len(bulk) + 3)
    for _ in range(limit):
        while num_waiting < 12:
            scheduler.add(entry_of(lengths[num_added % len(lengths)], request=1 + num_added))
            num_waiting, num_added = num_waiting + 1, num_added + 1
        for admission in scheduler.schedule():
            running[admission.entry] = 2
            waiting_bulk.discard(admission.entry)
            num_waiting -= admission.entry.priority is INTERACTIVE
        group = scheduler.next_group()
        assert group is not None
        for entry in scheduler.running(group):
            running[entry] -= 1
            if not running[entry]:
                del running[entry]
                scheduler.leave(group, entry)
        if not waiting_bulk and not any(entry in running for entry in bulk):
            return
    raise AssertionError(f"{len(waiting_bulk)} of {len(bulk)} bulk entries waited for {limit} steps")


@pytest.mark.parametrize("num_groups", [1, 2])
def test_while_both_wait_one_admission_in_eight_is_for_bulk(num_groups: int) -> None:
    scheduler = Scheduler([RowGroup(4, 100), RowGroup(8, 100)][:num_groups], max_admission_tokens=10**6)
    for number in range(160):
        scheduler.add(entry_of(2 + 4 * (number % num_groups)))
        scheduler.add(entry_of(2, priority=BULK))
    priorities = [admission.entry.priority for admission in scheduler.schedule()]
    assert BULK_TURN == 8
    assert priorities[:80] == ([INTERACTIVE] * 7 + [BULK]) * 10


def test_interactive_newcomers_find_room_at_the_very_next_step_whatever_bulk_waits() -> None:
    scheduler = Scheduler([RowGroup(4, 8)], max_admission_tokens=10**6, min_newcomers=2)
    for _ in range(100):
        scheduler.add(entry_of(2, priority=BULK))
    assert len(scheduler.schedule()) == 6, "a quarter of the rows is kept free"
    assert scheduler.schedule() == []
    newcomers = [entry_of(2, request=number) for number in (1, 2)]
    for entry in newcomers:
        scheduler.add(entry)
    assert [admission.entry for admission in scheduler.schedule()] == newcomers


def test_bulk_takes_no_row_that_interactive_entries_are_gathering() -> None:
    scheduler = Scheduler([RowGroup(4, 8)], max_admission_tokens=10**6, min_newcomers=2)
    running = running_full(scheduler, 8, 20)
    scheduler.add(entry_of(2, priority=BULK))
    scheduler.leave(0, running[0])
    assert scheduler.schedule() == []
    scheduler.leave(0, running[1])
    assert [admission.entry.priority for admission in scheduler.schedule()] == [INTERACTIVE] * 2


def test_bulk_alone_is_encoded_half_a_budget_at_a_time() -> None:
    scheduler = Scheduler([RowGroup(4, 100)], max_admission_tokens=40)
    for _ in range(40):
        scheduler.add(entry_of(4, priority=BULK))
    assert len(scheduler.schedule()) == 5
    scheduler.add(entry_of(4, request=1))
    admissions = scheduler.schedule()
    assert admissions[0].entry.priority is INTERACTIVE
    assert len(admissions) == 5


@pytest.mark.parametrize("priority", Priority)
def test_a_request_of_thousands_delays_another_by_one_entry(priority: Priority) -> None:
    scheduler = Scheduler([RowGroup(4, 1)], max_admission_tokens=10**6)
    many = [entry_of(2, request=1, priority=priority) for _ in range(3000)]
    for entry in many:
        scheduler.add(entry)
    assert serve_one(scheduler) is many[0]
    few = [entry_of(2, request=2, priority=priority) for _ in range(3)]
    for entry in few:
        scheduler.add(entry)
    served = [serve_one(scheduler) for _ in range(7)]
    assert served == [many[1], few[0], many[2], few[1], many[3], few[2], many[4]]


def test_a_request_keeps_its_turn_when_some_of_its_entries_are_cancelled() -> None:
    scheduler = Scheduler([RowGroup(4, 1)], max_admission_tokens=10**6)
    first = [entry_of(2, request=1) for _ in range(4)]
    second = [entry_of(2, request=2) for _ in range(2)]
    for entry in (*first, *second):
        scheduler.add(entry)
    first[0].cancel()
    first[2].cancel()
    assert set(scheduler.release(0.0).never_ran) == {first[0], first[2]}
    assert [serve_one(scheduler) for _ in range(4)] == [first[1], second[0], first[3], second[1]]


def test_groups_of_bulk_alone_take_one_step_in_eight_beside_interactive_rows() -> None:
    scheduler = Scheduler([RowGroup(length, 2) for length in (2, 4, 6, 8)], max_admission_tokens=100)
    for length, priority in ((2, INTERACTIVE), (4, BULK), (6, INTERACTIVE), (8, BULK)):
        scheduler.add(entry_of(length, priority=priority))
    scheduler.schedule()
    steps = [scheduler.next_group() for _ in range(24)]
    assert steps == [0, 2, 0, 2, 0, 2, 0, 1, 2, 0, 2, 0, 2, 0, 2, 3, 0, 2, 0, 2, 0, 2, 0, 1]
    scheduler.leave(0, scheduler.running(0)[0])
    scheduler.leave(2, scheduler.running(2)[0])
    assert [scheduler.next_group() for _ in range(4)] == [3, 1, 3, 1]


def test_an_entry_past_its_deadline_leaves_the_queue_or_its_row_and_not_a_moment_before() -> None:
    scheduler = Scheduler([RowGroup(4, 1)], max_admission_tokens=10**6)
    running, waiting = entry_of(2, deadline_s=5.0), entry_of(2, deadline_s=7.0)
    for entry in (running, waiting):
        scheduler.add(entry)
    scheduler.schedule()
    assert scheduler.release(4.9).departures == ()
    lapses = scheduler.release(5.0)
    assert [departure.entry for departure in lapses.departures] == [running]
    assert lapses.never_ran == []
    assert scheduler.release(7.5).never_ran == [waiting]
    assert not scheduler.has_work


def test_deadlines_of_those_that_left_in_time_do_not_pile_up() -> None:
    deadlines, present = Deadlines(), set[Entry]()
    for number in range(5000):
        entry = entry_of(1, deadline_s=1000.0 + number)
        present.add(entry)
        deadlines.watch(entry, present=present, num_present=len(present))
        if len(present) > 10:
            present.pop()
    assert len(deadlines) < 200
    assert present <= set(deadlines.expired(10_000.0))
    assert len(deadlines) == 0


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
    lapses = scheduler.release(0.0)
    assert (lapses.never_ran, lapses.departures) == ([entry], [])
    assert scheduler.schedule() == []
