"""The server process of a soak test: started, sampled, asked for its metrics, stopped."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.soak_requests import NATIVE

SERVE = (sys.executable, "-m", "app", "serve", "--port", "{port}")
"""The command that is tested, with a place for the port."""
_START_LIMIT_S = 120.0
_STOP_LIMIT_S = 90.0
_QUIET_LIMIT_S = 60.0
_FIRST_LIMIT_S = 600.0
_REQUESTS = "dragoman_http_request_seconds_count"


@dataclass(frozen=True)
class ProcessSample:
    """What the process held at one moment.

    Attributes:
        at_s: seconds since the load began.
        rss_bytes: resident memory.
        mapped_bytes: the part of it that is files, which the system may drop at any time.
        num_files: open files that are no connections.
        num_connections: TCP connections, the listening socket not counted.
        num_threads: threads.
    """

    at_s: float
    rss_bytes: int
    mapped_bytes: int
    num_files: int
    num_connections: int
    num_threads: int


@dataclass(frozen=True)
class Counts:
    """What /metrics says.

    Attributes:
        requests: answers by route and status code.
        totals: each counter and gauge, all its labels together, by the name in the exposition.
    """

    requests: Counter[tuple[str, int]]
    totals: Mapping[str, float]

    def since(self, earlier: Counts) -> Counts:
        """What came after an earlier look."""
        requests = Counter({key: number - earlier.requests[key] for key, number in self.requests.items()})
        totals = {name: value - earlier.totals.get(name, 0.0) for name, value in self.totals.items()}
        return Counts(requests, totals)


def counts_of(exposition: str) -> Counts:
    """Read Prometheus' text format."""
    requests: Counter[tuple[str, int]] = Counter()
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name == _REQUESTS:
                requests[sample.labels["route"], int(sample.labels["code"])] += int(sample.value)
            elif not sample.name.endswith(("_bucket", "_created")):
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return Counts(requests, totals)


class SoakServer:
    """A server process on a free loopback port, for the length of a with-block.

    Attributes:
        port: where it listens.
        exit_code: of the process once it has been stopped; None while it runs, or when it had to be killed.
    """

    def __init__(self, command: Sequence[str] = SERVE, *, environment: Mapping[str, str]) -> None:
        """Name the command, with ``{port}`` where its port belongs, and what to add to its environment."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.exit_code: int | None = None
        self._command = [part.format(port=self.port) for part in command]
        self._environment = {**os.environ, **environment}

    def __enter__(self) -> SoakServer:
        """Start the process and wait until it is ready."""
        self._log: IO[bytes] = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            self._command, stdout=self._log, stderr=self._log, env=self._environment
        )
        self._watched = psutil.Process(self._process.pid)
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)
        try:
            self._wait_until_ready()
        except BaseException:
            self._process.kill()
            self._process.wait()
            self._client.close()
            self._log.close()
            raise
        self._began_at_s = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop it, if that has not been done."""
        self.stop()
        self._log.close()

    def stop(self) -> None:
        """Stop it as an operator would, and keep its exit code."""
        self._client.close()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self.exit_code = self._process.wait(timeout=_STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def log_text(self) -> str:
        """What the process has written."""
        self._log.seek(0)
        return self._log.read().decode("utf-8", "replace")

    def sample(self) -> ProcessSample:
        """Look at the process.

        Raises:
            RuntimeError: it has ended.
        """
        try:
            with self._watched.oneshot():
                connections = self._watched.net_connections(kind="inet")
                memory = self._watched.memory_info()
                return ProcessSample(
                    at_s=time.monotonic() - self._began_at_s,
                    rss_bytes=memory.rss,
                    mapped_bytes=memory.shared,
                    num_files=self._watched.num_fds() - len(connections),
                    num_connections=sum(item.status != psutil.CONN_LISTEN for item in connections),
                    num_threads=self._watched.num_threads(),
                )
        except (psutil.NoSuchProcess, psutil.ZombieProcess) as error:
            raise RuntimeError(
                f"the server process has ended; it wrote: {self.log_text()[-2000:]}"
            ) from error

    def translate_first(self, bodies: Iterable[Mapping[str, Any]]) -> None:
        """Have it translate requests of the native dialect, one after another, before anything is counted.

        Raises:
            RuntimeError: it answers one of them with an error.
        """
        for body in bodies:
            answer = self._client.post(
                NATIVE, json=body, headers={"Connection": "close"}, timeout=_FIRST_LIMIT_S
            )
            if answer.status_code != httpx.codes.OK:
                raise RuntimeError(f"a request before the load got {answer.status_code}: {answer.text[:500]}")

    def counts(self) -> Counts:
        """Ask it for its metrics, on a connection that is closed behind it."""
        answer = self._client.get("/metrics", headers={"Connection": "close"})
        return counts_of(answer.raise_for_status().text)

    def wait_until_quiet(self) -> bool:
        """Wait until nothing is waiting, running or being answered; False if that takes too long."""
        give_up_at_s = time.monotonic() + _QUIET_LIMIT_S
        while time.monotonic() < give_up_at_s:
            totals = self.counts().totals
            # The look at the metrics is a request itself.
            if (
                totals["dragoman_running_requests"] == totals["dragoman_waiting_tokens"] == 0
                and totals["dragoman_http_requests_in_flight"] == 1
            ):
                return True
            time.sleep(0.1)
        return False

    def _wait_until_ready(self) -> None:
        give_up_at_s = time.monotonic() + _START_LIMIT_S
        while True:
            try:
                self._client.get("/readyz", headers={"Connection": "close"}).raise_for_status()
                return
            except httpx.HTTPError as error:
                if self._process.poll() is not None or time.monotonic() > give_up_at_s:
                    raise RuntimeError(f"the server did not start; it wrote: {self.log_text()}") from error
                time.sleep(0.02)
