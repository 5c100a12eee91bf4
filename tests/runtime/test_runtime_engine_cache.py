"""The engine with its cache answers as the engine without, decodes less, and lets nobody wait for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.decoding.hypothesis import FinishReason, Hypothesis
from app.decoding.options import DecodingOptions
from app.errors import DeadlineExceeded, WorkerFailed
from app.runtime.dispatch import Terms, decode_segments
from app.runtime.editions import Edition
from app.runtime.engine import Engine, EngineOptions, ServedModel
from app.runtime.entry import Outcome
from app.runtime.flights import Flights
from app.runtime.guidance_of_request import TargetPlan
from app.runtime.preparation import PreparedSegment
from app.runtime.request import PairInfo, Priority, TextResult, TranslationRequest
from app.runtime.runner import Int64Array, RowGroup, SourceRow, StepOutput
from app.runtime.translation_cache import CacheLookup, SilentCacheObserver, TranslationCache
from app.text import Tokenizer

PATIENCE_S = 30.0
SENTENCES = ("The cat sees a bird.", "One red house.", "Every bird likes the train.", "A door and a book.")


class Watcher(SilentCacheObserver):
    def __init__(self) -> None:
        self.results: list[CacheLookup] = []

    def on_cache_lookup(self, model: str, result: CacheLookup) -> None:
        self.results.append(result)


class Model:
    """Its every token depends on the source and all before; counts what is decoded."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.num_admitted = 0
        self.num_faults = 0
        self.reached = threading.Event()
        self.opened = threading.Event()
        self.opened.set()
        self.admitted_more = threading.Event()
        self._tokenizer = tokenizer

    def served(self) -> ServedModel:
        return ServedModel(
            id="en-pt",
            pairs=(PairInfo("en", "pt", "en-pt"),),
            tokenizer=self._tokenizer,
            shortlist=None,
            eos_id=self._tokenizer.eos_id,
            max_source_tokens=16,
            max_target_tokens=32,
            max_target_ratio=2.0,
            make_runner=lambda _worker: ScrambleRunner(self, self._tokenizer.vocabulary_size),
        )

    def before_step(self) -> None:
        self.reached.set()
        assert self.opened.wait(PATIENCE_S)
        if self.num_faults:
            self.num_faults -= 1
            raise RuntimeError("a fault of the graph")


class ScrambleRunner:
    def __init__(self, model: Model, vocabulary_size: int) -> None:
        self.vocabulary_size = vocabulary_size
        self.groups = (RowGroup(8, 4), RowGroup(16, 4))
        self._model = model
        self._sources: list[list[Sequence[int]]] = [[], []]

    def admit(self, group: int, newcomers: Sequence[SourceRow]) -> None:
        self._model.num_admitted += len(newcomers)
        if self._model.num_admitted > 1:
            self._model.admitted_more.set()
        del self._sources[group][newcomers[0].slot :]
        self._sources[group] += [row.source_ids for row in newcomers]

    def step(self, group: int, last_ids: Int64Array, positions: Int64Array) -> StepOutput:
        self._model.before_step()
        token_ids, log_probs = [], []
        for source, last_id, position in zip(
            self._sources[group], last_ids.tolist(), positions.tolist(), strict=False
        ):
            token_id = source[position]
            if position < len(source) - 1:
                token_id = 2 + (token_id * 7 + last_id * 3 + position) % (self.vocabulary_size - 2)
            token_ids.append(token_id)
            log_probs.append(-(1 + token_id) / (7 + position))
        return StepOutput(np.array(token_ids, dtype=np.int64), np.array(log_probs, dtype=np.float32))

    def move(self, group: int, *, from_slot: int, to_slot: int) -> None:
        self._sources[group][to_slot] = self._sources[group][from_slot]


@asynccontextmanager
async def running(
    model: Model, *, max_cache_bytes: int = 1_000_000, watcher: Watcher | None = None, num_workers: int = 1
) -> AsyncIterator[Engine]:
    options = EngineOptions(num_workers=num_workers, max_cache_bytes=max_cache_bytes)
    engine = Engine([model.served()], options, cache_observer=watcher)
    engine.start()
    try:
        yield engine
    finally:
        model.opened.set()
        await engine.stop(drain_s=PATIENCE_S)
        assert engine.num_waiting_tokens == engine.num_running_requests == 0


@pytest.fixture
def model(tokenizer: Tokenizer) -> Model:
    return Model(tokenizer)


@pytest.fixture
def watcher() -> Watcher:
    return Watcher()


def request(*texts: str, timeout_s: float | None = None, **options: object) -> TranslationRequest:
    chosen = DecodingOptions(**options)  # type: ignore[arg-type]
    return TranslationRequest(texts, "en", "pt", chosen, timeout_s=timeout_s)


