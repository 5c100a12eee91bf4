"""What is made of the samples of a load: rates, percentiles, errors, and what holds beyond capacity. Pure."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.latency import percentile
from benchmarks.load_client import JobResult, Sample


@dataclass(frozen=True)
class Cost:
    """What a run took of the server.

    Attributes:
        cpu_s: CPU seconds of the server's processes during the run.
        rss_mb: their resident memory after it, 10^6 bytes.
    """

    cpu_s: float
    rss_mb: float


@dataclass(frozen=True)
class LoadFigures:
    """One load of one server, or medians over its rounds.

    Attributes:
        load: "8 clients" or "120 % of capacity".
        offered_per_s: requests a second that should have been sent; in a closed loop, that were.
        requests_per_s: translated within the window, per second of it.
        tokens_per_s: target tokens of those.
        p50_ms: median latency of all that were translated; open loop: from their intended time.
        p95_ms: 95th percentile, nearest rank.
        p99_ms: 99th percentile.
        errors: number by HTTP status, "timeout" or "connection"; summed over the rounds.
        server_cpu_ms: CPU milliseconds of the server for each request it translated.
        client_cpu_ms: of the client, likewise.
        rss_mb: of the server after the run.
        num_requests: sent, summed over the rounds.
    """

    load: str
    offered_per_s: float
    requests_per_s: float
    tokens_per_s: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    errors: dict[str, int]
    server_cpu_ms: float
    client_cpu_ms: float
    rss_mb: float
    num_requests: int


@dataclass(frozen=True)
class Overload:
    """How a server holds beyond its capacity.

    Attributes:
        goodput_share: translated a second at 120 % of capacity, by the most of any load.
        p99_ratio: 99th percentile of those that were translated, by that at 80 %.
    """

    goodput_share: float
    p99_ratio: float


@dataclass(frozen=True)
class OneClient:
    """Where the time of a lone client's request goes, in ms: medians over the sentences.

    Attributes:
        http_ms: as the client sees it.
        engine_ms: the same sentences by the bare engine: token ids in, hypotheses out, nothing queued.
        added_ms: median difference for the same sentence: HTTP, JSON, text, tokenizer, queue and thread.
        outside_ms: the part that the service's own account does not see: HTTP and JSON, both sides.
        queue_ms: by the service's account, from queueing to the encoder.
        text_ms: by the same, neither queue nor decoding: segmentation, tokenizer, the loop.
    """

    http_ms: float
    engine_ms: float
    added_ms: float
    outside_ms: float
    queue_ms: float
    text_ms: float


def figures_of(load: str, result: JobResult, cost: Cost, *, window_s: float, num_offered: int) -> LoadFigures:
    """The figures of one run.

    Args:
        load: its name.
        result: what the client saw.
        cost: what the server used.
        window_s: seconds in which requests were sent; what ends later counts for latency, not for rates.
        num_offered: requests that should have been sent in it.

    Returns:
        The figures; where nothing was translated, latencies and the cost of a translation are infinite.
    """
    translated = [sample for sample in result.samples if sample.ok]
    errors = Counter(sample.status for sample in result.samples if not sample.ok)
    in_time = [sample for sample in translated if sample.done_s <= window_s]
    latencies_ms = [sample.latency_s * 1e3 for sample in translated] or [math.inf]
    return LoadFigures(
        load=load,
        offered_per_s=num_offered / window_s,
        requests_per_s=len(in_time) / window_s,
        tokens_per_s=sum(sample.num_tokens for sample in in_time) / window_s,
        p50_ms=percentile(latencies_ms, 50),
        p95_ms=percentile(latencies_ms, 95),
        p99_ms=percentile(latencies_ms, 99),
        errors=dict(sorted(errors.items())),
        server_cpu_ms=cost.cpu_s / len(translated) * 1e3 if translated else math.inf,
        client_cpu_ms=result.cpu_s / max(1, len(result.samples)) * 1e3,
        rss_mb=cost.rss_mb,
        num_requests=len(result.samples),
    )


def median_of(rounds: Sequence[LoadFigures]) -> LoadFigures:
    """Medians of a load's rounds; errors and requests are summed."""
    errors: Counter[str] = Counter()
    for figures in rounds:
        errors.update(figures.errors)

    def median(name: str) -> float:
        return float(statistics.median(getattr(figures, name) for figures in rounds))

    return LoadFigures(
        load=rounds[0].load,
        offered_per_s=median("offered_per_s"),
        requests_per_s=median("requests_per_s"),
        tokens_per_s=median("tokens_per_s"),
        p50_ms=median("p50_ms"),
        p95_ms=median("p95_ms"),
        p99_ms=median("p99_ms"),
        errors=dict(sorted(errors.items())),
        server_cpu_ms=median("server_cpu_ms"),
        client_cpu_ms=median("client_cpu_ms"),
        rss_mb=median("rss_mb"),
        num_requests=sum(figures.num_requests for figures in rounds),
    )


def overload(all_loads: Sequence[LoadFigures], *, below: LoadFigures, beyond: LoadFigures) -> Overload:
    """How a server holds beyond capacity, from all its loads, that at 80 % and that at 120 %."""
    peak = max(figures.requests_per_s for figures in all_loads)
    return Overload(beyond.requests_per_s / peak, beyond.p99_ms / below.p99_ms)


def one_client(samples: Sequence[Sample], engine_s: Sequence[float | None]) -> OneClient:
    """A lone client's requests beside the bare engine.

    Args:
        samples: any number for each body.
        engine_s: seconds of the bare engine for each of the first bodies; None for one not to be compared.

    Raises:
        ValueError: no body to be compared was translated.
    """
    by_body: dict[int, list[Sample]] = defaultdict(list)
    alone_s = {body: seconds for body, seconds in enumerate(engine_s) if seconds is not None}
    for sample in samples:
        if sample.ok and sample.body in alone_s:
            by_body[sample.body].append(sample)
    if not by_body:
        raise ValueError("the lone client has no translation to compare with the engine")
    http_s = {body: statistics.median(sample.latency_s for sample in same) for body, same in by_body.items()}
    told = [sample for same in by_body.values() for sample in same if sample.timings]

    def median_ms(seconds: Sequence[float]) -> float:
        return statistics.median(seconds) * 1e3 if seconds else 0.0

    return OneClient(
        http_ms=median_ms(list(http_s.values())),
        engine_ms=median_ms([alone_s[body] for body in http_s]),
        added_ms=median_ms([seconds - alone_s[body] for body, seconds in http_s.items()]),
        outside_ms=median_ms([sample.latency_s - sample.timings["total_s"] for sample in told]),
        queue_ms=median_ms([sample.timings["queue_s"] for sample in told]),
        text_ms=median_ms(
            [
                sample.timings["total_s"] - sample.timings["queue_s"] - sample.timings["decode_s"]
                for sample in told
            ]
        ),
    )
