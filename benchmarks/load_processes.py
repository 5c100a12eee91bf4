"""The child processes of the load benchmark: servers, client and offline engine, pinned to chosen cores."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import psutil

_ROOT = Path(__file__).resolve().parent.parent
_START_LIMIT_S = 120.0
_STOP_LIMIT_S = 60.0
_POLL_S = 0.005


@dataclass(frozen=True)
class ServerSpec:
    """A server to be measured; it answers ``POST /v1/translate`` in the native dialect.

    Attributes:
        name: for the tables.
        module: run with ``python -m``; takes ``--port``.
        arguments: of the module, the port left out.
        environment: variables beside the inherited ones.
    """

    name: str
    module: str
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


class Server:
    """A server process for the length of a with-block.

    Attributes:
        port: on the loopback interface.
        startup_s: seconds from starting the process to the first right answer.
    """

    def __init__(self, spec: ServerSpec, cores: Collection[int], *, first_body: str) -> None:
        """Prepare; `first_body` is asked until it is answered."""
        self.spec = spec
        self.port = _free_port()
        self.startup_s = 0.0
        self._cores = cores
        self._first_body = first_body
        self._first_answer = ""
        self._output: IO[bytes] | None = None

    def __enter__(self) -> Server:
        """Start the process and wait for its first translation."""
        self._output = tempfile.TemporaryFile()
        started_at_s = time.perf_counter()
        self._process = _start(
            [self.spec.module, *self.spec.arguments, "--port", str(self.port)],
            self._cores,
            environment=self.spec.environment,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )
        try:
            while not (answer := self._ask()):
                if self._process.poll() is not None or time.perf_counter() - started_at_s > _START_LIMIT_S:
                    raise RuntimeError(f"{self.spec.name} did not start:\n{self._last_output()}")
                time.sleep(_POLL_S)
        except BaseException:
            self._stop()
            raise
        self.startup_s = time.perf_counter() - started_at_s
        self._first_answer = answer
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Check that the first answer was right, and stop the process as an operator would."""
        try:
            if error is None and (answer := self._ask()) != self._first_answer:
                raise RuntimeError(
                    f"{self.spec.name} translated its first sentence into {len(self._first_answer)} "
                    f"characters and later into {len(answer)} others; the start time is of a wrong answer"
                )
        finally:
            self._stop()

    def cpu_s(self) -> float:
        """CPU seconds that the process and its children have used."""
        return sum(
            float(times.user + times.system)
            for process in self._processes()
            if (times := process.cpu_times()) is not None
        )

    def rss_mb(self) -> float:
        """Resident memory of the process and its children, in 10^6 bytes."""
        return sum(float(process.memory_info().rss) for process in self._processes()) / 1e6

    def _processes(self) -> list[psutil.Process]:
        parent = psutil.Process(self._process.pid)
        return [parent, *parent.children(recursive=True)]

    def _ask(self) -> str:
        """The translation of the first body, or nothing while there is none."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_START_LIMIT_S)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/translate", self._first_body.encode("utf-8"), headers)
            answer = connection.getresponse()
            body = answer.read()
            return str(json.loads(body)["texts"][0]["text"]) if answer.status == 200 else ""
        except (OSError, http.client.HTTPException):
            return ""  # not listening yet
        finally:
            connection.close()

    def _last_output(self) -> str:
        assert self._output is not None
        self._output.seek(0)
        return self._output.read()[-4000:].decode("utf-8", "replace")

    def _stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(timeout=_STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._output is not None:
            self._output.close()


class JsonChild:
    """A module that answers lines of JSON, in a process of its own; a context manager."""

    def __init__(self, module: str, arguments: Sequence[str], cores: Collection[int]) -> None:
        """Name the module and where it may run."""
        self._command = [module, *arguments]
        self._cores = cores

    def __enter__(self) -> JsonChild:
        """Start the process."""
        self._process = _start(
            self._command, self._cores, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the process."""
        self._process.communicate()  # closes its standard input: it has nothing left to do

    def ask(self, request: Mapping[str, object]) -> dict[str, Any]:
        """Send one request and wait for its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._command[0]} ended with {self._process.wait()}; see its errors above")
        return dict(json.loads(line))


def parse_cores(text: str) -> frozenset[int]:
    """Cores as ``0,1`` or ``0-3``.

    Raises:
        ValueError: it is no such list.
    """
    cores: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        cores.update(range(int(first), int(last if dash else first) + 1))
    if not cores:
        raise ValueError(f"'{text}' names no core; write 0,1 or 0-3")
    return frozenset(cores)


def _start(
    command: Sequence[str],
    cores: Collection[int],
    *,
    environment: Mapping[str, str] | None = None,
    **streams: Any,
) -> subprocess.Popen[Any]:
    with _pinned(cores):
        return subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=_ROOT,
            env={**os.environ, **(environment or {})},
            **streams,
        )


@contextlib.contextmanager
def _pinned(cores: Collection[int]) -> Iterator[None]:
    """Run this thread on these cores for a while: a child inherits them from its first instruction on."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