async def until_stuck(model: Model) -> None:
    assert await asyncio.to_thread(model.reached.wait, PATIENCE_S)


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_what_was_translated_is_not_decoded_again_and_reads_the_same(
    model: Model, watcher: Watcher
) -> None:
    text = f"{SENTENCES[0]}  {SENTENCES[1]}\n"
    async with running(model, watcher=watcher) as engine:
        first = await engine.translate(request(text))
        again = await engine.translate(request(f"{SENTENCES[1]} ", text))
    assert again.texts[1] == first.texts[0]
    assert model.num_admitted == 2
    assert watcher.results == [CacheLookup.MISS] * 2 + [CacheLookup.HIT] * 3
    assert again.timings.queue_s == again.timings.decode_s == 0.0


async def test_equal_sentences_of_a_document_are_decoded_once(model: Model, watcher: Watcher) -> None:
    async with running(model, watcher=watcher) as engine:
        result = await engine.translate(request(f"{SENTENCES[0]}\n" * 50))
    assert model.num_admitted == 1
    assert len({segment.target for segment in result.texts[0].segments}) == 1
    assert len(result.texts[0].segments) == 50
    assert watcher.results == [CacheLookup.MISS] + [CacheLookup.JOINED] * 49


async def test_size_zero_decodes_everything(model: Model, watcher: Watcher) -> None:
    async with running(model, max_cache_bytes=0, watcher=watcher) as engine:
        await engine.translate(request(f"{SENTENCES[0]}\n" * 3))
        await engine.translate(request(SENTENCES[0]))
    assert model.num_admitted == 4
    assert watcher.results == []


@pytest.mark.parametrize(
    "options", [{"max_target_tokens": 3}, {"length_penalty": 0.5}, {"max_target_ratio": 1.5}]
)
async def test_another_option_is_another_decoding(model: Model, options: dict[str, object]) -> None:
    async with running(model) as engine:
        await engine.translate(request(SENTENCES[0]))
        with_cache = await engine.translate(request(SENTENCES[0], **options))
    assert model.num_admitted == 2
    async with running(model, max_cache_bytes=0) as engine:
        assert (await engine.translate(request(SENTENCES[0], **options))).texts == with_cache.texts


async def test_a_failure_is_not_kept(model: Model) -> None:
    async with running(model) as engine:
        model.num_faults = 1
        with pytest.raises(WorkerFailed):
            await engine.translate(request(SENTENCES[0]))
        await engine.translate(request(SENTENCES[0]))
    assert model.num_admitted == 2


async def test_whoever_joined_is_answered_when_the_first_one_leaves(model: Model) -> None:
    async with running(model) as engine:
        model.opened.clear()
        first = asyncio.create_task(engine.translate(request(SENTENCES[0])))
        await until_stuck(model)
        second = asyncio.create_task(engine.translate(request(SENTENCES[0])))
        await turns()
        first.cancel()
        await turns()
        model.opened.set()
        assert (await second).texts[0].segments
        with pytest.raises(asyncio.CancelledError):
            await first
    assert model.num_admitted == 1, "the decoding went on"


async def test_when_all_have_left_the_rows_are_free_and_the_next_one_begins_anew(model: Model) -> None:
    async with running(model) as engine:
        model.opened.clear()
        tasks = [asyncio.create_task(engine.translate(request(SENTENCES[0]))) for _ in range(3)]
        await until_stuck(model)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert engine.num_waiting_tokens == 0
        model.opened.set()
        await engine.translate(request(SENTENCES[0]))
    assert model.num_admitted == 2


async def test_a_deadline_is_its_own_requests_alone(model: Model) -> None:
    async with running(model) as engine:
        model.opened.clear()
        hasty = asyncio.create_task(engine.translate(request(SENTENCES[0], timeout_s=0.05)))
        await until_stuck(model)
        patient = asyncio.create_task(engine.translate(request(SENTENCES[0])))
        also_hasty = asyncio.create_task(engine.translate(request(SENTENCES[0], timeout_s=0.05)))
        for task in (hasty, also_hasty):
            with pytest.raises(DeadlineExceeded):
                await task
        assert not patient.done()
        model.opened.set()
        assert (await patient).texts[0].segments


async def test_nobody_waits_for_a_late_segment_of_a_long_request_or_for_bulk(
    model: Model, watcher: Watcher
) -> None:
    async with running(model, watcher=watcher) as engine:
        model.opened.clear()
        long = "\n".join(
            [*(f"{word} sees a bird." for word in ("Cat", "House", "Train", "Door")), SENTENCES[0]]
        )
        bulk = TranslationRequest((SENTENCES[1],), "en", "pt", priority=Priority.BULK)
        tasks = [asyncio.create_task(engine.translate(asked)) for asked in (request(long), bulk)]
        await turns()
        del watcher.results[:]
        tasks += [
            asyncio.create_task(engine.translate(request(sentence)))
            for sentence in (SENTENCES[0], SENTENCES[1], SENTENCES[1])
        ]
        await turns()
        assert watcher.results == [CacheLookup.MISS, CacheLookup.MISS, CacheLookup.JOINED]
        model.opened.set()
        await asyncio.gather(*tasks)


