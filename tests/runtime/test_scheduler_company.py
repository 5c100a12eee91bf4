"""Newcomers wait for company, but not for long and not where nothing else runs."""

from __future__ import annotations

import pytest

from app.decoding.greedy import GreedySearch
from app.runtime.entry import Entry
from app.runtime.request import Priority
from app.runtime.runner import RowGroup
from app.runtime.scheduler import Scheduler

_GROUPS = (RowGroup(source_length=8, max_rows=8), RowGroup(source_length=16, max_rows=8))


def _entry(num_source_tokens: int = 4, priority: Priority = Priority.INTERACTIVE) -> Entry:
    return Entry(
        [2] * num_source_tokens,
        GreedySearch(eos_id=0, max_target_tokens=9),
        max_target_tokens=9,
        submitted_at_s=0.0,
        deliver=lambda outcome: None,
        priority=priority,
    )


def _scheduler(*, company: int = 3, max_held_steps: int = 2) -> Scheduler:
    return Scheduler(
        _GROUPS, max_admission_tokens=1000, company=company, max_held_steps=max_held_steps, max_bulk_share=1.0
    )


def _running(scheduler: Scheduler, count: int) -> None:
    for _ in range(count):
        scheduler.add(_entry())
    assert len(scheduler.schedule()) == count


@pytest.mark.parametrize("num_running", [0, 1, 2])
def test_nobody_waits_where_little_runs(num_running):
    scheduler = _scheduler()
    _running(scheduler, num_running)
    scheduler.add(_entry())

    assert len(scheduler.schedule()) == 1


@pytest.mark.parametrize("priority", list(Priority))
def test_a_lone_newcomer_waits_as_many_steps_as_it_may_and_then_joins(priority):
    scheduler = _scheduler()
    _running(scheduler, 3)
    scheduler.add(_entry(priority=priority))

    assert [len(scheduler.schedule()) for _ in range(4)] == [0, 0, 1, 0]


def test_company_ends_the_wait():
    scheduler = _scheduler(max_held_steps=100)
    _running(scheduler, 3)
    for num_waiting in (1, 2):
        scheduler.add(_entry(priority=list(Priority)[num_waiting % 2]))
        assert scheduler.schedule() == []
    scheduler.add(_entry())

    assert len(scheduler.schedule()) == 3


def test_the_next_newcomer_waits_anew():
    scheduler = _scheduler()
    _running(scheduler, 3)
    for _ in range(2):
        scheduler.add(_entry())
        assert [len(scheduler.schedule()) for _ in range(3)] == [0, 0, 1]


def test_a_group_that_empties_lets_its_newcomers_in():
    scheduler = _scheduler(max_held_steps=100)
    _running(scheduler, 3)
    scheduler.add(_entry())
    assert scheduler.schedule() == []

    scheduler.leave(0, scheduler.running(0)[0])

    assert len(scheduler.schedule()) == 1


def test_one_group_does_not_hold_another():
    scheduler = _scheduler(max_held_steps=100)
    _running(scheduler, 3)
    scheduler.add(_entry())
    scheduler.add(_entry(12))

    assert [admission.group for admission in scheduler.schedule()] == [1]


def test_without_company_nobody_is_held():
    scheduler = Scheduler(_GROUPS, max_admission_tokens=1000)
    _running(scheduler, 3)
    scheduler.add(_entry())

    assert len(scheduler.schedule()) == 1
