"""The thread that decodes. The only file of the service that starts one for a model."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from app.errors import DragomanError, ShuttingDown, WorkerFailed
from app.runtime.entry import Entry
from app.runtime.lane import Lane

_ABORT_S = 5.0
"""Seconds granted to the step in progress once the drain time is over."""


class Worker:
    """One thread that runs the lanes of every model in turn.

    `submit`, `open_lane`, `close_lane`, `stop` and the properties may be called from any thread; lanes are
    touched by the worker's own thread alone.
    """

    def __init__(
        self,
        name: str,
        lanes: Mapping[str, Lane],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare the thread; `start` starts it.

        Args:
            name: thread name, seen in profilers and logs.
            lanes: a lane per edition's name, owned by this worker from now on.
            clock: monotonic seconds.
        """
        self._lanes = dict(lanes)
        self._clock = clock
        self._closing: dict[str, Callable[[], None]] = {}
        # An entry for a lane, a lane that is new, or whom to tell that a lane was let go.
        self._inbox: deque[tuple[str, Entry | Lane | Callable[[], None]]] = deque()
        self._wakeup = threading.Condition()
        self._stopping = False
        self._dead = False
        self._aborting = False
        self._abandoned = False
        self._heartbeat_at_s = clock()
        self._idle = True
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive() and not self._dead and not self._abandoned

    @property
    def heartbeat_at_s(self) -> float:
        """Monotonic seconds of the last sign of life; ahead of now by what an encoder pass is to take."""
        return self._heartbeat_at_s

    def heartbeat_age_s(self) -> float:
        """Seconds since the last sign of life, 0 while idle: large means a graph call hangs."""
        with self._wakeup:
            return 0.0 if self._idle else max(0.0, self._clock() - self._heartbeat_at_s)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, lane: str, entry: Entry) -> None:
        """Hand over an entry for the lane of this name.

        Raises:
            ShuttingDown: the worker is stopping.
            WorkerFailed: the worker has died or was abandoned.
        """
        with self._wakeup:
            if self._dead or self._abandoned:
                raise WorkerFailed("the decoding thread has died and has no successor yet; try again")
            if self._stopping:
                raise ShuttingDown("the service is shutting down; send the request to another instance")
            self._inbox.append((lane, entry))
            self._wakeup.notify()

    def open_lane(self, name: str, lane: Lane) -> None:
        """Own one more lane; entries for it may follow."""
        with self._wakeup:
            self._inbox.append((name, lane))
            self._wakeup.notify()

    def close_lane(self, name: str, on_closed: Callable[[], None]) -> None:
        """Let a lane go as soon as it has nothing left to do; no entries for it may follow.

        Args:
            name: the lane's.
            on_closed: called from the worker's thread, which then holds nothing of the lane; not if the
                thread ends first.
        """
        with self._wakeup:
            self._inbox.append((name, on_closed))
            self._wakeup.notify()

    def abandon(self) -> None:
        """Want nothing of this worker any more: if its call ever returns, the thread ends.

        What it was given is not answered; whoever abandons it answers for it.
        """
        with self._wakeup:
            self._abandoned = True
            self._wakeup.notify()

    def stop(self, *, timeout_s: float) -> bool:
        """Finish what was handed over, then end the thread.

        What is not finished after `timeout_s` is answered with ShuttingDown at the next step. A
        graph call that never returns keeps its entries; the caller must answer for them.

        Returns:
            Whether everything was finished in time.
        """
        if self._abandoned:
            return False  # its thread may never end, and nobody waits for what it has
        with self._wakeup:
            self._stopping = True
            self._wakeup.notify()
        if self._thread.ident is None:
            finished = not self._inbox
            self._answer_all(_shut_down())
            return finished
        self._thread.join(timeout_s)
        finished = not self._thread.is_alive() and not self._dead
        self._aborting = True
        self._thread.join(_ABORT_S)
        return finished

    def _run(self) -> None:
        try:
            while self._take_in():
                if self._aborting:
                    self._answer_all(_shut_down())
                for lane in self._lanes.values():
                    if lane.has_work and not self._abandoned:
                        lane.tick(self._beat)
        except BaseException as error:
            self._die(error)
            raise

    def _take_in(self) -> bool:
        """Move the inbox into the lanes, sleeping while there is nothing to do; False ends the thread."""
        with self._wakeup:
            busy = bool(self._closing) or any(lane.has_work for lane in self._lanes.values())
            if self._abandoned:
                return False
            while not busy and not self._inbox:
                if self._stopping or self._abandoned:
                    return False
                self._idle = True
                self._wakeup.wait()
            self._idle = False
            self._heartbeat_at_s = self._clock()
        while self._inbox:
            name, order = self._inbox.popleft()
            if isinstance(order, Lane):
                self._lanes[name] = order
            elif isinstance(order, Entry):
                self._queue(name, order)
            else:
                self._closing[name] = order
        if self._closing:
            self._let_go()
        return True

    def _queue(self, lane: str, entry: Entry) -> None:
        try:
            self._lanes[lane].add(entry)
        except (KeyError, ValueError) as error:
            entry.resolve(WorkerFailed(f"the segment could not be queued: {error}"), now_s=self._clock())

    def _let_go(self) -> None:
        for name in list(self._closing):
            if name not in self._lanes or not self._lanes[name].has_work:
                self._lanes.pop(name, None)
                self._closing.pop(name)()

    def _beat(self, expected_s: float) -> None:
        """Show life; the next sign may come so much later than usual."""
        self._heartbeat_at_s = self._clock() + expected_s

    def _die(self, error: BaseException) -> None:
        with self._wakeup:
            self._dead = True
        self._answer_all(
            WorkerFailed(
                f"the decoding thread died ({type(error).__name__}); nothing of this segment was "
                "translated. Try again"
            )
        )

    def _answer_all(self, error: DragomanError) -> None:
        for lane in self._lanes.values():
            lane.fail_all(error)
        now_s = self._clock()
        while self._inbox:
            _, order = self._inbox.popleft()
            if isinstance(order, Entry):
                order.resolve(error, now_s=now_s)


def _shut_down() -> ShuttingDown:
    return ShuttingDown("the service shut down before this segment was done; send it again elsewhere")
