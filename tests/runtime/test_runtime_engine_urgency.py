"""Deadlines and priorities through the engine, with real worker threads."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from echo_engine import PATIENCE_S, Clock, Gate, MakeEngine, request, until

from app.errors import DeadlineExceeded, InvalidOption, QueueFull
from app.runtime.events import AdmissionEvent, SilentObserver
from app.runtime.request import Priority


class Watcher(SilentObserver):
    def __init__(self) -> None:
        self.num_admitted = self.num_expired = self.num_cancelled = 0

    def on_admission(self, event: AdmissionEvent) -> None:
        self.num_admitted += len(event.queue_s)

    def on_expired(self, model: str, *, num_segments: int) -> None:
        self.num_expired += num_segments

    def on_cancelled(self, model: str, *, num_segments: int) -> None:
        self.num_cancelled += num_segments


@pytest.mark.parametrize(("asked_s", "allowed_s"), [(5.0, 0.0), (None, 5.0), (100.0, 5.0), (5.0, 100.0)])
async def test_what_waits_past_its_deadline_never_runs_and_what_runs_stops(
    make_engine: MakeEngine, asked_s: float | None, allowed_s: float
) -> None:
    clock, gate, watcher = Clock(), Gate(), Watcher()
    engine = make_engine(
        before_step=gate, clock=clock, observer=watcher, num_workers=1, request_timeout_s=allowed_s
    )
    asked = [
        replace(request(text), timeout_s=asked_s)
        for text in ("The cat sees a bird.\n" * 4, "A house. " * 30, "The door.")
    ]
    running = asyncio.create_task(engine.translate(asked[0]))
    await gate.wait_reached()
    waiting = [asyncio.create_task(engine.translate(one)) for one in asked[1:]]
    await until(lambda: engine.num_running_requests == 3)
    clock.now_s += 5.1
    gate.opened.set()
    for task in (running, *waiting):
        with pytest.raises(DeadlineExceeded, match="within the 5 s"):
            await task
    assert engine.num_waiting_tokens == 0
    clock.now_s += 1.0
    assert (await engine.translate(request("The cat."))).texts[0].text == "The cat."
    assert gate.num_steps < 10, "one step, and those of the last request"
    assert watcher.num_admitted == 4 + 1
    assert watcher.num_expired + watcher.num_cancelled == 4 + 30 + 1
    assert watcher.num_expired >= 4


async def test_a_request_without_a_deadline_waits_as_long_as_it_takes(make_engine: MakeEngine) -> None:
    clock, gate = Clock(), Gate()
    engine = make_engine(before_step=gate, clock=clock)
    task = asyncio.create_task(engine.translate(request("The cat.")))
    await gate.wait_reached()
    clock.now_s += 10_000.0
    gate.opened.set()
    assert (await task).texts[0].text == "The cat."


async def test_a_deadline_is_kept_even_while_the_worker_hangs(make_engine: MakeEngine) -> None:
    gate = Gate()
    engine = make_engine(before_step=gate, num_workers=1)
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(DeadlineExceeded, match=r"0\.05 s"):
            await engine.translate(replace(request("The cat."), timeout_s=0.05))
    assert engine.num_running_requests == engine.num_waiting_tokens == 0


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_timeout_that_is_no_time_is_refused(timeout_s: float) -> None:
    with pytest.raises(InvalidOption, match="above 0"):
        replace(request("The cat."), timeout_s=timeout_s)


async def test_bulk_that_fills_its_share_leaves_room_for_an_interactive_request(
    make_engine: MakeEngine,
) -> None:
    gate = Gate()
    engine = make_engine(before_step=gate, max_waiting_tokens=100, num_workers=1)
    bulk = replace(request("The cat sees a bird. " * 4), priority=Priority.BULK)
    tasks = [asyncio.create_task(engine.translate(bulk))]
    await gate.wait_reached()
    with pytest.raises(QueueFull, match="limit for bulk is 75"):
        await engine.translate(replace(bulk, texts=bulk.texts * 2))
    tasks.append(asyncio.create_task(engine.translate(request("The cat."))))
    gate.opened.set()
    assert [(await task).texts[0].text for task in tasks] == [*bulk.texts, "The cat."]


async def test_a_short_request_overtakes_one_of_hundreds_of_segments(make_engine: MakeEngine) -> None:
    gate = Gate()
    engine = make_engine(before_step=gate, num_workers=1, max_waiting_tokens=10**6)
    finished: list[str] = []

    async def translate(name: str, text: str, priority: Priority) -> None:
        await engine.translate(replace(request(text), priority=priority))
        finished.append(name)

    long = asyncio.create_task(translate("long", "The cat.\n" * 400, Priority.INTERACTIVE))
    await gate.wait_reached()
    others = [
        # Long enough to be at it still when the other's text is put together, which takes a while too.
        asyncio.create_task(translate("bulk", "The cat.\n" * 4000, Priority.BULK)),
        asyncio.create_task(translate("short", "The cat. A bird.", Priority.INTERACTIVE)),
    ]
    await until(lambda: engine.num_running_requests == 3)
    gate.opened.set()
    await asyncio.gather(long, *others)
    assert finished == ["short", "long", "bulk"]
