"""The tables that `benchmarks.decode` prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.breakdown import Breakdown
from benchmarks.contest import ContestResult
from benchmarks.gemm_peak import GemmRate, GemmRates, WeightType
from benchmarks.peak_share import PeakShare

_MAX_OPERATORS = 10


def contest_table(results: Sequence[ContestResult]) -> str:
    """Both sides' tokens a second and a CPU second."""
    width = max((len(result.name) for result in results), default=0)
    lines = [
        f"{'':{width}s}   target tokens/s              target tokens/CPU-s       wall s        CPU s",
        f"{'':{width}s}   ours  peer ratio (range)       ours   peer ratio   ours   peer   ours   peer",
    ]
    for result in results:
        ours, theirs = result.ours, result.theirs
        least, largest = result.ratio_range
        lines.append(
            f"{result.name:{width}s} {ours.tokens_per_s:6.0f} {theirs.tokens_per_s:5.0f} {result.ratio:5.2f} "
            f"({least:.2f}-{largest:.2f}) {ours.tokens_per_cpu_s:8.0f} {theirs.tokens_per_cpu_s:6.0f} "
            f"{result.cpu_ratio:5.2f} {ours.wall_s:6.2f} {theirs.wall_s:6.2f} {ours.cpu_s:6.2f} "
            f"{theirs.cpu_s:6.2f}"
        )
    return "\n".join(lines)


def tuning_lines(results: Iterable[ContestResult]) -> str:
    """How the other side was tuned, contest by contest."""
    return "\n".join(f"{result.name}: {result.their_setting}" for result in results)


def gemm_table(rates: GemmRates) -> str:
    """GFLOP/s by shape, row count and type of weights."""
    row_counts = sorted({rate.num_rows for rate in rates.rates})
    found = {(rate.weights, rate.inputs, rate.outputs, rate.num_rows): rate for rate in rates.rates}
    lines = [f"{'weights, K x N':24s}" + "".join(f"{f'{rows} rows':>10s}" for rows in row_counts)]
    for weights, inputs, outputs in sorted({_kind(rate) for rate in rates.rates}):
        cells = [found[weights, inputs, outputs, rows].gflop_per_s for rows in row_counts]
        lines.append(f"{f'{weights}, {inputs} x {outputs}':24s}" + "".join(f"{cell:10.1f}" for cell in cells))
    return "\n".join(lines)


def peak_table(shares: Sequence[PeakShare]) -> str:
    """What encoder and step reach of the products' rate."""
    lines = [f"{'GFLOP/s on one thread':52s} achieved  products (rows) share    peak share"]
    lines += [
        f"{f'{share.name}: {share.graph}':52s} {share.achieved:8.1f} {share.attainable:9.1f} "
        f"({share.num_rows:4d}) {share.share_of_attainable:5.0%} {share.peak:7.1f} {share.share_of_peak:5.0%}"
        for share in shares
    ]
    return "\n".join(lines)


def breakdown_table(breakdown: Breakdown) -> str:
    """Seconds by graph and operator type."""
    lines = [
        f"{breakdown.name}: {breakdown.num_tokens} tokens in {breakdown.wall_s:.2f} s, "
        f"{breakdown.outside_share:.0%} outside of graph calls"
    ]
    for graph in breakdown.graphs:
        lines.append(
            f"  {graph.graph}: {graph.seconds:.2f} s, {graph.num_calls} calls, "
            f"{graph.seconds / graph.num_calls * 1e3:.2f} ms each"
        )
        operators = sorted(graph.by_operator_s.items(), key=lambda item: -item[1])
        shown = [f"{name} {seconds / graph.seconds:.0%}" for name, seconds in operators[:_MAX_OPERATORS]]
        rest = sum(seconds for _, seconds in operators[_MAX_OPERATORS:])
        lines.append(f"    {', '.join(shown)}, all others {rest / graph.seconds:.0%}")
    return "\n".join(lines)


def _kind(rate: GemmRate) -> tuple[WeightType, int, int]:
    return rate.weights, rate.inputs, rate.outputs
