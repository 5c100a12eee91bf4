"""The table that `benchmarks.gpu_check` prints."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu_plan import GpuReport
from benchmarks.gpu_speed import Rate, Shares

_MIB = 1 << 20


def gpu_table(report: GpuReport) -> str:
    """Every figure, one a line; what is missing is a line too."""
    return "\n".join(_lines(report))


def _lines(report: GpuReport) -> Iterator[str]:
    facts = report.facts
    yield report.machine.line()
    details = [facts.name, f"driver for CUDA {facts.driver}" if facts.driver else "", facts.onnxruntime]
    yield f"{facts.device}: {', '.join(detail for detail in details if detail)}"
    yield ""
    for name, step in report.steps.items():
        yield _line(
            f"{name}: greedy steps as cpu-fp32",
            f"{step.num_equal} of {step.num_steps}, log-probabilities within {step.max_difference:.4f}",
            step.passed,
        )
    for name, whole in report.sentences.items():
        yield _line(f"{name}: whole sentences as cpu-fp32", f"{whole.num_equal} of {whole.num_sentences}")
    for name, alone in report.alone.items():
        yield _line(
            f"{name}: the same alone and in company",
            f"{alone.num_equal} of {alone.num_sentences}, scores within {alone.max_score_difference:.4f}",
            alone.passed,
        )
    if report.peaks is not None:
        peaks = report.peaks
        yield _line(
            "peaks through onnxruntime",
            f"{peaks.flop_per_s / 1e12:.4g} TFLOP/s fp16, {peaks.bytes_per_s / 1e9:.4g} GB/s",
        )
    if report.latency is not None:
        latency = report.latency
        yield _line("one sentence of 25 tokens", f"p50 {latency.p50_ms:.2f} ms, p95 {latency.p95_ms:.2f} ms")
    shares: list[Shares | None] = [*report.shares]
    shares += [None] * (len(report.rates) - len(shares))
    for rate, share in zip(report.rates, shares, strict=True):
        yield _line(f"{report.size}, {_kind(rate)}", f"{rate.tokens_per_s:,.0f} tokens/s{_shares(share)}")
    for rate in report.without_graphs:
        gain = _gain(report, rate)
        yield _line(
            f"{report.size}, {_kind(rate)}, no CUDA graphs",
            f"{rate.tokens_per_s:,.0f} tokens/s" + (f"; graphs gain {gain:.2f}x" if gain else ""),
        )
    for peer in report.peers:
        kind = "greedy" if peer.beam_size == 1 else f"beam {peer.beam_size}"
        yield _line(
            f"{peer.engine}, {kind}, {peer.num_sentences} sentences", f"{peer.tokens_per_s:,.0f} tokens/s"
        )
    for what, used in report.used_bytes.items():
        yield _line(f"GPU memory, {what}", f"{used / _MIB:,.0f} MiB")
    for what, used in report.row_bytes.items():
        yield _line(f"row slots, {what}", f"{used / _MIB:,.1f} MiB")
    for what, why in report.missing.items():
        yield _line(what, f"not measured: {why}")
    for what, why in report.failed.items():
        yield _line(what, f"FAILED: {why}")
    yield ""
    yield f"{report.elapsed_s:.0f} s in all; " + (
        f"NOT RIGHT: {', '.join(report.wrong)}" if report.wrong else "every check of tokens holds"
    )


def _line(what: str, found: str, passed: bool | None = None) -> str:
    verdict = {None: "", True: "  (holds)", False: "  (DOES NOT HOLD)"}[passed]
    return f"{what:52s} {found}{verdict}"


def _kind(rate: Rate) -> str:
    if rate.beam_size == 1:
        return f"greedy, {rate.num_sentences} rows"
    return f"beam {rate.beam_size}, {rate.num_sentences * rate.beam_size} rows"


def _shares(share: Shares | None) -> str:
    if share is None:
        return ""
    return f", {share.bandwidth:.1%} of the bandwidth, {share.compute:.1%} of the fp16 peak"


def _gain(report: GpuReport, without: Rate) -> float | None:
    """How much faster the same is with CUDA graphs."""
    same = [
        rate
        for rate in report.rates
        if (rate.num_sentences, rate.beam_size) == (without.num_sentences, without.beam_size)
    ]
    return same[0].tokens_per_s / without.tokens_per_s if same else None
