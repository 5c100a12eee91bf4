"""Captured CUDA graphs: which row counts have one, how they are named, and who may use a GPU meanwhile.

A captured graph runs a whole decoder step by one launch, but only with the shapes and addresses it was
captured with. So steps are rounded up to a few row counts, the buckets.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

MAX_CAPTURE_WAIT_S = 0.3
"""Longest wait until the GPU calls of others are over, and longest that others are kept out for it.

A call that takes longer hangs, or loads a model. Workers that are kept out show no sign of life, so this is
far below the age at which they count as hanging.
"""
MAX_CAPTURE_TRIES = 6
_FIRST_DISTANCE_S, _DISTANCE_GROWTH = 2.0, 4.0
"""Between tries: 2, 8, 32, 128 and 512 s, so that the loading of a large model is outlived."""

# Unlike structlog's before it is configured, this writes to standard error: on a command line, standard
# output belongs to the translations.
_log = logging.getLogger("dragoman.device")


def buckets(max_slots: int) -> tuple[int, ...]:
    """The powers of two below `max_slots`, then `max_slots` itself."""
    powers = itertools.takewhile(lambda power: power < max_slots, (1 << bit for bit in itertools.count()))
    return (*powers, max_slots)


class GraphIds:
    """Names for captured graphs that are never given twice.

    onnxruntime keeps captured graphs by session and thread, and captures whatever a new name runs first.
    0 and -1 have meanings of their own there.
    """

    def __init__(self) -> None:
        """Start at 1."""
        # `next` of a count is atomic, so threads may share this.
        self._numbers = itertools.count(1)

    def take(self) -> int:
        """A name that nobody has."""
        return next(self._numbers)


def current_thread() -> int:
    """Identifies the calling thread; a captured graph is known only to the thread that captured it."""
    return threading.get_ident()


class CaptureGate:
    """Lets any number of threads use GPUs, or one thread capture a graph.

    onnxruntime captures in CUDA's global mode: until the capture ends, a call of any other thread that
    allocates or copies fails, and the capture with it, whichever GPU it is for.

    `using` must not be entered by a thread that is inside already.
    """

    def __init__(self, *, max_wait_s: float = MAX_CAPTURE_WAIT_S) -> None:
        """Open the gate.

        Args:
            max_wait_s: longest that a capture waits, and longest that users wait for captures that have yet
                to begin, however many come one after the other.
        """
        self._max_wait_s = max_wait_s
        self._changed = threading.Condition()
        self._num_users = 0
        self._num_waiting = 0
        self._capturing = False
        # When each of those who are kept out goes before any capture.
        self._first_from_s: list[float] = []

    @contextmanager
    def using(self) -> Iterator[None]:
        """Hold off captures while the GPU is used; waits for one that runs, or a while for one that waits."""
        with self._changed:
            first_from_s = time.monotonic() + self._max_wait_s
            self._first_from_s.append(first_from_s)
            try:
                while self._capturing or (self._num_waiting and time.monotonic() < first_from_s):
                    left_s = first_from_s - time.monotonic()
                    self._changed.wait(left_s if left_s > 0 else None)
            finally:
                self._first_from_s.remove(first_from_s)
            self._num_users += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_users -= 1
                self._changed.notify_all()

    @contextmanager
    def capturing(self) -> Iterator[bool]:
        """Hold off everyone else; yields whether that was possible in time, and if not nothing is held."""
        with self._changed:
            self._num_waiting += 1
            try:
                granted = self._changed.wait_for(self._is_free, timeout=self._max_wait_s)
                self._capturing |= granted
            finally:
                self._num_waiting -= 1
                self._changed.notify_all()
        try:
            yield granted
        finally:
            if granted:
                with self._changed:
                    self._capturing = False
                    self._changed.notify_all()

    def _is_free(self) -> bool:
        now_s = time.monotonic()
        overdue = any(first_from_s <= now_s for first_from_s in self._first_from_s)
        return not self._num_users and not self._capturing and not overdue


GATE = CaptureGate()
"""The process's: whoever calls a GPU passes through it."""
IDS = GraphIds()
"""The process's."""


