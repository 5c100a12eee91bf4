"""The workers of an engine: who gets what, and what becomes of those that die or hang. On the event loop."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from app.errors import DragomanError, ShuttingDown, WorkerFailed
from app.runtime.entry import Entry, Outcome
from app.runtime.lane import Lane
from app.runtime.worker import Worker

Deliver = Callable[[Outcome], None]
MakeLane = Callable[[int], Lane]
"""A fresh lane for the worker of this number."""


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
        make_lanes: Mapping[str, MakeLane],
        num_workers: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare the workers.

        Args:
            make_lanes: a fresh lane for a worker, by the edition's name; may take a while.
            num_workers: seats.
            clock: monotonic seconds.
        """
        self._make_lanes = dict(make_lanes)
        self._clock = clock
        self._seats = [
            Seat(Worker(f"dragoman-decode-{index}", _made(make_lanes, index), clock=clock))
            for index in range(num_workers)
        ]
        # Held while lanes are made for workers, so that none misses those that another call opens.
        self._making = asyncio.Lock()
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

    async def open_lanes(self, make_lanes: Mapping[str, MakeLane]) -> None:
        """Give every worker more lanes, which are made in a thread: all of them or, if that fails, none."""
        async with self._making:
            for_each = await asyncio.to_thread(_made_for_each, make_lanes, len(self._seats))
            self._make_lanes |= make_lanes
            for seat, lanes in zip(self._seats, for_each, strict=True):
                for name, lane in lanes.items():
                    seat.worker.open_lane(name, lane)

    def close_lane(self, name: str, on_closed: Callable[[], None]) -> None:
        """Have every worker let a lane go once it has nothing left to do; nothing may be submitted to it.

        Args:
            name: the edition's.
            on_closed: called on the loop by each worker that has let it go.
        """
        del self._make_lanes[name]
        post = functools.partial(_post, asyncio.get_running_loop(), on_closed)
        for seat in self._seats:
            seat.worker.close_lane(name, post)

    def submit(
        self,
        lane: str,
        make_entry: Callable[[Deliver], Entry],
        receive: Deliver,
        *,
        seat: Seat | None = None,
    ) -> Entry:
        """Hand an entry to a worker.

        Args:
            lane: the edition's name.
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
        seat.worker.submit(lane, entry)
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
            seat.replaced, seat.seen_at_s = True, None
            await self._fill_again(seat, index)
            if not self._stopping:
                seat.worker.start()
                replaced.append(seat)
        return replaced, None

    async def _fill_again(self, seat: Seat, index: int) -> None:
        async with self._making:
            # Its buffers take a while to come by.
            lanes = await asyncio.to_thread(_made, dict(self._make_lanes), index)
            if not self._stopping:
                wanted = {lane: lanes[lane] for lane in self._make_lanes}
                seat.worker = Worker(f"dragoman-decode-{index}-again", wanted, clock=self._clock)

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


def _made(make_lanes: Mapping[str, MakeLane], worker_index: int) -> dict[str, Lane]:
    return {name: make_lane(worker_index) for name, make_lane in make_lanes.items()}


def _made_for_each(make_lanes: Mapping[str, MakeLane], num_workers: int) -> list[dict[str, Lane]]:
    return [_made(make_lanes, index) for index in range(num_workers)]


def _post(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *given: object) -> None:
    """Carry a call from the worker thread to the loop; a closed loop has nobody waiting."""
    try:
        loop.call_soon_threadsafe(call, *given)
    except RuntimeError:
        if not loop.is_closed():
            raise
