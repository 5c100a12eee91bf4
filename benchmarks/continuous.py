"""Sentences that arrive one by one, at random times, at 80 % of what the engine can do.

    python -m benchmarks.continuous --testsets DIR [--bundle DIR] [--share 0.8] [--json FILE]

Measured is the engine below asyncio (benchmarks/local_engine.py), not the service: the rate that sets the
pace then comes from the very same code, and what is left is what arriving unannounced costs. What HTTP,
segmentation and tokenisation add is measured by benchmarks.service.

Arrivals are a Poisson process with a fixed seed. What the engine can do, its capacity, is the rate of
sentences in random order where work never runs out. The sentences that arrive are also translated longest
first, all at once (the offline rate); in order of arrival, all at once; and one at a time (their unloaded
latency). At 80 % the pace itself limits the tokens a second, so the paced run is judged by its latency and by
the tokens it makes of a CPU second.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from app.bundle import default_directory, open_bundle
from app.decoding.options import DecodingOptions
from app.runtime.entry import Outcome
from app.text import Tokenizer
from benchmarks.contest import Run, timed
from benchmarks.latency import BucketLatency, Sample, by_bucket, poisson_arrivals
from benchmarks.local_engine import LocalEngine, hypotheses_of, num_tokens
from benchmarks.machine import num_usable_cores, this_machine
from benchmarks.testsets import load

_SEED = 7
_NUM_DISTINCT = 200
"""Distinct sentences; each one's unloaded latency is measured, so that it can be compared with itself."""
_DURATION_S = 40.0
_NUM_FULL_PASSES = 5
"""Over the distinct sentences, to find the capacity: long enough that beginning and end count for little."""
_NUM_UNLOADED_RUNS = 2
_ANSWER_LIMIT_S = 120.0


@dataclass(frozen=True)
class Arrival:
    """One sentence of the paced run.

    Attributes:
        at_s: seconds after the start.
        source: token ids.
    """

    at_s: float
    source: Sequence[int]


@dataclass(frozen=True)
class ContinuousFigures:
    """What was measured; rates in target tokens.

    Attributes:
        capacity_per_s: sentences a second, in random order, where work never runs out.
        num_arrivals: sentences of each run.
        sorted_offline: all at once, longest first.
        unsorted_offline: all at once, in order of arrival.
        paced: at their times of arrival, until the last answer.
        unsorted_share: tokens a second of `unsorted_offline` by those of `sorted_offline`.
        paced_share: likewise of `paced`; the pace's share is the most it can be.
        paced_cpu_share: tokens a CPU second of `paced` by those of `sorted_offline`.
        latency: by source length, under the paced load.
    """

    capacity_per_s: float
    num_arrivals: int
    sorted_offline: Run
    unsorted_offline: Run
    paced: Run
    unsorted_share: float
    paced_share: float
    paced_cpu_share: float
    latency: list[BucketLatency]


class _Answers:
    """Outcomes by index and when they came; filled from worker threads."""

    def __init__(self, count: int) -> None:
        self._outcomes: list[Outcome | None] = [None] * count
        self.at_s = [0.0] * count
        self._arrived = threading.Semaphore(0)

    def receiver(self, index: int) -> Callable[[Outcome], None]:
        def receive(outcome: Outcome) -> None:
            self.at_s[index] = time.perf_counter()
            self._outcomes[index] = outcome
            self._arrived.release()

        return receive

    def wait(self) -> int:
        """Wait for all; returns their target tokens, or raises the first failure."""
        for _ in self._outcomes:
            if not self._arrived.acquire(timeout=_ANSWER_LIMIT_S):
                raise TimeoutError(f"no answer came for {_ANSWER_LIMIT_S:.0f} s")
        return num_tokens([hypotheses_of(outcome) for outcome in self._outcomes if outcome is not None])