class Captures:
    """A row group's captured graphs, and when those that are missing are tried again.

    For the runner's thread.
    """

    def __init__(self, max_slots: int, *, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing is captured.

        Args:
            max_slots: of the group.
            what: the group, for the log.
            clock: monotonic seconds.
        """
        self._missing = [*buckets(max_slots)]
        self._what = what
        self._clock = clock
        self._graph_ids: dict[int, int] = {}
        self._thread: int | None = None
        self._num_tries = 0
        self._next_try_at_s = clock()

    @property
    def slot_counts(self) -> tuple[int, ...]:
        """Those for which there is a captured graph, ascending."""
        return tuple(sorted(self._graph_ids))

    def of_this_thread(self) -> Mapping[int, int]:
        """The captured graphs that the calling thread has, by slot count."""
        return self._graph_ids if self._thread == current_thread() else {}

    def is_due(self) -> bool:
        """Whether something is missing, and it is time to try."""
        return (
            bool(self._missing)
            and self._clock() >= self._next_try_at_s
            and self._thread in (None, current_thread())
        )

    def capture(self, gate: CaptureGate, capture_step: Callable[[int, int], None]) -> None:
        """Capture what is missing; what the gate does not grant in time is left for later.

        Args:
            gate: of the process.
            capture_step: captures the step of so many slots under this name.

        Raises:
            Exception: what `capture_step` raised; nothing more is captured then.
        """
        self._num_tries += 1
        while self._missing:
            num_slots = self._missing[-1]  # the largest first, so that the arena grows once
            with gate.capturing() as granted:
                if not granted:
                    self._postpone()
                    return
                graph_id = IDS.take()
                try:
                    capture_step(num_slots, graph_id)
                except BaseException:
                    self._missing.clear()
                    raise
            self._thread = current_thread()
            self._graph_ids[num_slots] = graph_id
            self._missing.pop()
        if self._num_tries > 1:
            _log.info("%s: all steps run as CUDA graphs now", self._what)

    def _postpone(self) -> None:
        if self._num_tries == MAX_CAPTURE_TRIES:
            self._missing.clear()
            _log.warning(
                "%s: steps stay slower, without CUDA graphs; at %d tries others used a GPU too long",
                *(self._what, MAX_CAPTURE_TRIES),
            )
            return
        if self._num_tries == 1:
            _log.warning(
                "%s: steps are slower for now, without CUDA graphs, which others that used a GPU for more "
                "than %g s kept from being captured; tried again when it is empty",
                *(self._what, MAX_CAPTURE_WAIT_S),
            )
        distance_s = _FIRST_DISTANCE_S * _DISTANCE_GROWTH ** (self._num_tries - 1)
        self._next_try_at_s = self._clock() + distance_s

    def tell_failure(self, error: Exception) -> None:
        """Log that a capture raised."""
        _log.warning(
            "%s: steps stay slower, without CUDA graphs; the capture failed (%s: %s). If none here "
            "succeeds, set DRAGOMAN_CUDA_GRAPHS=false",
            *(self._what, type(error).__name__, error),
        )


class Superseded(RuntimeError):
    """A runner was used after its model had got another one."""


class Succession:
    """Which runner of a model on a GPU is the newest: the only one that may use the model's sessions.

    A worker that hangs is given up and has a successor. If its call returns after all, it must not reach
    into the successor's stream.
    """

    def __init__(self) -> None:
        """Nobody is."""
        self._newest: object = None

    def succeed(self) -> object:
        """Become the newest; returns what proves it."""
        self._newest = object()
        return self._newest

    def check(self, proof: object) -> None:
        """Raise unless the holder of this proof is the newest.

        Raises:
            Superseded: another one has come.
        """
        if proof is not self._newest:
            raise Superseded("this worker's runner was succeeded by another one; it does nothing any more")
