"""Captured CUDA graphs: which row counts have one, how they are named, and who may use a GPU meanwhile.

A captured graph runs a whole decoder step by one launch, but only with the shapes and addresses it was
captured with. So steps are rounded up to a few row counts, the buckets.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

MAX_CAPTURE_WAIT_S = 5.0
"""Longest wait until the GPU calls of others are over. Beyond it one hangs, or loads a large model."""


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

    def __init__(self) -> None:
        """Open the gate."""
        self._changed = threading.Condition()
        self._num_users = 0
        self._num_waiting = 0
        self._capturing = False

    @contextmanager
    def using(self) -> Iterator[None]:
        """Hold off captures while the GPU is used; waits for one that has begun, or waits to begin."""
        with self._changed:
            while self._capturing or self._num_waiting:
                self._changed.wait()
            self._num_users += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_users -= 1
                self._changed.notify_all()

    @contextmanager
    def capturing(self, *, timeout_s: float = MAX_CAPTURE_WAIT_S) -> Iterator[bool]:
        """Hold off everyone else; yields whether that was possible in time, and if not nothing is held."""
        with self._changed:
            self._num_waiting += 1
            try:
                granted = self._changed.wait_for(
                    lambda: not self._num_users and not self._capturing, timeout=timeout_s
                )
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


GATE = CaptureGate()
"""The process's: whoever calls a GPU passes through it."""
IDS = GraphIds()
"""The process's."""
