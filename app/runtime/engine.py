"""The engine: requests in, translations out. Lives on one asyncio loop; decoding runs in workers."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from app.bundle import Bundle, Variant
from app.decoding.options import DecodingOptions
from app.decoding.search import make_search
from app.errors import DragomanError, ShuttingDown
from app.runtime.admission import Admission, Ticket
from app.runtime.entry import Entry, Outcome
from app.runtime.events import RuntimeObserver, SilentObserver
from app.runtime.guidance_of_request import TargetPlan
from app.runtime.lane import Lane
from app.runtime.pairs import PairTable
from app.runtime.preparation import PreparedSegment
from app.runtime.request import PairInfo, Timings, TranslationRequest, TranslationResult
from app.runtime.served_model import ServedModel, load_served_model
from app.runtime.worker import Worker
from app.text import check_text

Result = TypeVar("Result")

_INLINE_CHARACTERS = 600
"""Shorter requests are tokenised on the loop: handing them to a thread would take longer."""
_ENTRIES_PER_TURN = 128
"""Segments queued before other requests get the loop."""
_CHARACTERS_PER_TOKEN = 4
"""For the estimate before any work; corrected to the exact count after tokenising."""


@dataclass(frozen=True)
class EngineOptions:
    """How the engine uses the machine.

    Attributes:
        num_workers: decoding threads, one per core.
        max_waiting_tokens: source tokens times beams admitted and not finished, over all requests.
        max_admission_tokens: padded source tokens encoded between two decoder steps.
        max_rows: rows per row group of a worker.
        use_shortlist: limit the output to each bundle's lexical shortlist, where it has one.
    """

    num_workers: int
    max_waiting_tokens: int = 131_072
    max_admission_tokens: int = 1024
    max_rows: int = 64
    use_shortlist: bool = True


class Engine:
    """Translates requests with the loaded models.

    `translate`, `stop` and the properties are for the event loop that called `start`.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        options: EngineOptions,
        *,
        observer: RuntimeObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare workers; nothing runs before `start`.

        Args:
            models: when two translate the same pair, the first one serves it.
            options: how to use the machine.
            observer: told of every step, from the worker threads.
            clock: monotonic seconds.
        """
        observer = observer or SilentObserver()
        self._models = {model.id: model for model in models}
        self._pairs = PairTable(pair for model in models for pair in model.pairs)
        self._clock = clock
        self._admission = Admission(options.max_waiting_tokens, clock=clock)
        self._workers = [
            Worker(
                f"dragoman-decode-{index}",
                {
                    model.id: Lane(
                        model.id,
                        model.make_runner(),
                        max_admission_tokens=options.max_admission_tokens,
                        min_newcomers=max(1, options.max_rows // 4),
                        observer=observer,
                        clock=clock,
                    )
                    for model in models
                },
                clock=clock,
            )
            for index in range(options.num_workers)
        ]
        self._tokens_of_worker = [0] * options.num_workers
        self._num_requests = 0
        self._draining = False
        self._unanswered: set[asyncio.Future[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @classmethod
    def open(
        cls,
        bundles: Sequence[Bundle],
        options: EngineOptions,
        *,
        variant: Variant = "cpu-int8",
        observer: RuntimeObserver | None = None,
    ) -> Engine:
        """Load every bundle; blocking.

        Raises:
            BundleError: a bundle cannot be used.
        """
        return cls(
            [
                load_served_model(
                    bundle, variant=variant, max_rows=options.max_rows, use_shortlist=options.use_shortlist
                )
                for bundle in bundles
            ],
            options,
            observer=observer,
        )

    def start(self) -> None:
        """Start the workers."""
        for worker in self._workers:
            worker.start()

    def begin_drain(self) -> None:
        """Refuse new requests from now on; those admitted go on."""
        self._draining = True

    async def stop(self, *, drain_s: float) -> bool:
        """Refuse new requests, finish the admitted ones, end the workers.

        Args:
            drain_s: seconds granted to the admitted requests; the rest is answered with ShuttingDown.

        Returns:
            Whether every admitted request was finished.
        """
        self.begin_drain()
        deadline_s = self._clock() + drain_s
        drained = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout=drain_s)
        except TimeoutError:
            drained = False  # whoever is left is answered below
        left_s = max(0.0, deadline_s - self._clock())
        finished = await asyncio.gather(
            *(asyncio.to_thread(worker.stop, timeout_s=left_s) for worker in self._workers)
        )
        # A worker that hangs in a graph call answers nobody: its requests are answered here.
        for done in self._unanswered:
            if not done.done():
                done.set_exception(
                    ShuttingDown(
                        "the service shut down before this request was done; send it again elsewhere"
                    )
                )
        return drained and all(finished)

    @property
    def pairs(self) -> tuple[PairInfo, ...]:
        """Every direction served, sorted by code."""
        return self._pairs.pairs

    @property
    def draining(self) -> bool:
        """Whether new requests are refused because the service is stopping."""
        return self._draining

    @property
    def num_waiting_tokens(self) -> int:
        """Source tokens admitted and not finished."""
        return self._admission.num_waiting_tokens

    @property
    def num_running_requests(self) -> int:
        """Requests admitted and not answered."""
        return self._num_requests

    def healthy(self, *, max_heartbeat_age_s: float) -> bool:
        """Whether every worker is alive and none hangs in a step."""
        return all(
            worker.alive and worker.heartbeat_age_s() <= max_heartbeat_age_s for worker in self._workers
        )

    def check_pair(self, source: str, target: str) -> PairInfo:
        """The direction that serves these codes.

        Raises:
            UnsupportedPair: no model translates this pair; names those that are served.
        """
        return self._pairs.find(source, target)

    async def translate(self, request: TranslationRequest) -> TranslationResult:
        """Translate every text of a request.

        Cancelling the awaiting task takes all its segments out of the queue.

        Raises:
            InvalidRequest: a text is not valid Unicode.
            InvalidOption: the bundle cannot do what the options ask for.
            UnsupportedPair: nobody translates this pair.
            RequestTooLarge: the request exceeds the whole budget.
            QueueFull: too much is waiting; carries an estimate for Retry-After.
            ShuttingDown: the service is stopping.
            WorkerFailed: a graph call failed; nothing of the request is answered in part.
        """
        started_at_s = self._clock()
        if self._draining:
            raise ShuttingDown("the service is shutting down; send the request to another instance")
        model = self._models[self.check_pair(request.source, request.target).model]
        model.check_request(request)
        for index, text in enumerate(request.texts):
            check_text(text, name=f"text {index}")
        num_characters = sum(map(len, (*request.texts, *request.target_prefixes)))
        # To spell phrases takes longer than to tokenise a text.
        is_short = num_characters <= _INLINE_CHARACTERS and not request.options.forbidden
        num_beams = request.options.beam_size
        estimate = num_characters // _CHARACTERS_PER_TOKEN + len(request.texts)
        ticket = Ticket(self._admission, estimate * num_beams)
        self._enter()
        try:
            prepared, plans = await _off_loop(lambda: model.prepare(request), inline=is_short)
            ticket.correct(sum(text.num_tokens for text in prepared) * num_beams)
            segments = [segment for text in prepared for segment in text.segments]
            outcomes = await self._decode(model, segments, plans, request.options, ticket)
            hypotheses = [
                outcome.result for outcome in outcomes if not isinstance(outcome.result, DragomanError)
            ]
            texts = await _off_loop(lambda: model.assemble(request, prepared, hypotheses), inline=is_short)
        finally:
            ticket.close()
            self._leave()
        return TranslationResult(
            texts=tuple(texts),
            model=model.id,
            timings=Timings(
                total_s=self._clock() - started_at_s,
                queue_s=max((outcome.queue_s for outcome in outcomes), default=0.0),
                decode_s=max((outcome.decode_s for outcome in outcomes), default=0.0),
            ),
        )

    def _enter(self) -> None:
        self._num_requests += 1
        self._idle.clear()

    def _leave(self) -> None:
        self._num_requests -= 1
        if not self._num_requests:
            self._idle.set()

    async def _decode(
        self,
        model: ServedModel,
        segments: Sequence[PreparedSegment],
        plans: Sequence[TargetPlan],
        options: DecodingOptions,
        ticket: Ticket,
    ) -> list[Outcome]:
        """Queue every segment and wait for all; the first error cancels the rest and is raised."""
        if not segments:
            return []
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._unanswered.add(done)
        outcomes: list[Outcome | None] = [None] * len(segments)
        num_left = len(segments)

        def receive(index: int, worker_index: int, outcome: Outcome) -> None:
            nonlocal num_left
            num_tokens = len(segments[index].source_ids)
            self._tokens_of_worker[worker_index] -= num_tokens
            outcomes[index] = outcome
            num_left -= 1
            if isinstance(outcome.result, DragomanError):
                if not done.done():
                    done.set_exception(outcome.result)
                return
            ticket.finish(num_tokens * options.beam_size)
            if not num_left and not done.done():
                done.set_result(None)

        entries: list[Entry] = []
        try:
            for index, (segment, plan) in enumerate(zip(segments, plans, strict=True)):
                worker_index = self._least_busy_worker()
                deliver = functools.partial(_post, loop, receive, index, worker_index)
                entry = self._entry(model, segment, plan, options, deliver)
                self._workers[worker_index].submit(model.id, entry)
                self._tokens_of_worker[worker_index] += entry.num_source_tokens
                entries.append(entry)
                if index % _ENTRIES_PER_TURN == _ENTRIES_PER_TURN - 1:
                    await asyncio.sleep(0)  # thousands of segments must not hold up everyone else
            await done
        except BaseException:
            done.cancel()
            for entry in entries:
                entry.cancel()
            raise
        finally:
            self._unanswered.discard(done)
        return [outcome for outcome in outcomes if outcome is not None]

    def _least_busy_worker(self) -> int:
        """The living worker with the fewest tokens; a dead one holds none and would attract everything."""
        living = [index for index, worker in enumerate(self._workers) if worker.alive]
        return min(living or range(len(self._workers)), key=self._tokens_of_worker.__getitem__)

    def _entry(
        self,
        model: ServedModel,
        segment: PreparedSegment,
        plan: TargetPlan,
        options: DecodingOptions,
        deliver: Callable[[Outcome], None],
    ) -> Entry:
        search = make_search(
            options,
            eos_id=model.eos_id,
            max_target_tokens=plan.max_target_tokens,
            guidance=plan.guidance,
        )
        return Entry(
            segment.source_ids,
            search,
            max_target_tokens=plan.max_target_tokens,
            submitted_at_s=self._clock(),
            deliver=deliver,
            candidates=segment.candidates,
        )


def _post(
    loop: asyncio.AbstractEventLoop,
    receive: Callable[[int, int, Outcome], None],
    index: int,
    worker_index: int,
    outcome: Outcome,
) -> None:
    """Carry an outcome from the worker thread to the loop; a closed loop has nobody waiting."""
    try:
        loop.call_soon_threadsafe(receive, index, worker_index, outcome)
    except RuntimeError:
        if not loop.is_closed():
            raise


async def _off_loop(work: Callable[[], Result], *, inline: bool) -> Result:
    return work() if inline else await asyncio.to_thread(work)