async def test_the_proof_that_a_worker_can_translate_is_never_from_the_cache(model: Model) -> None:
    async with running(model) as engine:
        await engine.translate(request("Hello."))
        assert model.num_admitted == 1
        supervision = asyncio.create_task(engine.supervise(max_heartbeat_age_s=PATIENCE_S))
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.to_thread(model.admitted_more.wait, PATIENCE_S)
        supervision.cancel()
    assert model.num_admitted == 2


class FailingCrew:
    """Fails whatever it is given, at the loop's next turn."""

    def submit(
        self, lane: str, make_entry: object, receive: Callable[[Outcome], None], *, seat: object
    ) -> FailingCrew:
        failure = Outcome(WorkerFailed("a fault"), queue_s=0.0, decode_s=0.0)
        asyncio.get_running_loop().call_soon(receive, failure)
        return self

    def cancel(self) -> None:
        """It has failed already."""


async def test_a_failure_is_raised_though_all_that_follows_was_found(model: Model) -> None:
    """It comes while thousands of segments are still being looked up."""
    flights = Flights(TranslationCache(1_000_000))
    options = DecodingOptions()
    known = PreparedSegment("known", (5, 0))
    flights.cache.keep(
        flights.cache.keys("en-pt#1", options).key(known.source_ids, TargetPlan(9)),
        (Hypothesis((7,), -1.0, FinishReason.EOS),),
    )
    segments = [PreparedSegment("new", (6, 0)), *[known] * 300]
    with pytest.raises(WorkerFailed):
        await decode_segments(
            FailingCrew(),  # type: ignore[arg-type]
            Edition("en-pt#1", model.served()),
            segments,
            [TargetPlan(9)] * len(segments),
            terms=Terms(1, options),
            flights=flights,
        )


# Any interleaving of requests, cancellations and faults.


@dataclass(frozen=True)
class Visit:
    """A request, how many turns of the loop after the one before, and after how many it is given up."""

    sentences: tuple[int, ...]
    max_target_tokens: int | None
    turns_before: int
    gives_up_after: int | None
    fault: bool


visits = st.lists(
    st.builds(
        Visit,
        sentences=st.lists(st.integers(0, len(SENTENCES) - 1), min_size=1, max_size=5).map(tuple),
        max_target_tokens=st.sampled_from([None, None, 2, 4]),
        turns_before=st.integers(0, 4),
        gives_up_after=st.one_of(st.none(), st.none(), st.integers(0, 6)),
        fault=st.sampled_from([False, False, False, True]),
    ),
    max_size=8,
)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(happenings=visits, max_cache_bytes=st.sampled_from([1_500, 1_000_000]), num_workers=st.integers(1, 2))
def test_with_the_cache_every_request_gets_what_it_gets_without(
    tokenizer: Tokenizer, happenings: Sequence[Visit], max_cache_bytes: int, num_workers: int
) -> None:
    async def visit_all() -> None:
        alone = {
            asked: await _alone(tokenizer, *asked)
            for asked in {(visit.sentences, visit.max_target_tokens) for visit in happenings}
        }
        model = Model(tokenizer)
        async with running(model, max_cache_bytes=max_cache_bytes, num_workers=num_workers) as engine:
            tasks = []
            for visit in happenings:
                await turns(visit.turns_before)
                model.num_faults += visit.fault
                tasks.append(asyncio.create_task(_visit(engine, visit)))
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for visit, result in zip(happenings, results, strict=True):
            if isinstance(result, WorkerFailed):
                assert any(other.fault for other in happenings)
            elif isinstance(result, BaseException):
                assert isinstance(result, TimeoutError)
                assert visit.gives_up_after is not None
            else:
                assert result == alone[visit.sentences, visit.max_target_tokens]

    asyncio.run(visit_all())


def _asked(sentences: tuple[int, ...], max_target_tokens: int | None) -> TranslationRequest:
    return request("\n".join(SENTENCES[index] for index in sentences), max_target_tokens=max_target_tokens)


async def _alone(
    tokenizer: Tokenizer, sentences: tuple[int, ...], max_target_tokens: int | None
) -> tuple[TextResult, ...]:
    async with running(Model(tokenizer), max_cache_bytes=0) as engine:
        return (await engine.translate(_asked(sentences, max_target_tokens))).texts


async def _visit(engine: Engine, visit: Visit) -> tuple[TextResult, ...]:
    task = asyncio.ensure_future(engine.translate(_asked(visit.sentences, visit.max_target_tokens)))
    if visit.gives_up_after is not None:
        await turns(visit.gives_up_after)
        task.cancel()
        try:
            return (await task).texts
        except asyncio.CancelledError:
            raise TimeoutError from None
    return (await task).texts
