"""Equal segments that are asked for at the same time, by one request or by several, share one decoding.

Pure: no task, no thread, no clock; for the event loop only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from app.errors import DragomanError, ShuttingDown, WorkerFailed
from app.runtime.entry import Outcome
from app.runtime.translation_cache import CacheLookup, TranslationCache

Deliver = Callable[[Outcome], None]
Urgency = tuple[int, ...]
"""The larger one is served sooner, as far as can be foreseen: by priority, by place in its own request."""

_OF_EVERYBODY: tuple[type[DragomanError], ...] = (WorkerFailed, ShuttingDown)
"""Failures of the decoding itself. Whatever else ends it (cancelled, out of time) is one caller's own, and
says nothing to the others."""


class Start(Protocol):
    """Begins to decode a segment."""

    def __call__(self, deliver: Deliver, /) -> Callable[[], None]:
        """Queue it.

        Args:
            deliver: called once, on the event loop, later than this call.

        Returns:
            What cancels it: idempotent, and harmless once it was delivered.

        Raises:
            DragomanError: it cannot be queued.
        """
        ...


class Claim:
    """One segment of one request that waits for a flight."""

    __slots__ = ("_deliver", "_flights", "_start", "flight", "urgency")

    def __init__(
        self, flights: Flights, flight: _Flight, *, urgency: Urgency, start: Start, deliver: Deliver
    ) -> None:
        """Made by `Flights.ask`."""
        self._flights = flights
        self._start = start
        self._deliver = deliver
        self.flight = flight
        self.urgency = urgency

    def give_up(self) -> None:
        """Want the answer no more: it will not be delivered. Idempotent.

        The decoding goes on while anyone else waits for it, and is cancelled otherwise.
        """
        self._flights.give_up(self)

    def begin(self, deliver: Deliver) -> Callable[[], None]:
        """Decode the segment on this claim's account."""
        return self._start(deliver)

    def answer(self, outcome: Outcome) -> None:
        """Hand over what came out."""
        self._deliver(outcome)


class _Run:
    """One decoding of a flight's segment, on the account of one claim."""

    __slots__ = ("cancel", "claim")

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self.cancel: Callable[[], None] = _nothing_to_cancel

    def forget(self) -> None:
        """Let go of the entry, which delivers to this run: a circle that would keep its model in memory."""
        self.cancel = _nothing_to_cancel


class _Flight:
    """Who waits for one key, in the order they came, and the decodings under way for them."""

    __slots__ = ("claims", "key", "runs")

    def __init__(self, key: bytes | None) -> None:
        self.key = key
        self.claims: dict[Claim, None] = {}
        self.runs: list[_Run] = []


class Flights:
    """Shares one decoding among equal segments that wait at the same time.

    * Whoever began it may leave: it goes on for the others.
    * When it ends for a reason of its beginner's own, the most urgent of the others begins anew.
    * Whoever is more urgent than all that is under way begins a decoding too, and the first one that succeeds
      answers everybody. So nobody waits behind less urgent work.
    * A failure answers those who wait for nothing else, and is never kept.

    A caller whose deadline passes gives up as one who was cancelled does.

    Attributes:
        cache: keeps what succeeds.
    """

    def __init__(self, cache: TranslationCache) -> None:
        """Keep what succeeds in `cache`."""
        self.cache = cache
        self._flights: dict[bytes, _Flight] = {}

    @property
    def num_flights(self) -> int:
        """Keys that are being decoded."""
        return len(self._flights)

    def ask(
        self, key: bytes | None, *, model: str, start: Start, deliver: Deliver, urgency: Urgency = ()
    ) -> Claim:
        """Wait for a segment that `TranslationCache.find` did not find.

        Args:
            key: from `SegmentKeys`; None shares with nobody.
            model: bundle id, for the observer.
            start: begins to decode it; called now, later, or never.
            deliver: called once with the outcome, later than this call, unless the claim is given up before.
            urgency: a larger one does not wait for a smaller one.

        Raises:
            DragomanError: as `start`.
        """
        flight = None if key is None else self._flights.get(key)
        if flight is None:
            flight = _Flight(key)
        claim = Claim(self, flight, urgency=urgency, start=start, deliver=deliver)
        flight.claims[claim] = None
        must_begin = all(run.claim.urgency < urgency for run in flight.runs)
        if must_begin:
            try:
                self._begin(flight, claim)
            except BaseException:
                self.give_up(claim)
                raise
        if key is not None:
            self._flights[key] = flight
            self.cache.report(model, CacheLookup.MISS if must_begin else CacheLookup.JOINED)
        return claim

    def give_up(self, claim: Claim) -> None:
        """See `Claim.give_up`."""
        flight = claim.flight
        flight.claims.pop(claim, None)
        if not flight.claims:
            self._close(flight)

    def _begin(self, flight: _Flight, claim: Claim) -> None:
        run = _Run(claim)
        run.cancel = claim.begin(lambda outcome: self._land(flight, run, outcome))
        flight.runs.append(run)

    def _land(self, flight: _Flight, run: _Run, outcome: Outcome) -> None:
        if run not in flight.runs:  # another one came first, or nobody waits any more
            return
        flight.runs.remove(run)
        run.forget()
        if not isinstance(outcome.result, DragomanError):
            self.cache.keep(flight.key, outcome.result)
            self._answer_all(flight, outcome)
        elif not isinstance(outcome.result, _OF_EVERYBODY):
            self._answer(run.claim, outcome)
            self._begin_anew(flight)
        elif not flight.runs:
            self._answer_all(flight, outcome)

    def _begin_anew(self, flight: _Flight) -> None:
        while flight.claims and not flight.runs:
            claim = max(flight.claims, key=lambda waiting: waiting.urgency)  # the first of equals
            try:
                self._begin(flight, claim)
            except DragomanError as error:
                self._answer(claim, Outcome(error, queue_s=0.0, decode_s=0.0))
            except BaseException as error:
                failure = WorkerFailed(
                    f"a segment could not be queued ({type(error).__name__}); nothing of it was translated. "
                    "Try again; if it repeats, the service's log has the cause"
                )
                self._answer_all(flight, Outcome(failure, queue_s=0.0, decode_s=0.0))
                raise
        if not flight.claims:
            self._close(flight)

    def _answer(self, claim: Claim, outcome: Outcome) -> None:
        if claim in claim.flight.claims:
            del claim.flight.claims[claim]
            claim.answer(outcome)

    def _answer_all(self, flight: _Flight, outcome: Outcome) -> None:
        self._close(flight)
        for claim in list(flight.claims):
            self._answer(claim, outcome)

    def _close(self, flight: _Flight) -> None:
        """End what is under way; the next one who asks for the key opens another flight."""
        if flight.key is not None and self._flights.get(flight.key) is flight:
            del self._flights[flight.key]
        runs, flight.runs = flight.runs, []
        for run in runs:
            run.cancel()
            run.forget()


def _nothing_to_cancel() -> None:
    """It has not begun, or has ended."""
