"""An HTTP/1.1 client that costs little, in a process of its own: closed loops and Poisson arrivals.

The child (this file run as a module) does jobs that come as lines of JSON on its standard input; answers are
read as JSON only when a job's last request is done, so that the client takes no CPU time from the server
while it is measured. It knows keep-alive and Content-Length, which is all the servers here send.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

TIMED_OUT = "timeout"
BROKEN = "connection"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_CLOSES = re.compile(rb"\r\nconnection: *close\r\n", re.IGNORECASE)
_END_OF_HEAD = b"\r\n\r\n"


@dataclass(frozen=True)
class Job:
    """What to send, and when.

    Attributes:
        port: of the loopback server.
        path: of every request.
        bodies: JSON bodies, sent in this order, again and again.
        timeout_s: seconds after which a request is given up, from the moment it should have been sent.
        num_clients: closed loop: each sends its next request when it has an answer; 0 for `arrivals_s`.
        duration_s: closed loop: no request is begun after so many seconds.
        arrivals_s: open loop: when requests are to be sent, whatever became of those before.
        max_connections: open loop: requests beyond so many at a time wait here, which counts as latency.
    """

    port: int
    path: str
    bodies: Sequence[str]
    timeout_s: float = 60.0
    num_clients: int = 0
    duration_s: float = 0.0
    arrivals_s: Sequence[float] = ()
    max_connections: int = 1000


@dataclass(frozen=True)
class Sample:
    """One request; times in seconds from the start of the job.

    Attributes:
        body: index of its body.
        intended_s: when it should have been sent; closed loop: when it was.
        sent_s: when it was sent.
        done_s: when its answer was complete, or it was given up.
        status: HTTP status as text, `TIMED_OUT` or `BROKEN`.
        num_tokens: target tokens of the answer; 0 without a translation.
        timings: the service's own account in seconds (total_s, queue_s, decode_s), if it gives one.
    """

    body: int
    intended_s: float
    sent_s: float
    done_s: float
    status: str
    num_tokens: int = 0
    timings: dict[str, float] = field(default_factory=dict)

    @property
    def latency_s(self) -> float:
        """From when it should have been sent, so a client that was held up does not flatter the server."""
        return self.done_s - self.intended_s

    @property
    def ok(self) -> bool:
        """Whether it was translated."""
        return self.status == "200"


@dataclass(frozen=True)
class JobResult:
    """A finished job.

    Attributes:
        samples: in the order of their ends.
        wall_s: from the first request to the last answer.
        cpu_s: CPU seconds of this client meanwhile.
    """

    samples: list[Sample]
    wall_s: float
    cpu_s: float


@dataclass(frozen=True)
class _Answer:
    status: str
    body: bytes
    done_s: float


class _Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self.usable = True
        self._received = bytearray()
        self._waiting: asyncio.Future[_Answer] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(exc or ConnectionResetError("the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = self._received.find(_END_OF_HEAD)
        if end < 0 or self._waiting is None or self._waiting.done():
            return
        head = bytes(self._received[: end + 2])
        length = _LENGTH.search(head)
        if length is None:
            self._waiting.set_exception(ValueError("an answer without Content-Length; it cannot be read"))
            return
        if len(self._received) < end + len(_END_OF_HEAD) + int(length[1]):
            return
        if _CLOSES.search(head):
            self.usable = False
        body = bytes(self._received[end + len(_END_OF_HEAD) :])
        self._received.clear()
        self._waiting.set_result(_Answer(head[9:12].decode("ascii"), body, time.perf_counter()))

    async def ask(self, request: bytes) -> _Answer:
        assert self._transport is not None
        self._waiting = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._waiting

    def close(self) -> None:
        self.usable = False
        if self._transport is not None:
            self._transport.abort()


class _Client:
    """The connections of one job and what their requests came to."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._requests = [_request(job.path, body) for body in job.bodies]
        self._idle: list[_Connection] = []
        self._slots = asyncio.Semaphore(job.max_connections)
        self._ended: list[tuple[int, float, float, _Answer]] = []
        self.started_at_s = time.perf_counter()

    def now_s(self) -> float:
        return time.perf_counter() - self.started_at_s

    async def send(self, body: int, *, intended_s: float | None = None) -> None:
        """One request, which never raises for what the server does."""
        sent_s = self.now_s()
        intended_s = sent_s if intended_s is None else intended_s
        connection: _Connection | None = None
        try:
            async with asyncio.timeout(max(0.0, intended_s + self._job.timeout_s - sent_s)), self._slots:
                connection = await self._connection()
                sent_s = self.now_s()
                answer = await connection.ask(self._requests[body])
        except TimeoutError:
            answer = _Answer(TIMED_OUT, b"", time.perf_counter())
        except OSError:
            answer = _Answer(BROKEN, b"", time.perf_counter())
        if answer.status in (TIMED_OUT, BROKEN) and connection is not None:
            connection.close()
        if connection is not None and connection.usable:
            self._idle.append(connection)
        self._ended.append((body, intended_s, sent_s, answer))

    def samples(self) -> list[Sample]:
        return [
            Sample(
                body, intended_s, sent_s, answer.done_s - self.started_at_s, answer.status, *_account(answer)
            )
            for body, intended_s, sent_s, answer in self._ended
        ]

    def close(self) -> None:
        for connection in self._idle:
            connection.close()

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        _, connection = await asyncio.get_running_loop().create_connection(
            _Connection, "127.0.0.1", self._job.port
        )
        return connection


async def run_job(job: Job) -> JobResult:
    """Send a job's requests and wait for all answers."""
    client = _Client(job)
    cpu_before_s = time.process_time()
    try:
        await (_closed_loop(client, job) if job.num_clients else _open_loop(client, job))
        wall_s, cpu_s = client.now_s(), time.process_time() - cpu_before_s
    finally:
        client.close()
    return JobResult(client.samples(), wall_s, cpu_s)


async def _closed_loop(client: _Client, job: Job) -> None:
    bodies = _cycle(len(job.bodies))

    async def one_client() -> None:
        while client.now_s() < job.duration_s:
            await client.send(next(bodies))

    await asyncio.gather(*(one_client() for _ in range(job.num_clients)))


async def _open_loop(client: _Client, job: Job) -> None:
    bodies = _cycle(len(job.bodies))
    async with asyncio.TaskGroup() as requests:
        for intended_s in job.arrivals_s:
            await asyncio.sleep(max(0.0, intended_s - client.now_s()))
            requests.create_task(client.send(next(bodies), intended_s=intended_s))


def _cycle(count: int) -> Iterator[int]:
    while True:
        yield from range(count)


def _request(path: str, body: str) -> bytes:
    content = body.encode("utf-8")
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode("ascii") + content


def _account(answer: _Answer) -> tuple[int, dict[str, float]]:
    """Target tokens and timings that an answer tells."""
    if answer.status != "200":
        return 0, {}
    told = json.loads(answer.body)
    num_tokens = sum(
        int(segment["num_target_tokens"]) for text in told["texts"] for segment in text["segments"]
    )
    return num_tokens, dict(told.get("timings", {}))


def job_from(fields: dict[str, Any]) -> Job:
    """A job that came as JSON."""
    return Job(**fields)


def result_from(fields: dict[str, Any]) -> JobResult:
    """A result that came as JSON."""
    return JobResult(**{**fields, "samples": [Sample(**sample) for sample in fields["samples"]]})


def serve_lines(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The child's side of `benchmarks.load_processes.JsonChild`: a line of JSON for each that comes."""
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    serve_lines(lambda fields: asdict(asyncio.run(run_job(job_from(fields)))))
