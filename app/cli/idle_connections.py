"""Which connections wait for a request, and that they make room when the process runs short of files.

Without that, clients that keep their connections open would keep everybody else out, probes included: a
process that has no file left cannot accept, and whoever waits is not even refused.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import Protocol

import structlog

MAX_ACCEPTED_AT_ONCE = 16
"""Connections that one turn of the event loop accepts."""
_TURNS_TO_CLOSE = 6
"""Of the event loop, from accepting a connection to having closed another one for it."""
_NUM_NEWCOMERS = 64
_NEWCOMER_S = 1.0
"""Who connected or was answered so recently may be about to ask: so many of them stay beside the others."""
_SPARE_FILES = _NUM_NEWCOMERS + _TURNS_TO_CLOSE * MAX_ACCEPTED_AT_ONCE + 16
"""Left for newcomers, those that are accepted meanwhile, the bundles of a reload and the event loop."""
_MIN_CONNECTIONS = 8
_LOG_EVERY_S = 60.0

_log: structlog.stdlib.BoundLogger = structlog.get_logger("dragoman.serve")


class Closable(Protocol):
    """A connection."""

    def timeout_keep_alive_handler(self) -> None:
        """Close it, as when it was idle for too long."""
        ...


class IdleConnections:
    """The connections that wait for a request, the longest idle first; for the event loop only."""

    def __init__(
        self,
        *,
        max_files: Callable[[], int] | None = None,
        num_other_files: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin without any.

        Args:
            max_files: how many the process may have open; None asks the system, which may be told otherwise
                while the process runs.
            num_other_files: those open that are no connections; None counts what is open now.
            clock: monotonic seconds.
        """
        self._idle_since_s: dict[Closable, float] = {}
        self._closing: set[Closable] = set()
        self._max_files = max_files or _limit_of_process
        self._num_other_files = _num_open_files() if num_other_files is None else num_other_files
        self._clock = clock
        self._num_closed = 0
        self._logged_at_s = -_LOG_EVERY_S

    def add(self, connection: Closable) -> None:
        """From now on this one is idle."""
        self._idle_since_s.pop(connection, None)
        self._idle_since_s[connection] = self._clock()

    def discard(self, connection: Closable) -> None:
        """This one is not idle, or is gone."""
        self._idle_since_s.pop(connection, None)
        self._closing.discard(connection)

    def __contains__(self, connection: Closable) -> bool:
        """Whether this one is idle, and not being closed."""
        return connection in self._idle_since_s

    @property
    def max_connections(self) -> int:
        """More than so many make idle ones go."""
        return max(_MIN_CONNECTIONS, self._max_files() - self._num_other_files - _SPARE_FILES)

    def make_room(self, num_connections: int) -> None:
        """Close the longest idle, as many as there are too many; those with a request stay whatever happens.

        Args:
            num_connections: all that are open.
        """
        num_too_many = num_connections - len(self._closing) - self.max_connections
        while num_too_many > 0 and self._idle_since_s:
            oldest, since_s = next(iter(self._idle_since_s.items()))
            if num_too_many <= _NUM_NEWCOMERS and self._clock() - since_s < _NEWCOMER_S:
                break
            del self._idle_since_s[oldest]
            self._closing.add(oldest)  # it counts until it is gone
            oldest.timeout_keep_alive_handler()
            num_too_many -= 1
            self._note_closed()

    def _note_closed(self) -> None:
        self._num_closed += 1
        now_s = self._clock()
        if now_s - self._logged_at_s >= _LOG_EVERY_S:
            self._logged_at_s = now_s
            _log.warning(
                "idle_connections_closed",
                num_closed=self._num_closed,
                max_connections=self.max_connections,
                remedy="the process runs short of files: raise its limit of open files (ulimit -n)",
            )


def _limit_of_process() -> int:
    if sys.platform == "win32":
        return sys.maxsize
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def _num_open_files() -> int:
    for folder in ("/proc/self/fd", "/dev/fd"):
        with contextlib.suppress(OSError):
            return len(os.listdir(folder))
    return 0
