"""The tables that `benchmarks.decode` prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.breakdown import Breakdown, GraphTime
from benchmarks.contest import ContestResult
from benchmarks.gemm_peak import GemmRate, GemmRates, WeightType
from benchmarks.peak_share import PeakShare

_MAX_OPERATORS = 10


def contest_table(results: Sequence[ContestResult]) -> str:
    """Both sides' tokens a second and a CPU second, and the seconds of a run."""
    width = max((len(result.name) for result in results), default=0)
    groups = f"{'target tokens/s':^32s}{'target tokens/CPU-s':^20s}{'wall s':^14s}{'CPU s':^14s}"
    sides = f"{'ours':>7s}{'theirs':>7s}"
    ratio = f"{'ratio':>6s}"
    lines = [
        f"{'':{width}s}{groups}",
        f"{'':{width}s}{sides}{ratio}{'range':>12s}{sides}{ratio}{sides}{sides}",
    ]
    for result in results:
        ours, theirs = result.ours, result.theirs
        least, largest = result.ratio_range
        cells = [
            f"{ours.tokens_per_s:7.0f}{theirs.tokens_per_s:7.0f}{result.ratio:6.2f}",
            f"{f'{least:.2f}-{largest:.2f}':>12s}",
            f"{ours.tokens_per_cpu_s:7.0f}{theirs.tokens_per_cpu_s:7.0f}{result.cpu_ratio:6.2f}",
            f"{ours.wall_s:7.2f}{theirs.wall_s:7.2f}{ours.cpu_s:7.2f}{theirs.cpu_s:7.2f}",
        ]
        lines.append(f"{result.name:{width}s}{''.join(cells)}")
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
    width = max((len(f"{share.name}: {share.graph}") for share in shares), default=0)
    headings = ("rows", "achieved", "products", "share", "peak", "share")
    lines = [
        "Real work, in GFLOP/s of one thread, beside the matrix products alone at the same number of rows",
        f"{'':{width}s}" + "".join(f"{heading:>9s}" for heading in headings),
    ]
    for share in shares:
        cells = [
            f"{share.mean_rows:9.1f}{share.achieved:9.1f}",
            f"{share.attainable:9.1f}{share.share_of_attainable:9.0%}",
            f"{share.peak:9.1f}{share.share_of_peak:9.0%}",
        ]
        lines.append(f"{f'{share.name}: {share.graph}':{width}s}{''.join(cells)}")
    return "\n".join(lines)


def breakdown_tables(breakdowns: Iterable[Breakdown]) -> str:
    """All breakdowns, and how to read them."""
    reading = (
        "Seconds are from a run without the profiler. Operators' shares are from a second run with it; it\n"
        "adds a little to every node, so the shares of small nodes in small steps are too high. Outside of\n"
        "graph calls is Python and, with several threads, waiting for its lock; some of that is in the calls."
    )
    return "\n".join([reading, *map(breakdown_table, breakdowns)])


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
        if graph.by_operator_s:
            lines.append(f"    {_operators(graph)}")
    return "\n".join(lines)


def _operators(graph: GraphTime) -> str:
    operators = sorted(graph.by_operator_s.items(), key=lambda item: -item[1])
    shown = [f"{name} {seconds / graph.seconds:.0%}" for name, seconds in operators[:_MAX_OPERATORS]]
    rest = sum(seconds for _, seconds in operators[_MAX_OPERATORS:])
    return f"{', '.join(shown)}, all others {rest / graph.seconds:.0%}"


def _kind(rate: GemmRate) -> tuple[WeightType, int, int]:
    return rate.weights, rate.inputs, rate.outputs
