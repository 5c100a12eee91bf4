"""A log whose reader stands still costs lines and never time, and says how many."""

import io
import logging
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import pytest
from prometheus_client import CollectorRegistry

from app.observability import Metrics, num_lines_dropped
from app.observability.log_handler import PatientHandler, handler_for

pytestmark = pytest.mark.skipif(not hasattr(select, "poll"), reason="no poll here")
ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60.0


class Pipe:
    """A pipe, as text to be written to and as bytes to be read from."""

    def __init__(self) -> None:
        self.reading, writing = os.pipe()
        self.stream: TextIO = os.fdopen(writing, "w")
        self.num_filled = 0

    def fill(self) -> None:
        """Leave no room."""
        os.set_blocking(self.stream.fileno(), False)
        with suppress(BlockingIOError):
            while True:
                self.num_filled += os.write(self.stream.fileno(), b"x" * 4096)
        os.set_blocking(self.stream.fileno(), True)

    def read(self, num_lines: int) -> list[str]:
        """The next lines, behind what it was filled with."""
        got = b""
        while got.count(b"\n") < num_lines:
            got += os.read(self.reading, 65536)
        num_filled, self.num_filled = self.num_filled, 0
        return got[num_filled:].decode().splitlines()

    def close(self) -> None:
        with suppress(OSError):
            os.close(self.reading)
        self.stream.close()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.close()


