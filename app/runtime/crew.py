"""The workers of an engine: who gets what, and what becomes of those that die or hang. On the event loop."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from app.errors import DragomanError, ShuttingDown, WorkerFailed
from app.runtime.entry import Entry, Outcome
from app.runtime.worker import Worker

Deliver = Callable[[Outcome], None]


@dataclass(eq=False)
class _Errand:
    """An entry that a seat's worker has."""

    seat: Seat
    receive: Deliver
    num_tokens: int = 0


@dataclass(eq=False)
class Seat:
    """A worker's place, which outlives a worker that fails.

    Attributes:
        worker: who works there now.
        errands: what it has been given and has not answered.
        num_tokens: their source tokens.
        replaced: whether the first worker has failed.
        on_trial: whether its worker has yet to show that it can translate.
        seen_at_s: the heartbeat at the last look, while it was too old.
    """

    worker: Worker
    errands: set[_Errand] = field(default_factory=set)
    num_tokens: int = 0
    replaced: bool = False
    on_trial: bool = False
    seen_at_s: float | None = None


class Crew:
    """Workers, each with its own thread; every method is for the event loop that called `start`."""

    def __init__(
        self,
        make_worker: Callable[[str], Worker],
        num_workers: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare the workers.

        Args:
            make_worker: a fresh worker with lanes of its own, by its thread's name; may take a while.
            num_workers: seats.
            clock: monotonic seconds.
        """
        self._make_worker = make_worker
        self._clock = clock
        self._seats = [Seat(make_worker(f"dragoman-decode-{index}")) for index in range(num_workers)]
        self._stopping = False

    @property
    def seats(self) -> tuple[Seat, ...]:
        """Every worker's place, in order."""
        return tuple(self._seats)

    @property
    def stopping(self) -> bool:
        """Whether the workers are being ended."""
        return self._stopping

    @property
    def heartbeat_ages_s(self) -> tuple[float, ...]:
        """Seconds since each busy worker's last sign of life, 0 for an idle one."""
        return tuple(seat.worker.heartbeat_age_s() for seat in self._seats)

    def start(self) -> None:
        """Start the threads."""
        for seat in self._seats:
            seat.worker.start()

    def healthy(self, *, max_heartbeat_age_s: float) -> bool:
        """Whether every worker is alive, none hangs in a step, and none has yet to prove itself."""
        return all(
            seat.worker.alive and not seat.on_trial and seat.worker.heartbeat_age_s() <= max_heartbeat_age_s
            for seat in self._seats
        )

    def submit(
        self,
        model: str,
        make_entry: Callable[[Deliver], Entry],
        receive: Deliver,
        *,
        seat: Seat | None = None,
    ) -> Entry:
        """Hand an entry to a worker.

        Args:
            model: bundle id.
            make_entry: the entry, which is to deliver where it is told.
            receive: called once, on the loop, later than this call; by whoever answers, the worker or the
                crew in place of one that hangs.
            seat: whose worker; None takes the living one with the fewest tokens.

        Raises:
            ShuttingDown: the workers are stopping.
            WorkerFailed: no worker lives.
        """
        seat = seat or self._least_busy()
        errand = _Errand(seat, receive)
        entry = make_entry(functools.partial(_post, asyncio.get_running_loop(), self._deliver, errand))
        seat.worker.submit(model, entry)
        errand.num_tokens = entry.num_source_tokens
        seat.errands.add(errand)
        seat.num_tokens += errand.num_tokens
        return entry

    def _least_busy(self) -> Seat:
        """The living worker with the fewest tokens; a dead one holds none and would attract everything."""
        living = [seat for seat in self._seats if seat.worker.alive]
        return min(living or self._seats, key=lambda seat: seat.num_tokens)

    def _deliver(self, errand: _Errand, outcome: Outcome) -> None:
        if errand not in errand.seat.errands:
            return  # the worker that hung has woken; its errands were answered long ago
        errand.seat.errands.discard(errand)
        errand.seat.num_tokens -= errand.num_tokens
        errand.receive(outcome)

    def _answer_all(self, seat: Seat, error: DragomanError) -> None:
        for errand in tuple(seat.errands):
            self._deliver(errand, Outcome(error, queue_s=0.0, decode_s=0.0))

    async def look(self, *, max_heartbeat_age_s: float) -> tuple[list[Seat], str | None]:
        """Replace every worker that died or hangs; to be called every so often.

        A worker counts as hanging once its heartbeat is too old at two looks in a row and did not move in
        between: after the whole process has slept, the first look may come before the worker's next beat.

        Returns:
            The seats that have a new worker, and what failed for the second time, or None.
        """
        replaced: list[Seat] = []
        for index, seat in enumerate(self._seats):
            fault = None if self._stopping else self._fault(seat, max_heartbeat_age_s=max_heartbeat_age_s)
            if fault is None:
                continue
            seat.worker.abandon()
            self._answer_all(
                seat,
                WorkerFailed(
                    f"the decoding thread {fault}; nothing of this segment was translated. Try again"
                ),
            )
            if seat.replaced:
                return replaced, f"decoding thread {index} {fault}, as did the one before it"
            # Its buffers take a while to come by.
            worker = await asyncio.to_thread(self._make_worker, f"dragoman-decode-{index}-again")
            seat.replaced, seat.seen_at_s = True, None
            if self._stopping:
                continue
            seat.worker = worker
            worker.start()
            replaced.append(seat)
        return replaced, None

    def _fault(self, seat: Seat, *, max_heartbeat_age_s: float) -> str | None:
        if not seat.worker.alive:
            return "died"
        if seat.worker.heartbeat_age_s() <= max_heartbeat_age_s:
            seat.seen_at_s = None
            return None
        before, seat.seen_at_s = seat.seen_at_s, seat.worker.heartbeat_at_s
        if before != seat.seen_at_s:
            return None
        return f"gave no sign of life for {max_heartbeat_age_s:g} s"

    async def stop(self, *, timeout_s: float) -> bool:
        """End every worker; what is not finished in time is answered with ShuttingDown.

        Returns:
            Whether everything was finished.
        """
        self._stopping = True
        finished = await asyncio.gather(
            *(asyncio.to_thread(seat.worker.stop, timeout_s=timeout_s) for seat in self._seats)
        )
        await asyncio.sleep(0)  # what the workers have posted comes first
        for seat in self._seats:
            # A worker that hangs in a graph call answers nobody.
            self._answer_all(
                seat, ShuttingDown("the service shut down before this was done; send it again elsewhere")
            )
        return all(finished)


def _post(
    loop: asyncio.AbstractEventLoop,
    deliver: Callable[[_Errand, Outcome], None],
    errand: _Errand,
    outcome: Outcome,
) -> None:
    """Carry an outcome from the worker thread to the loop; a closed loop has nobody waiting."""
    try:
        loop.call_soon_threadsafe(deliver, errand, outcome)
    except RuntimeError:
        if not loop.is_closed():
            raise
