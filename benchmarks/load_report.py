"""The tables that `benchmarks.load` prints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.load_figures import LoadFigures
from benchmarks.load_offline import Saturated
from benchmarks.load_rounds import ServerResult


@dataclass(frozen=True)
class Shipped:
    """The service as it is shipped, both directions loaded.

    Attributes:
        startup_s: each start, to the first right answer.
        median_startup_s: their median.
        rss_idle_mb: after the first answer.
        load: 32 clients, one direction.
    """

    startup_s: list[float]
    median_startup_s: float
    rss_idle_mb: float
    load: LoadFigures


def load_table(results: Sequence[ServerResult]) -> str:
    """Every load of every server."""
    width = max(len(result.name) for result in results)
    headings = (
        f"{'':{width}s} {'load':16s}{'offered':>8s}{'req/s':>8s}{'tokens/s':>9s}{'p50 ms':>8s}{'p95 ms':>8s}"
        f"{'p99 ms':>8s}{'CPU ms':>7s}{'client':>7s}{'RSS MB':>7s}  errors"
    )
    rows = [
        f"{result.name:{width}s} {_cells(figures)}"
        for index in range(len(results[0].loads))
        for result in results
        for figures in [result.loads[index]]
    ]
    reading = (
        "CPU ms: of the server for each request it translated; client: of the load client for each it sent.\n"
        "Latencies at a share of capacity count from when a request should have been sent."
    )
    return "\n".join([headings, *rows, reading])


def summary(results: Sequence[ServerResult], offline: Saturated) -> str:
    """What the targets speak of."""
    ours, *others = results
    lines = [
        f"our engine offline, {offline.max_rows} rows: {offline.requests_per_s:.1f} sentences/s, "
        f"{offline.tokens_per_s:.0f} tokens/s; over HTTP "
        + ", ".join(f"{share:.0%} with {load}" for load, share in ours.share_of_offline.items())
    ]
    if ours.one_client is not None:
        lone = ours.one_client
        lines.append(
            f"one client, medians in ms: {lone.http_ms:.2f} over HTTP, {lone.engine_ms:.2f} by the bare "
            f"engine, the same sentence {lone.added_ms:.2f} longer; by the service's own account "
            f"{lone.outside_ms:.2f} outside of it (HTTP, JSON), {lone.queue_ms:.2f} in the queue, "
            f"{lone.text_ms:.2f} for text and loop"
        )
    lines += [
        f"{result.name}: first right answer after {result.startup_s:.2f} s; at 120 % of its "
        f"{result.capacity_per_s:.1f} req/s it translates {result.overload.goodput_share:.0%} of its peak "
        f"with {result.overload.p99_ratio:.1f} times the p99 it has at 80 %"
        for result in results
    ]
    for other in others:
        pairs = [pair for pair in zip(ours.loads, other.loads, strict=True) if "client" in pair[0].load]
        ratios = [
            f"{mine.load} {_ratio(mine.requests_per_s, theirs.requests_per_s)} and "
            f"{_ratio(mine.p99_ms, theirs.p99_ms)}"
            for mine, theirs in pairs
        ]
        lines.append(f"{ours.name} by {other.name}, req/s and p99: {', '.join(ratios)}")
    return "\n".join(lines)


def shipped_line(shipped: Shipped) -> str:
    """Start and memory of the service as it is shipped."""
    return (
        f"shipped bundles, both directions: first right answer after {shipped.median_startup_s:.2f} s "
        f"(median of {len(shipped.startup_s)} starts), RSS {shipped.rss_idle_mb:.0f} MB after it and "
        f"{shipped.load.rss_mb:.0f} MB after 32 clients, which got {shipped.load.requests_per_s:.1f} req/s"
    )


def ceiling_line(ceiling: LoadFigures) -> str:
    """What the client can do."""
    return (
        f"the client's ceiling, {ceiling.load}: {ceiling.requests_per_s:.0f} req/s from a server that does "
        f"nothing, {ceiling.client_cpu_ms:.3f} CPU ms a request"
    )


def _ratio(ours: float, theirs: float) -> str:
    """Nothing where a side translated nothing in time."""
    return f"{ours / theirs:.2f}" if theirs > 0 and math.isfinite(ours) and math.isfinite(theirs) else "-"


def _cells(figures: LoadFigures) -> str:
    errors = ", ".join(f"{number} x {status}" for status, number in figures.errors.items())
    return (
        f"{figures.load:16s}{figures.offered_per_s:8.1f}{figures.requests_per_s:8.1f}"
        f"{figures.tokens_per_s:9.0f}{figures.p50_ms:8.1f}{figures.p95_ms:8.1f}{figures.p99_ms:8.1f}"
        f"{figures.server_cpu_ms:7.2f}{figures.client_cpu_ms:7.2f}{figures.rss_mb:7.0f}  {errors or 'none'}"
    )
