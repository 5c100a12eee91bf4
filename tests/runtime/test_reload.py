"""Other models without a restart: what is exchanged, what stays, and that nothing happens when it fails."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from echo_engine import PATIENCE_S, EchoRunner, Gate, request, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stamped_models import Loading

from app.errors import BundleUnsupported, ShuttingDown, UnsupportedPair, WorkerFailed
from app.runtime import supervision
from app.runtime.engine import Engine, EngineOptions
from app.runtime.events import SilentObserver
from app.runtime.preparation import PreparedText
from app.runtime.request import PairInfo, TranslationRequest
from app.runtime.served_model import ServedModel, TargetPlan
from app.text import Tokenizer

TEXT = "The cat sees a bird."
LONG = "The cat sees a bird.\n" * 60
"""Prepared in a thread."""


@asynccontextmanager
async def serving(
    *models: ServedModel, observer: SilentObserver | None = None, **options: float
) -> AsyncIterator[Engine]:
    engine = Engine(models, EngineOptions(**({"num_workers": 2} | options)), observer=observer)  # type: ignore[arg-type]
    del models  # the engine alone keeps them
    engine.start()
    try:
        yield engine
    finally:
        await engine.stop(drain_s=PATIENCE_S)
        assert engine.num_waiting_tokens == engine.num_running_requests == 0


@pytest.fixture(autouse=True)
async def no_failure_unnoticed() -> AsyncIterator[None]:
    unnoticed: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unnoticed.append(context))
    yield
    await asyncio.sleep(0)
    gc.collect()
    assert unnoticed == []


async def text_of(engine: Engine, text: str = TEXT, *, source: str = "en", target: str = "pt") -> str:
    return (await engine.translate(TranslationRequest((text,), source, target))).texts[0].text


async def test_who_was_admitted_before_is_answered_by_the_model_it_began_with(tokenizer: Tokenizer) -> None:
    gate = Gate()
    old, new = Loading("cat", before_step=gate), Loading("bird")
    async with serving(old.model(tokenizer)) as engine:
        early = asyncio.create_task(text_of(engine))
        await gate.wait_reached()
        await engine.exchange([new.model(tokenizer)], order=["en-pt"])
        assert new.translated(await text_of(engine)), "nobody waits for the old model's requests"
        assert not early.done()
        gate.opened.set()
        assert old.translated(await early)


class HeldModel(ServedModel):
    """Prepares only once `prepared` is set."""

    reached: threading.Event
    opened: threading.Event

    def prepare(self, request: TranslationRequest) -> tuple[list[PreparedText], list[TargetPlan]]:
        if len(request.texts[0]) > len(TEXT):
            self.reached.set()
            assert self.opened.wait(PATIENCE_S)
        return super().prepare(request)


async def test_who_was_being_prepared_keeps_its_model_and_leaves_nothing_of_it_in_the_cache(
    tokenizer: Tokenizer,
) -> None:
    old, new = Loading("cat"), Loading("bird")
    held = HeldModel(**vars(old.model(tokenizer)))
    events = threading.Event(), threading.Event()
    vars(held)["reached"], vars(held)["opened"] = events
    async with serving(held, max_cache_bytes=1_000_000) as engine:
        del held
        early = asyncio.create_task(text_of(engine, LONG))
        assert await asyncio.to_thread(events[0].wait, PATIENCE_S)
        await engine.exchange([new.model(tokenizer)], order=["en-pt"])
        events[1].set()
        assert old.translated(await early)
        assert new.translated(await text_of(engine, LONG)), "the old model's translation was kept for the new"
        await until(lambda: not old.runners)


async def test_the_cache_of_a_model_that_stays_stays(tokenizer: Tokenizer) -> None:
    old, new, other = Loading("cat"), Loading("bird"), Loading("book", id="pt-en")
    async with serving(old.model(tokenizer), other.model(tokenizer), max_cache_bytes=1_000_000) as engine:
        for _ in range(2):
            assert old.translated(await text_of(engine))
            assert other.translated(await text_of(engine, source="pt", target="en"))
        await engine.exchange([new.model(tokenizer)], order=["en-pt", "pt-en"])
        proof = new.num_admitted
        for _ in range(2):
            assert new.translated(await text_of(engine))
            assert other.translated(await text_of(engine, source="pt", target="en"))
    assert (old.num_admitted, new.num_admitted - proof, other.num_admitted) == (1, 1, 1)


async def test_pairs_come_and_go(tokenizer: Tokenizer) -> None:
    first, second = Loading("cat"), Loading("bird", id="pt-en")
    async with serving(first.model(tokenizer)) as engine:
        pairs = engine.pairs
        assert engine.pairs is pairs
        await engine.exchange([second.model(tokenizer)], order=["pt-en"])
        assert engine.pairs == (PairInfo("pt", "en", "pt-en"),)
        with pytest.raises(UnsupportedPair, match="this service has pt-en"):
            await text_of(engine)
        assert second.translated(await text_of(engine, source="pt", target="en"))
        await engine.exchange([Loading("book").model(tokenizer)], order=["en-pt", "pt-en"])
        assert [pair.model for pair in engine.pairs] == ["en-pt", "pt-en"]


async def test_the_old_model_s_memory_is_given_back_after_its_last_request_without_the_garbage_collector(
    tokenizer: Tokenizer,
) -> None:
    gate = Gate()
    old = Loading("cat", before_step=gate)
    gc.collect()
    gc.disable()
    try:
        async with serving(old.model(tokenizer)) as engine:
            gate.opened.set()
            await asyncio.gather(*(text_of(engine) for _ in range(20)))
            gate.opened.clear()
            gate.reached.clear()
            early = asyncio.create_task(text_of(engine))
            await gate.wait_reached()
            await engine.exchange([Loading("bird").model(tokenizer)], order=["en-pt"])
            for _ in range(20):
                await text_of(engine)
            assert len(old.runners) == 2, "the last request still runs"
            gate.opened.set()
            await early
            await until(lambda: not old.runners)
    finally:
        gc.enable()


async def test_a_model_that_is_removed_is_given_back(tokenizer: Tokenizer) -> None:
    stays, goes = Loading("cat"), Loading("bird", id="pt-en")
    async with serving(stays.model(tokenizer), goes.model(tokenizer)) as engine:
        await text_of(engine, source="pt", target="en")
        await engine.exchange([], order=["en-pt"])
        await until(lambda: not goes.runners)
        assert stays.translated(await text_of(engine))


async def test_a_request_that_leaves_gives_its_model_back_too(tokenizer: Tokenizer) -> None:
    gate = Gate()
    old = Loading("cat", before_step=gate)
    async with serving(old.model(tokenizer)) as engine:
        early = asyncio.create_task(text_of(engine))
        await gate.wait_reached()
        await engine.exchange([Loading("bird").model(tokenizer)], order=["en-pt"])
        early.cancel()
        await asyncio.gather(early, return_exceptions=True)
        del early
        gate.opened.set()
        await until(lambda: not old.runners)


def broken() -> None:
    raise RuntimeError("no such operator")


class Failures(SilentObserver):
    def __init__(self) -> None:
        self.models: list[str] = []

    def on_failure(self, model: str, *, num_segments: int, error: Exception) -> None:
        self.models.append(model)


@pytest.mark.parametrize(
    ("bad", "cause"),
    [
        (Loading("bird", before_step=broken), "RuntimeError"),
        (Loading("bird", log_prob=float("nan")), "ValueError"),
        (Loading("bird", log_prob=-float("inf")), "ValueError"),
    ],
)
async def test_a_model_that_cannot_translate_is_refused_and_touches_no_worker(
    tokenizer: Tokenizer, bad: Loading, cause: str
) -> None:
    old, failures = Loading("cat"), Failures()
    async with serving(old.model(tokenizer), observer=failures) as engine:
        good = Loading("book", id="pt-en")
        with pytest.raises(BundleUnsupported, match=rf"bundle en-pt .*cannot translate \({cause}\)"):
            await engine.exchange([good.model(tokenizer), bad.model(tokenizer)], order=["en-pt", "pt-en"])
        assert [pair.model for pair in engine.pairs] == ["en-pt"]
        assert old.translated(await text_of(engine))
        assert failures.models == []
        # Errors and the frames that they passed refer to one another, and the thread lets go when it may.
        await until(lambda: gc.collect() >= 0 and not good.runners and not bad.runners)


async def test_too_little_memory_for_the_last_of_many_lanes_changes_nothing(tokenizer: Tokenizer) -> None:
    num_runners = 0

    def run_short() -> None:
        nonlocal num_runners
        num_runners += 1
        if num_runners == 3:  # the first proves the model, and two workers get one each
            raise MemoryError

    old, large = Loading("cat"), Loading("bird", before_runner=run_short)
    async with serving(old.model(tokenizer)) as engine:
        with pytest.raises(MemoryError):
            await engine.exchange([large.model(tokenizer)], order=["en-pt"])
        await until(lambda: not large.runners)
        assert old.translated(await text_of(engine))
        await engine.exchange([large.model(tokenizer)], order=["en-pt"])
        assert large.translated(await text_of(engine))


async def test_a_service_that_stops_meanwhile_takes_no_other_models(tokenizer: Tokenizer) -> None:
    old, new = Loading("cat"), Loading("bird")
    async with serving(old.model(tokenizer)) as engine:
        engine.begin_drain()
        with pytest.raises(ShuttingDown):
            await engine.exchange([new.model(tokenizer)], order=["en-pt"])
        assert [pair.model for pair in engine.pairs] == ["en-pt"]


async def supervised_until(engine: Engine, end: asyncio.Task[str], condition: Callable[[], bool]) -> None:
    await until(lambda: condition() or end.done())
    assert not end.done(), end.result()


async def test_canaries_under_way_at_an_exchange_are_no_reason_to_end(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "LOOK_EVERY_S", 0.001)
    gate = Gate()
    old = Loading("cat", before_step=gate), Loading("door", id="pt-en")
    async with serving(*(one.model(tokenizer) for one in old)) as engine:
        end = asyncio.create_task(engine.supervise(max_heartbeat_age_s=PATIENCE_S))
        await gate.wait_reached()
        new = Loading("bird"), Loading("book", id="pt-en")
        await engine.exchange([one.model(tokenizer) for one in new], order=["en-pt", "pt-en"])
        gate.opened.set()
        await supervised_until(engine, end, lambda: engine.started)
        await supervised_until(engine, end, lambda: not old[0].runners and not old[1].runners)
        assert new[0].translated(await text_of(engine))
        end.cancel()


class Killed(BaseException):
    """What no border catches."""


async def test_the_successor_of_a_dead_worker_has_the_new_models_and_those_still_in_use(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # in the place of a traceback on stderr
    killing = threading.Event()

    def kill() -> None:
        if killing.is_set():
            raise Killed

    old, new = Loading("cat"), Loading("bird", before_step=kill)
    held = HeldModel(**vars(old.model(tokenizer)))
    events = threading.Event(), threading.Event()
    vars(held)["reached"], vars(held)["opened"] = events
    async with serving(held, num_workers=1) as engine:
        end = asyncio.create_task(engine.supervise(max_heartbeat_age_s=PATIENCE_S))
        await supervised_until(engine, end, lambda: engine.started)
        early = asyncio.create_task(text_of(engine, LONG))
        assert await asyncio.to_thread(events[0].wait, PATIENCE_S)
        await engine.exchange([new.model(tokenizer)], order=["en-pt"])
        killing.set()
        with pytest.raises(WorkerFailed, match="died"):
            await text_of(engine)
        killing.clear()
        await supervised_until(engine, end, lambda: engine.healthy(max_heartbeat_age_s=PATIENCE_S))
        events[1].set()
        assert old.translated(await early)
        assert new.translated(await text_of(engine))
        end.cancel()


STAMPS = ("cat", "bird", "house", "train", "door", "book")


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.sampled_from(["ask", "ask", "ask long", "leave", "exchange", "turn"]), max_size=30),
    st.sampled_from([0, 1_000_000]),
)
def test_whatever_comes_when_each_answer_is_that_of_the_model_served_when_it_was_asked(
    tokenizer: Tokenizer, events: list[str], max_cache_bytes: int
) -> None:
    async def run() -> None:
        loadings = [Loading(STAMPS[0])]
        asked: list[tuple[Loading, asyncio.Task[str]]] = []
        async with serving(loadings[0].model(tokenizer), max_cache_bytes=max_cache_bytes) as engine:
            for event in events:
                if event.startswith("ask"):
                    task = asyncio.create_task(text_of(engine, LONG if event == "ask long" else TEXT))
                    asked.append((loadings[-1], task))
                    await asyncio.sleep(0)
                elif event == "leave" and asked:
                    asked.pop()[1].cancel()
                elif event == "exchange":
                    loadings.append(Loading(STAMPS[len(loadings) % len(STAMPS)]))
                    await engine.exchange([loadings[-1].model(tokenizer)], order=["en-pt"])
                else:
                    await asyncio.sleep(0)
            for loading, task in asked:
                assert loading.translated(await task), loading.stamp
            await until(lambda: not any(loading.runners for loading in loadings[:-1]))

    asyncio.run(run())


async def test_the_helpers_can_tell_who_translated(tokenizer: Tokenizer) -> None:
    """Else the tests above could not fail."""
    model = Loading("cat").model(tokenizer)
    async with serving(model) as engine:
        text = await text_of(engine)
    assert Loading("cat").translated(text)
    assert not Loading("bird").translated(text)
    assert (await _echoed(tokenizer, model)) == TEXT


async def _echoed(tokenizer: Tokenizer, model: ServedModel) -> str:
    echo = replace(model, make_runner=lambda _worker: EchoRunner(tokenizer.vocabulary_size, lambda: None))
    async with serving(echo) as engine:
        return (await engine.translate(request(TEXT))).texts[0].text
