from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from fake_runner import FakeRunner, Waiter, make_waiter
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import RequestCancelled, WorkerFailed
from app.runtime.events import AdmissionEvent, SilentObserver, StepEvent
from app.runtime.lane import Lane
from app.runtime.runner import StepOutput


class Watcher(SilentObserver):
    def __init__(self) -> None:
        self.admissions: list[AdmissionEvent] = []
        self.steps: list[StepEvent] = []
        self.finished: list[tuple[int, str]] = []
        self.num_cancelled = 0
        self.failures: list[tuple[int, Exception]] = []

    def on_admission(self, event: AdmissionEvent) -> None:
        self.admissions.append(event)

    def on_step(self, event: StepEvent) -> None:
        self.steps.append(event)

    def on_finished(self, model: str, *, num_target_tokens: int, finish_reason: str) -> None:
        self.finished.append((num_target_tokens, finish_reason))

    def on_cancelled(self, model: str, *, num_segments: int) -> None:
        self.num_cancelled += num_segments

    def on_failure(self, model: str, *, num_segments: int, error: Exception) -> None:
        self.failures.append((num_segments, error))


def make_lane(
    runner: FakeRunner, *, max_admission_tokens: int = 16, watcher: SilentObserver | None = None
) -> Lane:
    return Lane(
        "tiny",
        runner,
        max_admission_tokens=max_admission_tokens,
        observer=watcher or SilentObserver(),
        clock=lambda: 5.0,
    )


def finish(lane: Lane) -> None:
    for _ in range(10_000):
        if not lane.has_work:
            return
        lane.tick()
    raise AssertionError("the lane never ends")


def raising() -> None:
    raise RuntimeError("out of memory")


def on_call(number: int) -> Callable[[], None]:
    """Raises at the n-th call, counted from 1, and at no other."""
    calls = [0]

    def count() -> None:
        calls[0] += 1
        if calls[0] == number:
            raise RuntimeError("out of memory")

    return count


