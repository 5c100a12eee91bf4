from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace

import pytest
from fake_runner import FakeRunner, make_waiter

from app.errors import ShuttingDown, WorkerFailed
from app.runtime import worker as worker_module
from app.runtime.events import SilentObserver, StepEvent
from app.runtime.lane import Lane
from app.runtime.worker import Worker

PATIENCE_S = 30.0
"""How long a test waits for what should happen at once."""


class Gate:
    """Holds a runner's steps until it is opened; tells when one has arrived."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.opened.wait(PATIENCE_S)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make_worker(
    runner: FakeRunner,
    *,
    observer: SilentObserver | None = None,
    clock: Callable[[], float] | None = None,
) -> Worker:
    clock = clock or Clock()
    lane = Lane("tiny", runner, max_admission_tokens=32, observer=observer or SilentObserver(), clock=clock)
    return Worker("test-decode", {"tiny": lane}, clock=clock)


@pytest.fixture
def thread_faults(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """What threads died of, in the place of a traceback on stderr."""
    faults: list[BaseException] = []

    def keep(arguments: threading.ExceptHookArgs) -> None:
        assert arguments.exc_value is not None
        faults.append(arguments.exc_value)

    monkeypatch.setattr(threading, "excepthook", keep)
    return faults


def test_entries_from_many_threads_are_all_translated() -> None:
    worker = make_worker(FakeRunner(lengths=(4, 8), max_rows=4))
    worker.start()
    waiters = [[make_waiter([1 + number, 1 + index]) for index in range(25)] for number in range(8)]

    def submit(number: int) -> None:
        for waiter in waiters[number]:
            worker.submit("tiny", waiter.entry)

    threads = [threading.Thread(target=submit, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert worker.stop(timeout_s=PATIENCE_S)
    for waiter in (waiter for row in waiters for waiter in row):
        assert waiter.result == waiter.expected


def test_stop_finishes_what_was_handed_over_and_takes_nothing_more() -> None:
    runner, gate = FakeRunner(max_rows=2), Gate()
    runner.fail_step = gate
    worker = make_worker(runner)
    worker.start()
    waiters = [make_waiter([index, 3]) for index in range(1, 10)]
    for waiter in waiters:
        worker.submit("tiny", waiter.entry)
    assert gate.reached.wait(PATIENCE_S)
    finished: list[bool] = []
    stopper = threading.Thread(target=lambda: finished.append(worker.stop(timeout_s=PATIENCE_S)))
    stopper.start()
    with suppress(ShuttingDown):
        for index in range(1_000_000):  # until the stopping thread has said so
            late = make_waiter([1, 1 + index % 90])
            worker.submit("tiny", late.entry)
            waiters.append(late)
    assert not late.outcomes
    gate.opened.set()
    stopper.join(PATIENCE_S)
    assert finished == [True]
    assert not worker.alive
    assert [waiter.result for waiter in waiters] == [waiter.expected for waiter in waiters]


def test_stop_answers_with_shutting_down_what_a_slow_step_left_undone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner, gate = FakeRunner(max_rows=2), Gate()
    runner.fail_step = gate
    worker = make_worker(runner)
    worker.start()
    waiters = [make_waiter([8, 9]) for _ in range(5)]  # 8 tokens each: one step cannot finish them
    for waiter in waiters:
        worker.submit("tiny", waiter.entry)
    assert gate.reached.wait(PATIENCE_S)
    monkeypatch.setattr(worker_module, "_ABORT_S", 0.0)
    assert not worker.stop(timeout_s=0.0)
    assert worker.alive, "a step cannot be interrupted"
    gate.opened.set()
    for waiter in waiters:
        assert waiter.answered.wait(PATIENCE_S)
        assert isinstance(waiter.result, ShuttingDown)
    assert runner.num_steps == 1


def test_a_worker_that_never_ran_answers_what_it_was_given() -> None:
    worker = make_worker(FakeRunner())
    waiter = make_waiter([1])
    worker.submit("tiny", waiter.entry)
    assert not worker.stop(timeout_s=0.0)
    assert isinstance(waiter.result, ShuttingDown)
    assert make_worker(FakeRunner()).stop(timeout_s=0.0)


def test_a_dying_thread_answers_everything_and_refuses_what_comes_later(
    thread_faults: list[BaseException],
) -> None:
    class Faulty(SilentObserver):
        def on_step(self, event: StepEvent) -> None:
            raise MemoryError

    runner, gate = FakeRunner(max_rows=2), Gate()
    runner.fail_step = gate
    worker = make_worker(runner, observer=Faulty())
    worker.start()
    first = make_waiter([9])  # ends at the step whose event kills the thread
    rest = [make_waiter([8, 9]) for _ in range(5)]
    for waiter in [first, *rest]:
        worker.submit("tiny", waiter.entry)
    assert gate.reached.wait(PATIENCE_S)
    gate.opened.set()
    for waiter in [first, *rest]:
        assert waiter.answered.wait(PATIENCE_S)
    assert first.result == first.expected
    assert {type(waiter.result) for waiter in rest} == {WorkerFailed}
    with pytest.raises(WorkerFailed, match="has died"):
        worker.submit("tiny", make_waiter([1]).entry)
    assert not worker.stop(timeout_s=PATIENCE_S), "what was admitted was not finished"
    assert not worker.alive
    assert [type(fault) for fault in thread_faults] == [MemoryError]


def test_an_entry_no_lane_can_take_is_answered_and_the_thread_lives_on() -> None:
    worker = make_worker(FakeRunner(lengths=(4,)))
    worker.start()
    too_long, unknown, good = make_waiter([1] * 5), make_waiter([1]), make_waiter([1])
    worker.submit("tiny", too_long.entry)
    worker.submit("another", unknown.entry)
    worker.submit("tiny", good.entry)
    assert worker.stop(timeout_s=PATIENCE_S)
    assert isinstance(too_long.result, WorkerFailed)
    assert isinstance(unknown.result, WorkerFailed)
    assert good.result == good.expected


def test_the_heartbeat_ages_while_a_step_hangs_and_not_while_there_is_nothing_to_do() -> None:
    clock, runner, gate = Clock(), FakeRunner(), Gate()
    runner.fail_step = gate
    worker = make_worker(runner, clock=clock)
    worker.start()
    clock.now_s += 1000
    assert worker.heartbeat_age_s() == 0.0
    waiter = make_waiter([9])
    worker.submit("tiny", waiter.entry)
    assert gate.reached.wait(PATIENCE_S)
    clock.now_s += 7
    assert worker.heartbeat_age_s() == 7.0
    assert worker.alive
    gate.opened.set()
    assert worker.stop(timeout_s=PATIENCE_S)


def test_an_idle_worker_sleeps_on_its_condition_without_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    timeouts: list[float | None] = []
    asleep = threading.Semaphore(0)

    class Watched(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            timeouts.append(timeout)
            asleep.release()
            return super().wait(timeout)

    monkeypatch.setattr(
        worker_module, "threading", SimpleNamespace(Condition=Watched, Thread=threading.Thread)
    )
    worker = make_worker(FakeRunner())
    worker.start()
    assert asleep.acquire(timeout=PATIENCE_S)
    for _ in range(2):
        waiter = make_waiter([9])
        worker.submit("tiny", waiter.entry)
        assert waiter.answered.wait(PATIENCE_S)
        assert asleep.acquire(timeout=PATIENCE_S)
    assert worker.stop(timeout_s=PATIENCE_S)
    assert timeouts == [None, None, None]
