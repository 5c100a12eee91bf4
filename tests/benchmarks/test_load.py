"""The load benchmark's client against servers that misbehave on purpose, and what it makes of samples."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.finite import finite
from benchmarks.load_client import BROKEN, TIMED_OUT, Job, JobResult, Sample, result_from, run_job
from benchmarks.load_figures import Cost, LoadFigures, figures_of, median_of, one_client, overload
from benchmarks.load_offline import Saturated
from benchmarks.load_processes import JsonChild, Server, ServerSpec, parse_cores
from benchmarks.load_report import load_table, summary
from benchmarks.load_rounds import (
    FULL,
    QUICK,
    Load,
    ServerResult,
    bodies_of,
    capacity_of,
    in_random_order,
    load_name,
    medians_by_text,
)
from benchmarks.peers.micro_batcher import MicroBatcher

TRANSLATED = (
    b'{"texts": [{"text": "x", "segments": [{"num_target_tokens": 3}, {"num_target_tokens": 4}]}],'
    b' "timings": {"total_s": 0.5, "queue_s": 0.1, "decode_s": 0.3}}'
)
NO_COST = Cost(cpu_s=0.0, rss_mb=0.0)


class FakeConnection(asyncio.Protocol):
    def __init__(self, server: FakeServer) -> None:
        self.server = server
        self.received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.server.connections.append(self)

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, end, rest = self.received.partition(b"\r\n\r\n")
        length = re.search(rb"Content-Length: (\d+)", head)
        if not end or length is None or len(rest) < int(length[1]):
            return
        assert len(rest) == int(length[1]), "one request at a time on a connection"
        assert head.startswith(b"POST /v1/translate HTTP/1.1\r\n")
        self.received = b""
        self.server.bodies.append(rest)
        self.server.num_open += 1
        self.server.most_open = max(self.server.most_open, self.server.num_open)
        self.server.handle(self)

    def answer(self, status: int = 200, body: bytes = TRANSLATED, more: bytes = b"") -> None:
        self.server.num_open -= 1
        head = b"HTTP/1.1 %d Any\r\ncontent-length: %d\r\n%s\r\n" % (status, len(body), more)
        self.transport.write(head + body)


class FakeServer:
    """Hands every request to `handle`, which answers now, later or never."""

    def __init__(self, handle: Callable[[FakeConnection], None]) -> None:
        self.handle = handle
        self.connections: list[FakeConnection] = []
        self.bodies: list[bytes] = []
        self.num_open = self.most_open = 0
        self.port = 0


@asynccontextmanager
async def serving(handle: Callable[[FakeConnection], None]) -> AsyncIterator[FakeServer]:
    fake = FakeServer(handle)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: FakeConnection(fake), "127.0.0.1", 0)
    fake.port = server.sockets[0].getsockname()[1]
    try:
        yield fake
    finally:
        server.close()
        for connection in fake.connections:
            connection.transport.abort()
        await asyncio.sleep(0)


def job_for(server: FakeServer, **fields: object) -> Job:
    return replace(Job(server.port, "/v1/translate", bodies_of(["a", "b", "ç"])), **fields)  # type: ignore[arg-type]


async def test_a_closed_loop_keeps_as_many_requests_open_as_it_has_clients() -> None:
    held: list[FakeConnection] = []

    def answer_when_all_clients_wait(connection: FakeConnection) -> None:
        held.append(connection)
        if len(held) == 5:
            while held:
                held.pop().answer()

    async with serving(answer_when_all_clients_wait) as server:
        # A client stops when the time is over; the others' last requests then wait for nobody.
        job = job_for(server, num_clients=5, duration_s=0.05, timeout_s=1.0)
        result = await run_job(job)
    assert server.most_open == 5
    assert len(server.connections) == 5, "connections are kept"
    translated = [sample for sample in result.samples if sample.ok]
    assert len(translated) >= 5
    assert all(sample.num_tokens == 7 for sample in translated)
    assert all(sample.timings["queue_s"] == 0.1 for sample in translated)
    assert all(sample.intended_s <= sample.sent_s <= sample.done_s for sample in result.samples)
    assert server.bodies[:4] == [body.encode() for body in [*job.bodies, job.bodies[0]]]


async def test_an_open_loop_sends_whatever_became_of_those_before() -> None:
    held: list[FakeConnection] = []

    def answer_when_all_came(connection: FakeConnection) -> None:
        held.append(connection)
        if len(held) == 6:
            for waiting in held:
                waiting.answer()

    arrivals_s = [0.0, 0.01, 0.011, 0.02, 0.03, 0.04]
    async with serving(answer_when_all_came) as server:
        result = await run_job(job_for(server, arrivals_s=arrivals_s))
    assert sorted(sample.intended_s for sample in result.samples) == arrivals_s
    assert all(sample.ok and sample.sent_s >= sample.intended_s for sample in result.samples)
    first = min(result.samples, key=lambda sample: sample.intended_s)
    assert first.latency_s >= 0.04


async def test_waiting_behind_a_slow_answer_counts_as_latency() -> None:
    """A client that measured from the sending would see one slow request among many fast ones."""
    stall_s = 0.2

    def stall_once(connection: FakeConnection) -> None:
        if len(connection.server.bodies) == 1:
            asyncio.get_running_loop().call_later(stall_s, connection.answer)
        else:
            connection.answer()

    arrivals_s = [0.0, 0.05, 0.1, 0.15]
    async with serving(stall_once) as server:
        result = await run_job(job_for(server, arrivals_s=arrivals_s, max_connections=1))
    assert len(server.connections) == 1
    assert len(result.samples) == 4
    for sample in result.samples:
        assert sample.latency_s >= 0.99 * (stall_s - sample.intended_s)


async def test_errors_are_counted_by_what_they_are() -> None:
    async def outcome(handle: Callable[[FakeConnection], None], **fields: object) -> list[str]:
        async with serving(handle) as server:
            result = await run_job(job_for(server, arrivals_s=[0.0, 0.0], **fields))
        assert all(sample.num_tokens == 0 for sample in result.samples)
        return [sample.status for sample in result.samples]

    assert await outcome(lambda connection: connection.answer(429, b"not even JSON")) == ["429"] * 2
    assert await outcome(lambda connection: connection.transport.abort()) == [BROKEN] * 2
    assert await outcome(lambda connection: None, timeout_s=0.05) == [TIMED_OUT] * 2


async def test_nobody_listening_is_a_broken_connection() -> None:
    async with serving(lambda connection: None) as server:
        port = server.port
    result = await run_job(Job(port, "/v1/translate", ["{}"], arrivals_s=[0.0]))
    assert [sample.status for sample in result.samples] == [BROKEN]


async def test_a_connection_that_the_server_closes_is_not_used_again() -> None:
    def close_after_each(connection: FakeConnection) -> None:
        connection.answer(more=b"Connection: close\r\n")

    async with serving(close_after_each) as server:
        result = await run_job(job_for(server, num_clients=1, duration_s=0.03))
    assert all(sample.ok for sample in result.samples)
    assert len(server.connections) == len(result.samples)


async def test_an_answer_in_pieces_is_one_answer() -> None:
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(TRANSLATED), TRANSLATED)

    def drip(connection: FakeConnection) -> None:
        loop = asyncio.get_running_loop()
        for index in range(len(whole)):
            loop.call_later(index * 1e-5, connection.transport.write, whole[index : index + 1])

    async with serving(drip) as server:
        result = await run_job(job_for(server, arrivals_s=[0.0]))
    assert [sample.num_tokens for sample in result.samples] == [7]


def sample_of(done_s: float, latency_s: float, status: str = "200", num_tokens: int = 10) -> Sample:
    return Sample(0, done_s - latency_s, done_s - latency_s, done_s, status, num_tokens)


@given(st.lists(st.floats(0.001, 100), min_size=1, max_size=300))
def test_percentiles_are_those_of_numpy(latencies_s: list[float]) -> None:
    samples = [sample_of(200.0, latency_s) for latency_s in latencies_s]
    figures = figures_of("x", JobResult(samples, 1, 1), NO_COST, window_s=1, num_offered=1)
    exact_ms = [sample.latency_s * 1e3 for sample in samples]
    for found, percent in ((figures.p50_ms, 50), (figures.p95_ms, 95), (figures.p99_ms, 99)):
        assert found == np.percentile(exact_ms, percent, method="inverted_cdf")


def test_rates_count_what_ends_within_the_window_and_latencies_count_all() -> None:
    samples = [
        *(sample_of(0.1 * (index + 1), 0.05) for index in range(20)),
        sample_of(5.0, 4.0, num_tokens=1000),
        sample_of(1.0, 0.5, "429", num_tokens=0),
        sample_of(1.0, 0.5, TIMED_OUT, num_tokens=0),
    ]
    result = JobResult(samples, wall_s=5.0, cpu_s=0.46)
    figures = figures_of("x", result, Cost(cpu_s=2.1, rss_mb=300), window_s=2.0, num_offered=24)
    assert figures.offered_per_s == 12
    assert figures.requests_per_s == pytest.approx(10)
    assert figures.tokens_per_s == pytest.approx(100)
    assert figures.errors == {"429": 1, TIMED_OUT: 1}
    assert figures.p99_ms == pytest.approx(4000)
    assert figures.server_cpu_ms == pytest.approx(100)
    assert figures.client_cpu_ms == pytest.approx(20)
    assert figures.num_requests == 23


def test_a_load_without_a_translation_is_told_by_its_errors_and_takes_for_ever() -> None:
    result = JobResult([sample_of(1.0, 0.5, "503", num_tokens=0)], 1.0, 0.0)
    found = figures_of("8 clients", result, NO_COST, window_s=1.0, num_offered=1)
    assert (found.requests_per_s, found.tokens_per_s, found.errors) == (0, 0, {"503": 1})
    assert found.p50_ms == found.p99_ms == found.server_cpu_ms == float("inf")
    told = finite(asdict(found))
    assert isinstance(told, dict)
    assert (told["p99_ms"], told["errors"], told["num_requests"]) == (None, {"503": 1}, 1)


def figures(
    load: str = "8 clients", rate: float = 10.0, p99_ms: float = 5.0, **fields: object
) -> LoadFigures:
    base = LoadFigures(load, rate, rate, rate * 30, 1, 2, p99_ms, {}, 4, 0.1, 100, 50)
    return replace(base, **fields)  # type: ignore[arg-type]


def test_rounds_give_medians_and_lose_no_error() -> None:
    rounds = [figures(rate=30, errors={"429": 2}), figures(rate=10), figures(rate=20, errors={"429": 1})]
    merged = median_of(rounds)
    assert (merged.requests_per_s, merged.errors, merged.num_requests) == (20, {"429": 3}, 150)


def test_beyond_capacity_goodput_is_a_share_of_the_most_and_latency_a_multiple() -> None:
    below, beyond = figures(rate=80, p99_ms=20), figures(rate=95, p99_ms=50)
    found = overload([figures(rate=100), below, beyond], below=below, beyond=beyond)
    assert (found.goodput_share, found.p99_ratio) == (0.95, 2.5)


def test_a_lone_client_is_compared_with_the_engine_sentence_by_sentence() -> None:
    def request(body: int, latency_s: float, status: str = "200") -> Sample:
        timings = {"total_s": latency_s - 0.001, "queue_s": 0.0005, "decode_s": latency_s - 0.002}
        return Sample(body, 1.0, 1.0, 1.0 + latency_s, status, 5, timings)

    samples = [
        request(0, 0.012),
        request(0, 0.014),
        request(0, 0.013),
        request(1, 0.104),
        request(2, 9.0),  # the engine was not asked, its segments are several
        request(3, 9.0, "503"),
        request(4, 9.0),  # beyond what the engine was asked
    ]
    found = one_client(samples, [0.010, 0.100, None, 0.010])
    assert found.added_ms == pytest.approx((3 + 4) / 2)
    assert found.http_ms == pytest.approx((13 + 104) / 2)
    assert found.engine_ms == pytest.approx(55)
    assert (found.outside_ms, found.queue_ms, found.text_ms) == pytest.approx((1.0, 0.5, 0.5))
    with pytest.raises(ValueError, match="lone client"):
        one_client(samples[-3:], [0.010])


def test_medians_by_text_skip_what_was_not_timed() -> None:
    assert medians_by_text([[1.0, None, 3.0], [2.0, None, 5.0], [9.0, None, None]]) == [2.0, None, 4.0]


def test_texts_come_in_the_same_random_order_every_time() -> None:
    texts = [str(number) for number in range(100)]
    assert in_random_order(texts, None) == in_random_order(texts, None) != texts
    assert sorted(in_random_order(texts, None)) == sorted(texts)
    assert in_random_order(texts, 5) == in_random_order(texts, None)[:5]


@pytest.mark.parametrize(("text", "cores"), [("0", {0}), ("0,2", {0, 2}), ("1-3,5", {1, 2, 3, 5})])
def test_cores_are_read_from_a_list_or_a_range(text: str, cores: set[int]) -> None:
    assert parse_cores(text) == cores


@pytest.mark.parametrize("text", ["", "a", "3-1", "1-"])
def test_other_cores_are_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # argparse shows the text itself
        parse_cores(text)


def test_both_plans_hold_the_loads_that_are_compared() -> None:
    for plan in (QUICK, FULL):
        assert {0.8, 1.2} <= set(plan.shares)
        assert {1, 32} <= set(plan.clients)


def test_the_tables_name_every_server_load_and_error() -> None:
    loads = [figures("1 client"), figures("32 clients", rate=20, errors={"429": 7}), figures(load_name(1.2))]
    results = [
        ServerResult(
            name, 1.5, loads, capacity_of(loads), overload(loads, below=loads[0], beyond=loads[2]), {}, None
        )
        for name in ("ours", "theirs")
    ]
    table = load_table(results)
    assert table.count("32 clients") == table.count("7 x 429") == table.count("120 % of capacity") == 2
    text = summary(results, Saturated(100.0, 3000.0, 64))
    assert "32 clients 1.00 and 1.00" in text
    assert "50% of its peak" in text
    silent = replace(loads[0], requests_per_s=0.0, p99_ms=float("inf"))
    results[1] = replace(results[1], loads=[silent, *loads[1:]])
    assert "1 client - and -, 32 clients 1.00" in summary(results, Saturated(100.0, 3000.0, 64))


def test_processes_are_started_pinned_measured_and_stopped() -> None:
    core = min(os.sched_getaffinity(0))
    before = os.sched_getaffinity(0)
    bodies = bodies_of(["One.", "Two."])
    spec = ServerSpec("nothing", "benchmarks.load_trivial_server")
    with JsonChild("benchmarks.load_client", [], {core}) as client:
        with Server(spec, {core}, first_body=bodies[0]) as server:
            assert os.sched_getaffinity(0) == before
            assert os.sched_getaffinity(server._process.pid) == {core}
            assert server.startup_s > 0
            load = Load(client, bodies, replace(QUICK, open_s=0.2))
            closed, result = load.closed(server, 2, duration_s=0.2)
            assert len(result.samples) == closed.num_requests >= 2
            assert not closed.errors
            assert 1 < closed.rss_mb < 500
            open_loop = load.poisson(server, 0.5, capacity_per_s=200, seed=1)
            assert open_loop.load == "50 % of capacity"
            assert open_loop.offered_per_s * 0.2 == open_loop.num_requests
        assert server._process.returncode is not None
    assert client._process.returncode == 0


def test_a_server_that_does_not_start_says_why() -> None:
    spec = ServerSpec("broken", "benchmarks.load_trivial_server", ["--no-such-option"])
    with pytest.raises(RuntimeError, match="no-such-option"), Server(spec, {0}, first_body="{}"):
        pass


def test_a_result_survives_its_way_as_json() -> None:
    result = JobResult([Sample(1, 0.5, 0.6, 0.7, "200", 3, {"total_s": 0.1})], 1.0, 0.5)
    assert result_from(asdict(result)) == result


async def test_the_micro_batcher_translates_what_waits_together_and_mixes_nothing_up() -> None:
    batches: list[int] = []

    def reverse_all(sources: list[list[str]]) -> list[list[str]]:
        batches.append(len(sources))
        return [source[::-1] for source in sources]

    batcher = MicroBatcher(reverse_all, num_replicas=1, max_batch=4)
    sources = [[str(number), "x"] for number in range(11)]
    results = await asyncio.gather(*map(batcher.translate, sources))
    assert results == [source[::-1] for source in sources]
    assert batches == [4, 4, 3]
    await batcher.close()


async def test_a_failing_batch_is_its_requests_failure_and_the_next_one_is_translated() -> None:
    def fail_on_bad(sources: list[list[str]]) -> list[list[str]]:
        if ["bad"] in sources:
            raise ValueError("no such piece")
        return sources

    batcher = MicroBatcher(fail_on_bad, num_replicas=2, max_batch=1)
    results = await asyncio.gather(
        *(batcher.translate([piece]) for piece in ("a", "bad", "b")), return_exceptions=True
    )
    assert results[0] == ["a"]
    assert isinstance(results[1], ValueError)
    assert results[2] == ["b"]
    await batcher.close()