sources = st.lists(st.integers(1, 96), min_size=1, max_size=8)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), sources, st.integers(1, 12)),
        st.tuples(st.just("cancel"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("tick"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=80, deadline=None)
@given(actions=actions, max_rows=st.integers(1, 4), budget=st.integers(1, 40))
def test_every_entry_gets_the_answer_it_would_get_alone(
    actions: list[tuple[str, object, int]], max_rows: int, budget: int
) -> None:
    runner = FakeRunner(lengths=(2, 4, 8), max_rows=max_rows)
    lane = make_lane(runner, max_admission_tokens=budget)
    waiters: list[Waiter] = []
    for action, value, limit in actions:
        if action == "add":
            assert isinstance(value, list)
            waiters.append(make_waiter(value, limit))
            lane.add(waiters[-1].entry)
        elif action == "cancel" and waiters:
            assert isinstance(value, int)
            waiters[value % len(waiters)].entry.cancel()
        else:
            lane.tick()
    finish(lane)
    for waiter in waiters:
        if waiter.entry.cancelled and isinstance(waiter.result, RequestCancelled):
            continue
        assert waiter.result == waiter.expected


def test_an_entry_cancelled_before_its_turn_never_reaches_the_runner() -> None:
    runner, watcher = FakeRunner(), Watcher()
    lane = make_lane(runner, watcher=watcher)
    waiter = make_waiter([7, 7])
    lane.add(waiter.entry)
    waiter.entry.cancel()
    lane.tick()
    assert isinstance(waiter.result, RequestCancelled)
    assert runner.seen == []
    assert watcher.num_cancelled == 1
    assert not lane.has_work


def test_a_cancelled_row_leaves_at_the_next_step_and_its_neighbours_go_on() -> None:
    runner = FakeRunner(lengths=(8,), max_rows=3)
    lane = make_lane(runner, max_admission_tokens=100)
    waiters = [make_waiter([8]) for _ in range(3)]
    for waiter in waiters:
        lane.add(waiter.entry)
    lane.tick()
    waiters[0].entry.cancel()
    lane.tick()
    assert isinstance(waiters[0].result, RequestCancelled)
    assert [len(row.decoded) for row in runner.rows[0]] == [2, 2]
    finish(lane)
    assert [waiter.result for waiter in waiters[1:]] == [waiter.expected for waiter in waiters[1:]]


@pytest.mark.parametrize("fault", ["fail_admit", "fail_step", "fail_move"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_whoever_a_failing_runner_held_is_answered_once_and_later_entries_are_served(
    fault: str, number: int
) -> None:
    runner, watcher = FakeRunner(lengths=(4, 8), max_rows=3), Watcher()
    lane = make_lane(runner, watcher=watcher)
    setattr(runner, fault, on_call(number))
    waiters = [make_waiter([length, *([1] * (length % 5))]) for length in range(1, 20)]
    for waiter in waiters:
        lane.add(waiter.entry)
    finish(lane)
    failed = [waiter for waiter in waiters if isinstance(waiter.result, WorkerFailed)]
    assert failed
    assert sum(count for count, _ in watcher.failures) >= len(failed)
    for waiter in waiters:
        if waiter not in failed:
            assert waiter.result == waiter.expected
    late = [make_waiter([3, 5]), make_waiter([3, 5, 2, 2, 2, 2])]
    for waiter in late:
        lane.add(waiter.entry)
    finish(lane)
    assert [waiter.result for waiter in late] == [waiter.expected for waiter in late]


def test_a_move_that_fails_after_a_cancellation_fails_its_group_and_no_other() -> None:
    runner, watcher = FakeRunner(lengths=(4, 8), max_rows=3), Watcher()
    lane = make_lane(runner, max_admission_tokens=100, watcher=watcher)
    short = [make_waiter([8]) for _ in range(3)]
    long = [make_waiter([1, 1, 1, 1, 4]) for _ in range(3)]
    for waiter in [*short, *long]:
        lane.add(waiter.entry)
    lane.tick()
    short[0].entry.cancel()
    runner.fail_move = on_call(1)
    lane.tick()
    assert isinstance(short[0].result, RequestCancelled)
    assert [type(waiter.result) for waiter in short[1:]] == [WorkerFailed, WorkerFailed]
    assert [count for count, _ in watcher.failures] == [2]
    finish(lane)
    assert [waiter.result for waiter in long] == [waiter.expected for waiter in long]


@pytest.mark.parametrize(
    "change",
    [
        lambda output: replace(output, token_ids=output.token_ids[:-1]),
        lambda output: replace(output, token_ids=np.append(output.token_ids, 1)),
        lambda output: replace(output, log_probs=output.log_probs[:-1]),
        lambda output: replace(output, log_probs=output.log_probs[:0]),
        lambda output: replace(output, token_ids=output.token_ids[:, None]),
        lambda output: replace(output, log_probs=output.log_probs[None, :]),
        lambda output: replace(output, log_probs=output.log_probs * np.float32("nan")),
        lambda output: replace(output, log_probs=output.log_probs - np.float32("inf")),
        lambda output: replace(output, token_ids=output.token_ids - 1000),
        lambda output: replace(output, token_ids=output.token_ids + FakeRunner.vocabulary_size),
    ],
    ids=[
        "a token short",
        "a token too many",
        "a log-probability short",
        "no log-probabilities",
        "two-dimensional tokens",
        "two-dimensional log-probabilities",
        "not a number",
        "infinite",
        "negative token",
        "token beyond the vocabulary",
    ],
)
def test_an_impossible_step_output_is_a_failure_and_never_a_translation(
    change: Callable[[StepOutput], StepOutput],
) -> None:
    runner = FakeRunner()
    lane = make_lane(runner)
    waiters = [make_waiter([8]), make_waiter([9])]
    for waiter in waiters:
        lane.add(waiter.entry)
    lane.tick()
    runner.change_output = change
    lane.tick()
    assert isinstance(waiters[0].result, WorkerFailed)
    assert waiters[1].result == waiters[1].expected  # it ended at the first step, before the fault
    runner.change_output = lambda output: output
    assert not lane.has_work


def test_the_error_names_its_cause_for_the_log_and_keeps_it_from_the_caller() -> None:
    runner = FakeRunner()
    runner.fail_step = raising
    lane = make_lane(runner)
    waiter = make_waiter([5])
    lane.add(waiter.entry)
    lane.tick()
    error = waiter.result
    assert isinstance(error, WorkerFailed)
    assert isinstance(error.__cause__, RuntimeError)
    assert "out of memory" not in error.message
    assert "tiny" in error.message


def test_an_observer_that_raises_costs_nobody_the_answer() -> None:
    class Faulty(SilentObserver):
        def on_step(self, event: StepEvent) -> None:
            raise RuntimeError("a metric is misspelt")

    lane = make_lane(FakeRunner(), watcher=Faulty())
    done, going_on = make_waiter([9]), make_waiter([8])
    for waiter in (done, going_on):
        lane.add(waiter.entry)
    with pytest.raises(RuntimeError, match="misspelt"):
        lane.tick()
    lane.fail_all(WorkerFailed("the thread died"))
    assert done.result == done.expected
    assert isinstance(going_on.result, WorkerFailed)


def test_what_an_observer_is_told_adds_up() -> None:
    runner, watcher = FakeRunner(lengths=(4,), max_rows=2), Watcher()
    lane = make_lane(runner, max_admission_tokens=100, watcher=watcher)
    waiters = [make_waiter([length], submitted_at_s=2.0) for length in (3, 5, 8)]
    for waiter in waiters:
        lane.add(waiter.entry)
    finish(lane)
    assert [len(event.queue_s) for event in watcher.admissions] == [2, 1]
    assert {seconds for event in watcher.admissions for seconds in event.queue_s} == {3.0}
    assert [event.num_padded_tokens for event in watcher.admissions] == [8, 4]
    assert sum(event.num_rows for event in watcher.steps) == sum(tokens for tokens, _ in watcher.finished)
    assert len(watcher.steps) == runner.num_steps
    assert sorted(watcher.finished) == [(4, "eos"), (6, "eos"), (9, "eos")]
    assert waiters[0].outcomes[0].queue_s == 3.0
