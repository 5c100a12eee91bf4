"""The engine on a loop with real worker threads, over a model that repeats its source."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter

import pytest
from echo_engine import PATIENCE_S, Clock, Gate, MakeEngine, request

from app.decoding.options import DecodingOptions
from app.errors import (
    InvalidOption,
    InvalidRequest,
    QueueFull,
    RequestTooLarge,
    ShuttingDown,
    UnsupportedPair,
    WorkerFailed,
)
from app.runtime import worker as worker_module
from app.runtime.entry import Entry
from app.runtime.events import SilentObserver
from app.runtime.request import TranslationRequest, WarningCode


async def test_concurrent_requests_each_get_their_own_answer(make_engine: MakeEngine) -> None:
    engine = make_engine()
    words = ["cat", "bird", "house", "train", "door", "book"]
    requests = [
        request(*(f"The {words[(i + j) % 6]} sees a {words[i % 6]}." for j in range(1 + i % 4)))
        for i in range(40)
    ]
    results = await asyncio.gather(*map(engine.translate, requests))
    for asked, result in zip(requests, results, strict=True):
        assert tuple(text.text for text in result.texts) == asked.texts
        assert result.model == "en-pt"


@pytest.mark.parametrize("text", ["", " ", "\n\t \r\n", "42", "...", "\x00"])
async def test_a_text_without_words_comes_back_as_it_is(make_engine: MakeEngine, text: str) -> None:
    result = await make_engine().translate(request(text, "The cat.", text))
    assert [part.text for part in result.texts] == [text, "The cat.", text]
    assert result.texts[0].segments == ()


async def test_no_texts_are_no_work(make_engine: MakeEngine) -> None:
    result = await make_engine().translate(request())
    assert result.texts == ()
    assert result.timings.queue_s == result.timings.decode_s == 0.0


async def test_gaps_and_wrapped_pieces_join_again(make_engine: MakeEngine) -> None:
    engine = make_engine()
    long = " ".join(["the cat sees a red bird"] * 6)
    text = f"  A cat.\n\n\t{long}.\r\nOne bird. The end\n"
    result = (await engine.translate(request(text))).texts[0]
    assert result.text == text
    wrapped = [warning for warning in result.warnings if warning.code is WarningCode.SEGMENT_WRAPPED]
    assert [warning.segment for warning in wrapped] == [1]
    assert all(segment.num_source_tokens <= 16 for segment in result.segments)


async def test_unknown_characters_and_cut_translations_are_reported(make_engine: MakeEngine) -> None:
    result = await make_engine().translate(request("The cat 漢 sees.", max_target_tokens=2))
    codes = {warning.code for warning in result.texts[0].warnings}
    assert codes == {WarningCode.UNKNOWN_CHARACTERS, WarningCode.TARGET_TRUNCATED}
    assert result.texts[0].segments[0].num_target_tokens == 2


async def test_a_long_request_prepared_in_a_thread_gives_the_same(make_engine: MakeEngine) -> None:
    engine = make_engine()
    text = "The cat sees a bird.\n" * 200
    assert (await engine.translate(request(text))).texts[0].text == text


async def test_a_lone_surrogate_is_refused_by_its_place_and_without_the_text(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequest, match="text 1.*index 7") as caught:  # noqa: RUF043
        await engine.translate(request("fine", "secret \ud800"))
    assert "secret" not in str(caught.value)
    assert engine.num_waiting_tokens == 0


@pytest.mark.parametrize(
    ("source", "target", "model"),
    [
        ("en", "pt", "en-pt"),
        ("EN", "PT", "en-pt"),
        ("en-GB", "pt-BR", "en-pt-BR"),
        ("en", "pt-br", "en-pt-BR"),
        ("en-US", "pt-PT", "en-pt"),
        ("en-Latn-US", "pt", "en-pt"),
    ],
)
async def test_a_pair_is_found_without_case_and_by_its_language(
    make_engine: MakeEngine, source: str, target: str, model: str
) -> None:
    engine = make_engine(pairs=(("en", "pt"), ("en", "pt-BR")))
    assert engine.check_pair(source, target).model == model


@pytest.mark.parametrize(
    ("source", "target"), [("pt", "en"), ("", ""), ("en", "x" * 5000), ("e\n", "p\x1b[31m")]
)
async def test_an_unserved_pair_is_refused_in_plain_words(
    make_engine: MakeEngine, source: str, target: str
) -> None:
    with pytest.raises(UnsupportedPair, match="this service has en-pt") as caught:
        await make_engine().translate(TranslationRequest(("x",), source, target))
    assert len(str(caught.value)) < 200
    assert str(caught.value).isprintable()


async def test_cancelling_a_request_takes_its_segments_out(make_engine: MakeEngine) -> None:
    class Watcher(SilentObserver):
        def __init__(self) -> None:
            self.num_cancelled = self.num_finished = 0

        def on_cancelled(self, model: str, *, num_segments: int) -> None:
            self.num_cancelled += num_segments

        def on_finished(self, model: str, *, num_target_tokens: int, finish_reason: str) -> None:
            self.num_finished += 1

    gate, watcher = Gate(), Watcher()
    engine = make_engine(before_step=gate, observer=watcher, num_workers=1)
    text = "The cat sees a bird.\n" * 10
    task = asyncio.create_task(engine.translate(request(text)))
    await gate.wait_reached()
    assert engine.num_waiting_tokens > 0
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.num_waiting_tokens == 0
    assert engine.num_running_requests == 0
    gate.opened.set()
    assert await engine.stop(drain_s=PATIENCE_S)
    assert (watcher.num_cancelled, watcher.num_finished) == (10, 0)
    assert gate.num_steps == 1


async def test_a_failing_step_fails_the_request_once_and_the_next_one_is_served(
    make_engine: MakeEngine,
) -> None:
    faults = [RuntimeError("out of memory")]

    def fail_once() -> None:
        if faults:
            raise faults.pop()

    engine = make_engine(before_step=fail_once)
    with pytest.raises(WorkerFailed):
        await engine.translate(request("The cat.\n" * 30))
    assert engine.num_waiting_tokens == 0
    assert (await engine.translate(request("The cat."))).texts[0].text == "The cat."
    assert engine.healthy(max_heartbeat_age_s=PATIENCE_S)


async def test_a_full_queue_says_when_to_come_back(make_engine: MakeEngine) -> None:
    clock, gate = Clock(), Gate()
    engine = make_engine(before_step=gate, clock=clock, max_waiting_tokens=60, num_workers=1)
    text = "The cat sees a bird. " * 4
    first = asyncio.create_task(engine.translate(request(text)))
    await gate.wait_reached()
    waiting = engine.num_waiting_tokens
    assert 20 < waiting <= 60
    with pytest.raises(QueueFull, match="60") as caught:
        await engine.translate(request(text * 2))
    assert caught.value.retry_after_s == 1.0, "nothing was measured yet, so the guess is short"
    assert engine.num_waiting_tokens == waiting
    clock.now_s += 20.0  # these tokens take 20 s
    gate.opened.set()
    await first
    gate.reached.clear()
    gate.opened.clear()
    second = asyncio.create_task(engine.translate(request(text)))
    await gate.wait_reached()
    with pytest.raises(QueueFull) as caught:
        await engine.translate(request(text * 2))
    assert 3.0 < caught.value.retry_after_s <= 60.0
    gate.opened.set()
    await second


async def test_a_stalled_queue_never_asks_for_an_hour(make_engine: MakeEngine) -> None:
    clock, gate = Clock(), Gate()
    engine = make_engine(before_step=gate, clock=clock, max_waiting_tokens=60, num_workers=1)
    first = asyncio.create_task(engine.translate(request("The cat sees a bird. " * 4)))
    await gate.wait_reached()
    clock.now_s += 3600.0
    gate.opened.set()
    await first
    gate.reached.clear()
    gate.opened.clear()
    second = asyncio.create_task(engine.translate(request("The cat sees a bird. " * 4)))
    await gate.wait_reached()
    with pytest.raises(QueueFull) as caught:
        await engine.translate(request("The cat sees a bird. " * 8))
    assert caught.value.retry_after_s == 60.0
    gate.opened.set()
    await second


async def test_what_can_never_fit_is_refused_before_and_after_counting(make_engine: MakeEngine) -> None:
    engine = make_engine(max_waiting_tokens=50)
    with pytest.raises(RequestTooLarge, match="at most 50"):
        await engine.translate(request("The cat sees. " * 100))
    dense = "qxz kjw vyq " * 10  # about a token per character; the estimate is a quarter of that
    with pytest.raises(RequestTooLarge, match="at most 50"):
        await engine.translate(request(dense))
    assert engine.num_waiting_tokens == 0
    assert (await engine.translate(request("The cat."))).texts[0].text == "The cat."


async def test_draining_refuses_new_requests_and_finishes_admitted_ones(make_engine: MakeEngine) -> None:
    gate = Gate()
    engine = make_engine(before_step=gate)
    admitted = asyncio.create_task(engine.translate(request("The cat.")))
    await gate.wait_reached()
    engine.begin_drain()
    assert engine.draining
    with pytest.raises(ShuttingDown):
        await engine.translate(request("The bird."))
    stopping = asyncio.create_task(engine.stop(drain_s=PATIENCE_S))
    gate.opened.set()
    assert (await admitted).texts[0].text == "The cat."
    assert await stopping
    assert not engine.healthy(max_heartbeat_age_s=PATIENCE_S)


async def test_stopping_answers_even_those_whose_step_never_returns(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "_ABORT_S", 0.0)
    gate = Gate()
    engine = make_engine(before_step=gate, num_workers=1)
    tasks = [asyncio.create_task(engine.translate(request(f"The cat.\n{'A bird. ' * n}"))) for n in range(5)]
    await gate.wait_reached()
    assert not await engine.stop(drain_s=0.0)
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), PATIENCE_S)
    assert [type(result) for result in results] == [ShuttingDown] * 5
    assert engine.num_waiting_tokens == 0


async def test_a_request_made_before_the_start_is_served_after_it(make_engine: MakeEngine) -> None:
    engine = make_engine(start=False)
    task = asyncio.create_task(engine.translate(request("The cat.")))
    await asyncio.sleep(0)
    assert not engine.healthy(max_heartbeat_age_s=PATIENCE_S)
    engine.start()
    assert (await task).texts[0].text == "The cat."
    assert await engine.stop(drain_s=PATIENCE_S)


async def test_an_engine_that_never_starts_still_answers_when_it_stops(make_engine: MakeEngine) -> None:
    engine = make_engine(start=False)
    task = asyncio.create_task(engine.translate(request("The cat.")))
    await asyncio.sleep(0)
    assert not await engine.stop(drain_s=0.0)
    with pytest.raises(ShuttingDown):
        await task


async def test_a_dead_worker_turns_health_red_and_attracts_no_requests(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    died = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda _: died.set())

    class FaultyOnce(SilentObserver):
        def __init__(self) -> None:
            self.faults: list[BaseException] = [MemoryError()]

        def on_step(self, event: object) -> None:
            if self.faults:
                raise self.faults.pop()

    engine = make_engine(observer=FaultyOnce())
    with pytest.raises(WorkerFailed):
        await engine.translate(request("The cat sees."))
    assert await asyncio.to_thread(died.wait, PATIENCE_S)
    assert not engine.healthy(max_heartbeat_age_s=PATIENCE_S)
    for _ in range(5):
        assert (await engine.translate(request("The cat. A bird."))).texts[0].text == "The cat. A bird."


async def test_health_is_red_while_a_step_hangs(make_engine: MakeEngine) -> None:
    clock, gate = Clock(), Gate()
    engine = make_engine(before_step=gate, clock=clock)
    assert engine.healthy(max_heartbeat_age_s=5.0)
    task = asyncio.create_task(engine.translate(request("The cat.")))
    await gate.wait_reached()
    clock.now_s += 6.0
    assert not engine.healthy(max_heartbeat_age_s=5.0)
    gate.opened.set()
    await task


async def test_the_first_of_two_models_serves_their_common_pair(make_engine: MakeEngine) -> None:
    engine = make_engine(pairs=(("en", "pt"), ("EN", "pt"), ("de", "pt")))
    assert engine.check_pair("en", "pt").model == "en-pt"
    assert [pair.model for pair in engine.pairs] == ["de-pt", "en-pt"]


async def test_a_request_larger_than_its_estimate_is_refused_beside_others_and_gives_everything_back(
    make_engine: MakeEngine,
) -> None:
    gate = Gate()
    engine = make_engine(before_step=gate, max_waiting_tokens=120)
    first = asyncio.create_task(engine.translate(request("a b c d e f. " * 6)))
    await gate.wait_reached()
    before = engine.num_waiting_tokens
    # About a token per character: the estimate of a quarter lets it in, the exact count does not.
    dense = "qxz kjw vyq " * 6
    assert before + len(dense) // 4 + 1 <= 120
    with pytest.raises(QueueFull):
        await engine.translate(request(dense))
    assert engine.num_waiting_tokens == before
    gate.opened.set()
    await first
    assert engine.num_waiting_tokens == 0


async def test_queueing_thousands_of_segments_lets_the_loop_breathe(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(max_waiting_tokens=10**6)
    turns = 0
    submissions_of_turn: Counter[int] = Counter()
    submit = worker_module.Worker.submit

    def counted(self: worker_module.Worker, model: str, entry: Entry) -> None:
        submissions_of_turn[turns] += 1
        submit(self, model, entry)

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(worker_module.Worker, "submit", counted)
    busy = asyncio.create_task(others())
    await engine.translate(request("The cat.\n" * 1000))
    busy.cancel()
    assert sum(submissions_of_turn.values()) == 1000
    assert max(submissions_of_turn.values()) <= 128


async def test_beams_count_in_the_budget_and_are_given_back(make_engine: MakeEngine) -> None:
    engine = make_engine(max_waiting_tokens=100)
    text = "The cat sees a bird. " * 2
    await engine.translate(request(text))
    with pytest.raises(InvalidOption, match="at most 1 beams"):
        await engine.translate(TranslationRequest((text,), "en", "pt", DecodingOptions(beam_size=2)))
    wide = make_engine(max_waiting_tokens=100, max_beam_size=16)
    with pytest.raises(RequestTooLarge, match="times beams"):
        await wide.translate(TranslationRequest((text,), "en", "pt", DecodingOptions(beam_size=16)))
    assert engine.num_waiting_tokens == wide.num_waiting_tokens == 0
