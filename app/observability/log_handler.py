"""Log lines that nobody waits for: a reader that has stalled costs lines and never an answer."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from typing import TextIO

_MAX_WAITING_BYTES = 1 << 20
"""Some thousand lines; beyond that the newest are dropped, and counted."""
_MAX_AT_ONCE_BYTES: int = getattr(select, "PIPE_BUF", 512)
"""What POSIX lets a pipe take whole that says it can be written to; at least 512."""
_FLUSH_S = 2.0
"""At the end of the process a reader that has stalled gets so long to go on."""


class PatientHandler(logging.Handler):
    """Writes lines to a stream's file, in order, and lets them wait in memory while that takes nothing.

    A line goes out in the calling thread as long as that does not have to wait, so that a process that is
    killed has written what it logged. Once it would, a thread writes until all is out. The thread writes
    past the stream's own buffer, whose lock it would hold while it waits and the interpreter ends. Where no
    thread can be started (a limit of processes, the interpreter's end), the calls write what goes without
    waiting, and the next line tries again.

    Attributes:
        num_dropped: lines that were never written, since too many waited or the file refused them.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        max_waiting_bytes: int = _MAX_WAITING_BYTES,
        flush_s: float = _FLUSH_S,
    ) -> None:
        """Write to the file behind `stream`.

        Args:
            stream: whose file takes the lines.
            max_waiting_bytes: what is kept for a reader that has stalled.
            flush_s: how long `flush` waits for it.

        Raises:
            OSError: the stream has no file behind it (`io.UnsupportedOperation`).
        """
        super().__init__()
        self._file = stream.fileno()
        self._max_waiting_bytes = max_waiting_bytes
        self._flush_s = flush_s
        self._poll = select.poll()
        self._poll.register(self._file, select.POLLOUT)
        self._waiting: deque[bytes] = deque()
        self._num_waiting_bytes = 0
        self._changed = threading.Condition()
        self._is_writing = False
        self._num_unreported = 0
        self.num_dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record, or have it written."""
        try:
            line = (self.format(record) + "\n").encode("utf-8", "backslashreplace")
        except Exception:  # noqa: BLE001  # as every handler of the standard library
            self.handleError(record)
            return
        with self._changed:
            if self._has_written_all() and not self._num_unreported and self._takes_at_once(line):
                self._write_at_once(line)
            else:
                self._let_wait(line)

    def flush(self) -> None:
        """Wait until all is written, though not for long."""
        with self._changed:
            if not self._has_written_all():
                self._have_written(patience_s=self._flush_s)
            self._changed.wait_for(lambda: not self._is_writing, timeout=self._flush_s)

    def _has_written_all(self) -> bool:
        return not self._is_writing and not self._waiting

    def _takes_at_once(self, line: bytes) -> bool:
        return len(line) <= _MAX_AT_ONCE_BYTES and bool(self._poll.poll(0))

    def _write_at_once(self, line: bytes) -> None:
        try:
            written = os.write(self._file, line)
        except OSError:
            self.num_dropped += 1
            return
        if written < len(line):  # of no pipe, but of a disk that is nearly full
            self._start(line[written:])

    def _let_wait(self, line: bytes) -> None:
        if self._num_waiting_bytes + len(line) > self._max_waiting_bytes:
            self.num_dropped += 1
            self._num_unreported += 1
            return
        if self._num_unreported:
            note = self._note()
            self._waiting.append(note)
            self._num_waiting_bytes += len(note)
        self._start(line)

    def _start(self, line: bytes) -> None:
        self._waiting.append(line)
        self._num_waiting_bytes += len(line)
        self._have_written()

    def _have_written(self, *, patience_s: float = 0.0) -> None:
        """See to it that a thread writes; where there can be none, write here what the file takes so soon."""
        if self._is_writing:
            return
        self._is_writing = True
        try:
            threading.Thread(target=self._write_all, name="dragoman-log", daemon=True).start()
        except (RuntimeError, MemoryError):
            self._is_writing = False
            self._write_without_waiting(patience_s)

    def _write_without_waiting(self, patience_s: float) -> None:
        deadline_s = time.monotonic() + patience_s
        while self._waiting and self._poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
            line = self._waiting.popleft()
            try:
                num_written = os.write(self._file, line[:_MAX_AT_ONCE_BYTES])
            except BlockingIOError:  # somebody else has filled it meanwhile
                self._waiting.appendleft(line)
                return
            except OSError:
                self._num_waiting_bytes -= len(line)
                self.num_dropped += 1
                continue
            self._num_waiting_bytes -= num_written
            if num_written < len(line):
                self._waiting.appendleft(line[num_written:])

    def _note(self) -> bytes:
        """A line that says that lines are missing, in their place."""
        message = f"{self._num_unreported} log lines were dropped: whoever reads the log is too slow"
        self._num_unreported = 0
        record = logging.LogRecord("dragoman.log", logging.WARNING, "", 0, message, None, None)
        return (self.format(record) + "\n").encode("utf-8", "backslashreplace")

    def _write_all(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._is_writing = False
                    self._changed.notify_all()
                    return
                line = self._waiting.popleft()
            is_out = _write(self._file, line)
            with self._changed:
                self._num_waiting_bytes -= len(line)
                self.num_dropped += not is_out


def _write(file: int, line: bytes) -> bool:
    """Write all of it, however long that takes; whether the file took it."""
    left = memoryview(line)
    while left:
        try:
            left = left[os.write(file, left) :]
        except BlockingIOError:  # whoever shares the file has set it so
            _wait_for(file)
        except OSError:
            return False
    return True


def _wait_for(file: int) -> None:
    poll = select.poll()
    poll.register(file, select.POLLOUT)
    poll.poll()


def num_lines_dropped() -> int:
    """Lines that the process's log has lost so far."""
    handlers = logging.getLogger().handlers
    return sum(handler.num_dropped for handler in handlers if isinstance(handler, PatientHandler))


def handler_for(stream: TextIO) -> logging.Handler:
    """What writes lines to a stream; without ever waiting for it, where it has a file that can be asked."""
    if hasattr(select, "poll"):
        try:
            return PatientHandler(stream)
        except (OSError, ValueError, AttributeError):
            pass  # nothing but memory behind it
    return logging.StreamHandler(stream)