def log(handler: logging.Handler, *messages: str) -> None:
    """Log lines, failing where that waits for the reader."""

    def emit() -> None:
        for message in messages:
            handler.handle(logging.LogRecord("x", logging.INFO, "", 0, message, None, None))

    thread = threading.Thread(target=emit, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "logging waits for whoever reads the log"


def test_a_line_is_out_when_the_call_returns(pipe: Pipe) -> None:
    log(PatientHandler(pipe.stream), "one", "two")
    assert os.read(pipe.reading, 100) == b"one\ntwo\n"


def test_lines_wait_for_a_reader_that_stands_still_and_come_in_order(pipe: Pipe) -> None:
    handler = PatientHandler(pipe.stream)
    pipe.fill()
    messages = [f"line {number}" for number in range(1000)]
    log(handler, *messages)
    assert pipe.read(1000) == messages
    handler.flush()
    log(handler, "at once again")
    assert pipe.read(1) == ["at once again"]
    assert handler.num_dropped == 0


def test_what_does_not_fit_into_memory_is_dropped_counted_and_noted_in_its_place(pipe: Pipe) -> None:
    handler = PatientHandler(pipe.stream, max_waiting_bytes=100)
    pipe.fill()
    log(handler, *(f"line {number:4}" for number in range(30)))  # each of 10 bytes
    assert handler.num_dropped == 20
    lines = pipe.read(10)
    handler.flush()
    log(handler, "later")
    lines += pipe.read(2)
    assert lines == [
        *(f"line {number:4}" for number in range(10)),
        "20 log lines were dropped: whoever reads the log is too slow",
        "later",
    ]


def test_a_line_longer_than_a_pipe_takes_at_once_is_written_whole(pipe: Pipe) -> None:
    handler = PatientHandler(pipe.stream)
    long = "y" * 200_000
    log(handler, long, "short")
    assert pipe.read(2) == [long, "short"]


def test_a_pipe_that_somebody_set_not_to_wait_loses_nothing(pipe: Pipe) -> None:
    handler = PatientHandler(pipe.stream)
    os.set_blocking(pipe.stream.fileno(), False)
    messages = ["z" * 100_000, *(f"line {number}" for number in range(100))]
    log(handler, *messages)
    assert pipe.read(101) == messages


def test_flushing_gives_up_on_a_reader_that_stands_still(pipe: Pipe) -> None:
    handler = PatientHandler(pipe.stream, flush_s=0.01)
    pipe.fill()
    log(handler, "one")
    handler.flush()
    assert pipe.read(1) == ["one"]


@pytest.mark.parametrize("fault", ["a full disk", "a reader that is gone"])
def test_lines_that_the_file_refuses_are_counted(pipe: Pipe, fault: str) -> None:
    if fault == "a full disk":
        if not Path("/dev/full").exists():
            pytest.skip("Linux only")
        with open("/dev/full", "w") as full:
            handler = PatientHandler(full)
            log(handler, "one", "two", "w" * 10_000)
            handler.flush()
    else:
        os.close(pipe.reading)
        handler = PatientHandler(pipe.stream)
        log(handler, "one", "two", "w" * 10_000)
        handler.flush()
    assert handler.num_dropped == 3


class Threads:
    """Whether the machine lets this process start the thread that writes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_refused = 0
        self.are_allowed = False
        start = threading.Thread.start

        def start_if_allowed(thread: threading.Thread) -> None:
            if thread.name == "dragoman-log" and not self.are_allowed:
                self.num_refused += 1
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", start_if_allowed)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    return Threads(monkeypatch)


def emit(handler: logging.Handler, *messages: str) -> None:
    """Log lines in this thread, so that what a log call raises fails the test."""
    for message in messages:
        handler.handle(logging.LogRecord("x", logging.INFO, "", 0, message, None, None))


def test_without_a_thread_a_reader_that_is_free_gets_every_line_at_once(pipe: Pipe, threads: Threads) -> None:
    handler = PatientHandler(pipe.stream)
    messages = ["a" * 5000, "short", "b" * 9000]
    emit(handler, *messages)
    assert threads.num_refused == 2
    assert os.read(pipe.reading, 65536).decode().splitlines() == messages
    threads.are_allowed = True
    emit(handler, "c" * 200, "d" * 5000)
    assert pipe.read(2) == ["c" * 200, "d" * 5000]
    assert handler.num_dropped == 0


@pytest.mark.parametrize("are_allowed_later", [True, False])
def test_lines_that_waited_without_a_thread_go_out_before_the_next_one(
    pipe: Pipe, threads: Threads, are_allowed_later: bool
) -> None:
    handler = PatientHandler(pipe.stream)
    pipe.fill()
    emit(handler, "one", "e" * 5000, "three")
    assert threads.num_refused == 3, "every line tries again"
    assert len(os.read(pipe.reading, pipe.num_filled)) == pipe.num_filled
    pipe.num_filled = 0
    threads.are_allowed = are_allowed_later
    emit(handler, "four")
    assert pipe.read(4) == ["one", "e" * 5000, "three", "four"]
    assert handler.num_dropped == 0


def test_what_does_not_fit_while_there_is_no_thread_is_counted_and_noted(
    pipe: Pipe, threads: Threads
) -> None:
    handler = PatientHandler(pipe.stream, max_waiting_bytes=30)
    pipe.fill()
    emit(handler, *(f"line {number:4}" for number in range(8)))  # each of 10 bytes
    assert handler.num_dropped == 5
    os.read(pipe.reading, pipe.num_filled)
    pipe.num_filled = 0
    handler.flush()
    emit(handler, "later")
    assert pipe.read(5) == [
        *(f"line {number:4}" for number in range(3)),
        "5 log lines were dropped: whoever reads the log is too slow",
        "later",
    ]


def test_flushing_without_a_thread_writes_what_waits_and_gives_up_on_a_reader_that_stands_still(
    pipe: Pipe, threads: Threads
) -> None:
    handler = PatientHandler(pipe.stream, flush_s=0.01)
    pipe.fill()
    emit(handler, "one")
    handler.flush()
    os.read(pipe.reading, pipe.num_filled)
    pipe.num_filled = 0
    handler.flush()
    assert pipe.read(1) == ["one"]


def test_without_a_thread_lines_that_the_file_refuses_are_counted(pipe: Pipe, threads: Threads) -> None:
    handler = PatientHandler(pipe.stream)
    os.close(pipe.reading)
    emit(handler, "f" * 5000, "two", "g" * 5000)
    assert (handler.num_dropped, threads.num_refused) == (3, 2)


def test_without_a_thread_a_pipe_that_somebody_set_not_to_wait_loses_nothing(
    pipe: Pipe, threads: Threads
) -> None:
    handler = PatientHandler(pipe.stream)
    os.set_blocking(pipe.stream.fileno(), False)
    messages = ["h" * 100_000, *(f"line {number}" for number in range(10))]
    emit(handler, *messages)
    threads.are_allowed = True
    emit(handler, "last")
    assert pipe.read(12) == [*messages, "last"]


def test_a_stream_without_a_file_is_written_to_as_ever() -> None:
    stream = io.StringIO()
    log(handler_for(stream), "one")
    assert stream.getvalue() == "one\n"


def test_the_metric_counts_the_lines_that_the_process_has_lost(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    metrics.watch_log(num_lines_dropped=num_lines_dropped)
    handler = PatientHandler(pipe.stream, max_waiting_bytes=0)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    for expected in (3, 5):
        pipe.fill()
        while num_lines_dropped() < expected:
            log(handler, "line")
        metrics.exposition()
        assert registry.get_sample_value("dragoman_log_lines_dropped_total") == expected


ENDS = """
import logging, os, sys
from app.observability import configure_logging
configure_logging("json", "info")
for number in range(int(sys.argv[1])):
    logging.getLogger("x").info("line")
"""


@pytest.mark.parametrize("num_read", [0, 3000])
def test_a_process_ends_whether_or_not_somebody_reads_its_log(pipe: Pipe, num_read: int) -> None:
    pipe.fill()
    process = subprocess.Popen(
        [sys.executable, "-c", ENDS, "3000"], cwd=ROOT, stderr=pipe.stream, env={**os.environ}
    )
    try:
        if num_read:
            assert len(pipe.read(num_read)) == num_read
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
