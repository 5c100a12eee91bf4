"""The engine: requests in, translations out. Lives on one asyncio loop; decoding runs in workers."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from app.bundle import Bundle, Variant
from app.errors import DeadlineExceeded, DragomanError, ShuttingDown
from app.runtime.admission import Admission, Ticket
from app.runtime.canary import canary_of, check_canary, prove
from app.runtime.crew import Crew, MakeLane, Seat
from app.runtime.device import Device
from app.runtime.dispatch import Terms, decode_segments
from app.runtime.editions import Edition, Editions
from app.runtime.engine_options import EngineOptions, make_lane
from app.runtime.events import RuntimeObserver, SilentObserver
from app.runtime.flights import Flights
from app.runtime.freed_memory import return_freed_memory
from app.runtime.request import PairInfo, TranslationRequest, TranslationResult
from app.runtime.served_model import ServedModel, load_served_model
from app.runtime.stages import timings_of
from app.runtime.supervision import supervise
from app.runtime.translation_cache import CacheObserver, TranslationCache
from app.text import check_text

__all__ = ["Engine", "EngineOptions"]

Result = TypeVar("Result")

_INLINE_CHARACTERS = 600
"""Shorter requests are tokenised on the loop: handing them to a thread would take longer."""
_CHARACTERS_PER_TOKEN = 4
"""For the estimate before any work; corrected to the exact count after tokenising."""
_TOKENS_PER_ROW = 16
"""Of a usual sentence; for the estimate of what fills all rows."""
_LATE_S = 0.25
"""A worker answers what is past its deadline at its next step. After so much more the loop does it itself:
the worker hangs, or the text is not even prepared."""


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
        cache_observer: CacheObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare workers; nothing runs before `start`.

        Args:
            models: when two translate the same pair, the first one serves it.
            options: how to use the machine.
            observer: told of every step, from the worker threads.
            cache_observer: told of every look-up in the cache, on the loop.
            clock: monotonic seconds.
        """
        self._make_lane = functools.partial(make_lane, options=options, clock=clock)
        self._observer = observer or SilentObserver()
        self._editions = Editions(models, on_unused=self._let_go)
        self._clock = clock
        self._request_timeout_s = options.request_timeout_s
        self._flights = Flights(TranslationCache(options.max_cache_bytes, observer=cache_observer))
        self._admission = Admission(
            options.max_waiting_tokens,
            num_seated_tokens=options.num_workers * options.max_rows * _TOKENS_PER_ROW,
            max_bulk_share=options.max_bulk_share,
            clock=clock,
        )
        make_lanes = self._lane_makers(self._editions.served.values())
        self._crew = Crew(make_lanes, options.num_workers, clock=clock)
        self._num_requests = 0
        self._num_asked = 0
        self._draining = False
        self._started = False
        self._idle = asyncio.Event()
        self._idle.set()

    @classmethod
    def open(
        cls,
        bundles: Sequence[Bundle],
        options: EngineOptions,
        *,
        variant: Variant = "cpu-int8",
        devices: Sequence[Device] = (Device(),),
        gpu_memory_bytes: int | None = None,
        observer: RuntimeObserver | None = None,
        cache_observer: CacheObserver | None = None,
    ) -> Engine:
        """Load every bundle; blocking. Devices and variant must go together.

        Raises:
            BundleError: a bundle cannot be used.
            DeviceUnavailable: a device cannot be used, or has too little memory.
        """
        return cls(
            [
                load_served_model(
                    bundle,
                    variant=variant,
                    max_rows=options.max_rows,
                    use_shortlist=options.use_shortlist,
                    devices=devices,
                    gpu_memory_bytes=gpu_memory_bytes,
                )
                for bundle in bundles
            ],
            options,
            observer=observer,
            cache_observer=cache_observer,
        )

    def start(self) -> None:
        """Start the workers."""
        self._crew.start()

    async def supervise(self, *, max_heartbeat_age_s: float) -> str:
        """Translate a canary on every worker with every model, then replace each that dies or hangs, once.

        Without this call nothing is proven and nobody replaced.

        Returns:
            Why the process had better end: a worker failed again, or a model cannot translate.
        """

        def note_start() -> None:
            self._started = True

        return await supervise(
            self._crew, self._prove, max_heartbeat_age_s=max_heartbeat_age_s, on_proven=note_start
        )

    async def _prove(self, seat: Seat) -> None:
        """Have every model translate something on this seat's worker."""
        editions = tuple(self._editions.served.values())
        self._editions.enter(*editions)
        try:
            for edition in editions:
                request = canary_of(edition.model)
                prepared, plans = edition.model.prepare(request)
                segments = [segment for text in prepared for segment in text.segments]
                outcomes = await decode_segments(
                    self._crew,
                    edition,
                    segments,
                    plans,
                    terms=Terms(self._next_number(), request.options, clock=self._clock),
                    seat=seat,
                )
                check_canary(edition.model, request, prepared, outcomes)
        finally:
            self._editions.leave(*editions)

    async def exchange(self, loaded: Sequence[ServedModel], *, order: Sequence[str]) -> None:
        """Serve other models from now on; all of it or, if that fails, none. One call at a time.

        Requests admitted before are translated by the model they began with, whose memory is given back when
        the last of them is done.

        Args:
            loaded: new models; each comes in the place of the one of its id, if there is one.
            order: ids of all that are served from now on, the first of two for a pair serves it. Those that
                were not loaded stay as they are.

        Raises:
            BundleError: a new model cannot translate a canary.
            ShuttingDown: the service is stopping.
        """
        fresh = {model.id: self._editions.make(model) for model in loaded}
        await asyncio.to_thread(self._prove_aside, loaded)
        await self._crew.open_lanes(self._lane_makers(fresh.values()))
        if self._draining:
            raise _stopping()
        self._editions.exchange([fresh.get(id_) or self._editions.served[id_] for id_ in order])

    def _prove_aside(self, models: Sequence[ServedModel]) -> None:
        """Have each translate a canary in this thread, with a lane of its own that nobody else sees."""
        for model in models:
            prove(model, self._make_lane(model, observer=SilentObserver()))

    def _lane_makers(self, editions: Iterable[Edition]) -> dict[str, MakeLane]:
        make_lane = functools.partial(self._make_lane, observer=self._observer)
        return {edition.name: functools.partial(make_lane, edition.model) for edition in editions}

    def _let_go(self, edition: Edition) -> None:
        loop = asyncio.get_running_loop()

        def trim() -> None:
            if not self._draining:  # there may be no more threads
                loop.run_in_executor(None, return_freed_memory)  # takes up to 30 ms

        self._crew.close_lane(edition.name, trim)

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
        return await self._crew.stop(timeout_s=left_s) and drained

    @property
    def pairs(self) -> tuple[PairInfo, ...]:
        """Every direction served, sorted by code."""
        return self._editions.pairs

    @property
    def draining(self) -> bool:
        """Whether new requests are refused because the service is stopping."""
        return self._draining

    @property
    def started(self) -> bool:
        """Whether every worker has shown that it can translate with every model."""
        return self._started

    @property
    def heartbeat_ages_s(self) -> tuple[float, ...]:
        """Seconds since each busy worker's last sign of life, 0 for an idle one."""
        return self._crew.heartbeat_ages_s

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
        return self._crew.healthy(max_heartbeat_age_s=max_heartbeat_age_s)

    def check_pair(self, source: str, target: str) -> PairInfo:
        """The direction that serves these codes.

        Raises:
            UnsupportedPair: no model translates this pair; names those that are served.
        """
        return self._editions.find_pair(source, target)

    async def translate(self, request: TranslationRequest) -> TranslationResult:
        """Translate every text of a request.

        Cancelling the awaiting task takes all its segments out of the queue.

        Raises:
            InvalidRequest: a text is not valid Unicode.
            InvalidOption: the bundle cannot do what the options ask for.
            UnsupportedPair: nobody translates this pair.
            RequestTooLarge: the request exceeds the whole budget.
            QueueFull: too much is waiting, or it would not be done in time; carries an estimate for
                Retry-After.
            DeadlineExceeded: the time allowed for the request passed first.
            ShuttingDown: the service is stopping.
            WorkerFailed: a graph call failed; nothing of the request is answered in part.
        """
        started_at_s = self._clock()
        if self._draining:
            raise _stopping()
        edition = self._editions.find(request.source, request.target)
        model = edition.model
        model.check_request(request)
        for index, text in enumerate(request.texts):
            check_text(text, name=f"text {index}")
        num_characters = sum(map(len, (*request.texts, *request.target_prefixes)))
        # To spell phrases takes longer than to tokenise a text.
        is_short = num_characters <= _INLINE_CHARACTERS and not request.options.forbidden
        num_beams = request.options.beam_size
        estimate = num_characters // _CHARACTERS_PER_TOKEN + len(request.texts)
        timeout_s = self._timeout_s(request)
        ticket = Ticket(self._admission, estimate * num_beams, priority=request.priority, timeout_s=timeout_s)
        terms = Terms(
            self._next_number(),
            request.options,
            request.priority,
            deadline_s=None if timeout_s is None else started_at_s + timeout_s,
            clock=self._clock,
        )
        self._enter(edition)
        try:
            async with asyncio.timeout(None if timeout_s is None else timeout_s + _LATE_S):
                prepared, plans = await _off_loop(lambda: model.prepare(request), inline=is_short)
                prepared_s = self._clock() - started_at_s
                ticket.correct(sum(text.num_tokens for text in prepared) * num_beams)
                segments = [segment for text in prepared for segment in text.segments]
                outcomes = await decode_segments(
                    self._crew,
                    edition,
                    segments,
                    plans,
                    terms=terms,
                    on_finished=ticket.finish,
                    on_found=ticket.drop,
                    flights=self._flights,
                )
            decoded_s = self._clock() - started_at_s
            hypotheses = [
                outcome.result for outcome in outcomes if not isinstance(outcome.result, DragomanError)
            ]
            texts = await _off_loop(lambda: model.assemble(request, prepared, hypotheses), inline=is_short)
        except (DeadlineExceeded, TimeoutError):
            raise DeadlineExceeded(
                f"the request was not translated within the {timeout_s:g} s allowed for it; allow more, or "
                "send less at a time"
            ) from None
        finally:
            ticket.close()
            self._leave(edition)
        return TranslationResult(
            texts=tuple(texts),
            model=model.id,
            timings=timings_of(
                outcomes, prepared_s=prepared_s, decoded_s=decoded_s, total_s=self._clock() - started_at_s
            ),
        )

    def _timeout_s(self, request: TranslationRequest) -> float | None:
        """What the request allows itself, at most what the service allows every request."""
        allowed = [seconds for seconds in (request.timeout_s, self._request_timeout_s) if seconds]
        return min(allowed, default=None)

    def _next_number(self) -> int:
        self._num_asked += 1
        return self._num_asked

    def _enter(self, edition: Edition) -> None:
        self._editions.enter(edition)
        self._num_requests += 1
        self._idle.clear()

    def _leave(self, edition: Edition) -> None:
        self._editions.leave(edition)
        self._num_requests -= 1
        if not self._num_requests:
            self._idle.set()


def _stopping() -> ShuttingDown:
    return ShuttingDown("the service is shutting down; send the request to another instance")


async def _off_loop(work: Callable[[], Result], *, inline: bool) -> Result:
    return work() if inline else await asyncio.to_thread(work)