class ContinuousBenchmark:
    """The runs over one engine."""

    def __init__(self, engine: LocalEngine, options: DecodingOptions, *, max_target_tokens: int) -> None:
        """Take a started engine."""
        self._engine = engine
        self._options = options
        self._max_target_tokens = max_target_tokens

    def measure(
        self, sources: Sequence[Sequence[int]], *, share: float, duration_s: float
    ) -> ContinuousFigures:
        """Every run over the same sentences.

        Args:
            sources: distinct sentences, in random order.
            share: of the capacity at which they arrive.
            duration_s: seconds of arrivals.
        """
        capacity_per_s = self._capacity_per_s(sources)
        arrivals = _draw(sources, rate_per_s=share * capacity_per_s, duration_s=duration_s)
        in_order = [arrival.source for arrival in arrivals]
        sorted_offline = self._all_at_once(sorted(in_order, key=len, reverse=True))
        unsorted_offline = self._all_at_once(in_order)
        unloaded_s = {tuple(source): self._alone_s(source) for source in sources}
        paced, loaded_s = self._paced(arrivals)
        samples = [
            Sample(len(source), latency_s, unloaded_s[tuple(source)])
            for source, latency_s in zip(in_order, loaded_s, strict=True)
        ]
        return ContinuousFigures(
            capacity_per_s=capacity_per_s,
            num_arrivals=len(arrivals),
            sorted_offline=sorted_offline,
            unsorted_offline=unsorted_offline,
            paced=paced,
            unsorted_share=_rate(unsorted_offline) / _rate(sorted_offline),
            paced_share=_rate(paced) / _rate(sorted_offline),
            paced_cpu_share=_cpu_rate(paced) / _cpu_rate(sorted_offline),
            latency=by_bucket(samples),
        )

    def _capacity_per_s(self, sources: Sequence[Sequence[int]]) -> float:
        """The better of two runs: the first also touches memory that the runner has reserved."""
        choice = random.Random(_SEED)
        mixed = [source for _ in range(_NUM_FULL_PASSES) for source in choice.sample(sources, len(sources))]
        return max(len(mixed) / self._all_at_once(mixed).wall_s for _ in range(2))

    def _all_at_once(self, sources: Sequence[Sequence[int]]) -> Run:
        def work() -> int:
            return num_tokens(
                self._engine.translate(sources, self._options, max_target_tokens=self._max_target_tokens)
            )

        return timed(work)

    def _alone_s(self, source: Sequence[int]) -> float:
        """The least of a few tries: a neighbour on the machine can only add to it."""
        return min(self._paced([Arrival(0.0, source)])[1][0] for _ in range(_NUM_UNLOADED_RUNS))

    def _paced(self, arrivals: Sequence[Arrival]) -> tuple[Run, list[float]]:
        """Submit each at its time; returns the run and each sentence's seconds from arrival to answer.

        A sentence submitted late, because this thread was kept waiting, has been waiting since its time.
        """
        answers = _Answers(len(arrivals))
        started_at_s = time.perf_counter()

        def work() -> int:
            for index, arrival in enumerate(arrivals):
                time.sleep(max(0.0, started_at_s + arrival.at_s - time.perf_counter()))
                self._engine.submit(
                    arrival.source,
                    self._options,
                    max_target_tokens=self._max_target_tokens,
                    deliver=answers.receiver(index),
                )
            return answers.wait()

        run = timed(work)
        latencies_s = [
            answered_at_s - started_at_s - arrival.at_s
            for arrival, answered_at_s in zip(arrivals, answers.at_s, strict=True)
        ]
        return run, latencies_s


def _draw(sources: Sequence[Sequence[int]], *, rate_per_s: float, duration_s: float) -> list[Arrival]:
    """Poisson arrivals of the sentences, in a new random order each time all were used."""
    choice = random.Random(_SEED)
    order: list[Sequence[int]] = []
    arrivals = []
    for at_s in poisson_arrivals(rate_per_s, duration_s, seed=_SEED):
        if not order:
            order = choice.sample(sources, len(sources))
        arrivals.append(Arrival(at_s, order.pop()))
    return arrivals


