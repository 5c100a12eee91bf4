"""Workers that die or hang, and what the engine does about it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest
from echo_engine import PATIENCE_S, Clock, EchoRunner, MakeEngine, request, until

from app.errors import WorkerFailed
from app.runtime import supervision
from app.runtime.engine import Engine

LIMIT_S = 4.0


class Trap:
    """Steps that hang, or raise what no border catches, once it is set."""

    def __init__(self) -> None:
        self.is_set = False
        self.reached = threading.Event()
        self.opened = threading.Event()
        self.fault: BaseException | None = None
        self.deaths = threading.Semaphore(0)

    def __call__(self) -> None:
        if not self.is_set:
            return
        if self.fault is not None:
            raise self.fault
        self.reached.set()
        assert self.opened.wait(PATIENCE_S)

    async def wait_reached(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, PATIENCE_S)


class Supervised:
    """An engine under supervision, with a clock of its own."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self.engine, self.clock = engine, clock
        self.end = asyncio.create_task(engine.supervise(max_heartbeat_age_s=LIMIT_S))

    @property
    def healthy(self) -> bool:
        return self.engine.healthy(max_heartbeat_age_s=LIMIT_S)

    async def until(self, condition: str) -> None:
        holds = {"started": lambda: self.engine.started, "healthy": lambda: self.healthy}[condition]
        await until(lambda: holds() or self.end.done())
        assert not self.end.done(), self.end.result()


@pytest.fixture
async def trap(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Trap]:
    monkeypatch.setattr(supervision, "LOOK_EVERY_S", 0.001)
    trap = Trap()
    # In the place of a traceback on stderr.
    monkeypatch.setattr(threading, "excepthook", lambda _: trap.deaths.release())
    yield trap
    trap.opened.set()


@pytest.fixture
async def supervised(make_engine: MakeEngine, trap: Trap) -> AsyncIterator[Supervised]:
    clock = Clock()
    supervised = Supervised(make_engine(before_step=trap, clock=clock, num_workers=1), clock)
    yield supervised
    supervised.end.cancel()
    await asyncio.gather(supervised.end, return_exceptions=True)


async def test_it_has_started_once_every_worker_has_translated_with_every_model(
    make_engine: MakeEngine, trap: Trap
) -> None:
    trap.is_set = True
    engine = make_engine(before_step=trap, pairs=(("en", "pt"), ("pt", "en")))
    supervised = Supervised(engine, Clock())
    await trap.wait_reached()
    assert not engine.started
    assert not supervised.healthy
    trap.opened.set()
    await supervised.until("started")
    assert supervised.healthy
    supervised.end.cancel()


async def test_a_model_that_cannot_translate_is_a_reason_to_end(make_engine: MakeEngine, trap: Trap) -> None:
    trap.is_set, trap.fault = True, RuntimeError("no such operator")
    engine = make_engine(before_step=trap)
    async with asyncio.timeout(PATIENCE_S):
        reason = await engine.supervise(max_heartbeat_age_s=LIMIT_S)
    assert reason.startswith("a canary was not translated: decoding with model en-pt failed")
    assert not engine.started


async def test_a_worker_that_hangs_turns_health_red_fails_what_it_held_and_is_replaced(
    supervised: Supervised, trap: Trap
) -> None:
    engine, clock = supervised.engine, supervised.clock
    await supervised.until("started")
    trap.is_set = True
    held = [asyncio.create_task(engine.translate(request(text))) for text in ("The cat.", "A bird. " * 40)]
    await trap.wait_reached()
    clock.now_s += LIMIT_S
    assert supervised.healthy, "a step may take as long as the setting says"
    trap.is_set = False
    clock.now_s += 0.01
    assert not supervised.healthy
    for task in held:
        with pytest.raises(WorkerFailed, match=r"no sign of life for 4 s"):
            await task
    await supervised.until("healthy")
    assert (await engine.translate(request("The bird."))).texts[0].text == "The bird."
    trap.opened.set()  # the old thread wakes, and finds that nobody wants its answers
    assert (await engine.translate(request("A cat. A bird."))).texts[0].text == "A cat. A bird."
    assert engine.started


async def test_a_worker_that_hangs_again_is_a_reason_to_end(supervised: Supervised, trap: Trap) -> None:
    engine, clock = supervised.engine, supervised.clock
    await supervised.until("started")
    for _ in range(2):
        await supervised.until("healthy")
        trap.reached.clear()
        trap.is_set = True
        held = asyncio.create_task(engine.translate(request("The cat.")))
        await trap.wait_reached()
        trap.is_set = False
        clock.now_s += LIMIT_S + 0.01
        with pytest.raises(WorkerFailed):
            await held
    async with asyncio.timeout(PATIENCE_S):
        assert await supervised.end == (
            "decoding thread 0 gave no sign of life for 4 s, as did the one before it"
        )
    assert not supervised.healthy


async def test_a_thread_that_dies_is_replaced_once(supervised: Supervised, trap: Trap) -> None:
    class Killed(BaseException):
        """Nothing inside a step catches it."""

    engine = supervised.engine
    await supervised.until("started")
    for _ in range(2):
        await supervised.until("healthy")
        trap.is_set, trap.fault = True, Killed()
        with pytest.raises(WorkerFailed, match="died"):
            await engine.translate(request("The cat.\nA bird."))
        trap.is_set = False
    async with asyncio.timeout(PATIENCE_S):
        assert await supervised.end == "decoding thread 0 died, as did the one before it"
    for _ in range(2):
        assert await asyncio.to_thread(trap.deaths.acquire, timeout=PATIENCE_S)


async def test_a_process_that_was_asleep_is_not_taken_for_a_worker_that_hangs(
    make_engine: MakeEngine, trap: Trap
) -> None:
    clock = Clock()
    engine = make_engine(before_step=trap, clock=clock, num_workers=1)
    trap.is_set = True
    task = asyncio.create_task(engine.translate(request("The cat sees a bird.")))
    await trap.wait_reached()
    clock.now_s += 3600.0
    assert await engine._crew.look(max_heartbeat_age_s=LIMIT_S) == ([], None)
    trap.opened.set()
    assert (await task).texts[0].text == "The cat sees a bird."
    assert await engine._crew.look(max_heartbeat_age_s=LIMIT_S) == ([], None)


async def test_a_failing_graph_is_answered_and_nobody_is_replaced(supervised: Supervised, trap: Trap) -> None:
    await supervised.until("started")
    trap.is_set, trap.fault = True, RuntimeError("out of memory")
    for _ in range(5):
        with pytest.raises(WorkerFailed, match="RuntimeError"):
            await supervised.engine.translate(request("The cat."))
    trap.is_set = False
    assert (await supervised.engine.translate(request("The cat."))).texts[0].text == "The cat."
    assert not supervised.end.done()


async def test_stopping_a_supervised_engine_is_no_failure(supervised: Supervised) -> None:
    await supervised.until("started")
    assert await supervised.engine.stop(drain_s=PATIENCE_S)
    await asyncio.sleep(0.01)
    assert not supervised.end.done()


def test_the_echo_runner_is_one_thread_s_own() -> None:
    """The tests above replace a worker; its successor must not share buffers with it."""
    first, second = (EchoRunner(10, lambda: None) for _ in range(2))
    assert first._sources is not second._sources