def _rate(run: Run) -> float:
    return run.num_tokens / run.wall_s


def _cpu_rate(run: Run) -> float:
    return run.num_tokens / run.cpu_s


def _table(figures: ContinuousFigures) -> str:
    lines = [
        f"capacity: {figures.capacity_per_s:.0f} sentences/s",
        f"{figures.num_arrivals} arrivals            tokens/s  tokens/CPU-s  of sorted offline",
    ]
    for name, run, share in (
        ("longest first, all at once", figures.sorted_offline, 1.0),
        ("as they arrive, all at once", figures.unsorted_offline, figures.unsorted_share),
        ("at their times", figures.paced, figures.paced_share),
    ):
        lines.append(f"{name:28s} {_rate(run):8.0f} {_cpu_rate(run):13.0f} {share:18.1%}")
    lines += [
        f"CPU efficiency at their times, of sorted offline: {figures.paced_cpu_share:.1%}",
        "",
        f"{'':20s} {'under load, ms':>15s} {'alone, ms':>15s} {'p99':>7s} {'slowdown':>9s}",
        f"{'source tokens':14s} {'n':>5s}" + f" {'p50':>7s} {'p99':>7s}" * 2 + f" {'ratio':>7s} {'p99':>9s}",
    ]
    lines += [
        f"{row.bucket:14s} {row.num_sentences:5d} {row.loaded_p50_s * 1e3:7.0f} "
        f"{row.loaded_p99_s * 1e3:7.0f} {row.unloaded_p50_s * 1e3:7.0f} {row.unloaded_p99_s * 1e3:7.0f} "
        f"{row.p99_ratio:7.2f} {row.slowdown_p99:9.2f}"
        for row in figures.latency
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--testsets", type=Path, required=True, help="folder with flores200-dev")
    parser.add_argument("--bundle", type=Path, default=default_directory() / "en-pt", help="an EN-PT bundle")
    parser.add_argument("--share", type=float, default=0.8, help="of the capacity")
    parser.add_argument("--duration", type=float, default=_DURATION_S, help="seconds of arrivals")
    parser.add_argument("--beams", type=int, default=1)
    parser.add_argument("--no-shortlist", action="store_true")
    parser.add_argument("--threads", type=int, default=num_usable_cores())
    parser.add_argument("--rows", type=int, default=64, help="rows of a row group")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()

    machine = this_machine()
    bundle = open_bundle(arguments.bundle)
    manifest = bundle.manifest
    tokenizer = Tokenizer.open(bundle.file(manifest.tokenizer), eos_id=manifest.tokens.eos_id)
    texts = load(arguments.testsets, "flores200-dev", source="en", target="pt").sources
    sources = tokenizer.encode_sources(random.Random(_SEED).sample(texts, _NUM_DISTINCT))
    use_shortlist = manifest.shortlist is not None and not arguments.no_shortlist
    print(
        f"{machine.line()}\n{manifest.id}, {arguments.beams} beam(s), {arguments.threads} thread(s), "
        f"{'with' if use_shortlist else 'without'} shortlist, at {arguments.share:.0%} of the capacity\n",
        flush=True,
    )
    engine = LocalEngine.open(
        bundle, use_shortlist=use_shortlist, num_threads=arguments.threads, max_rows=arguments.rows
    )
    with engine:
        figures = ContinuousBenchmark(
            engine,
            DecodingOptions(beam_size=arguments.beams),
            max_target_tokens=manifest.limits.max_target_tokens,
        ).measure(sources, share=arguments.share, duration_s=arguments.duration)
    print(_table(figures))
    if arguments.json:
        command = {key: str(value) for key, value in vars(arguments).items()}
        found = {"machine": asdict(machine), "command": command, "figures": asdict(figures)}
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
