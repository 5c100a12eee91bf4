"""Our engine beside CTranslate2 on the same trained weights: latency of one sentence, saturated throughput.

    pip install ctranslate2
    python -m benchmarks.decode --student FILE.npz --testsets DIR [--quick] [--json FILE]

Both sides compute in int8 on the same student (benchmarks/student.py), greedy and with 4 beams, with and
without a shortlist (CTranslate2: its vmap). Rounds are interleaved and medians reported. Before timing, both
float32 sides must agree token by token without a shortlist.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.decoding.options import DecodingOptions
from benchmarks.local_engine import Hypotheses, LocalEngine, num_tokens
from benchmarks.peers.ctranslate2_engine import CTranslate2Engine
from benchmarks.peers.ctranslate2_model import vocabulary
from benchmarks.student import read_student
from benchmarks.testsets import load
from benchmarks.twin_models import MAX_TARGET_TOKENS, TwinModels, export_student

_CT2_BATCHES = (32, 64)
_ONE_BY_ONE = 8
"""Every so many-th sentence is translated alone for the latency."""


@dataclass(frozen=True)
class Contest:
    """One thing both sides do; each callable returns the target tokens it made."""

    name: str
    ours: Callable[[], int]
    theirs: Sequence[Callable[[], int]]


def main() -> None:
    """Export, check that the sides agree, time them, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--student", type=Path, required=True, help="the student's .npz")
    parser.add_argument(
        "--testsets", type=Path, required=True, help="folder with flores200-dev.en and pud.en"
    )
    parser.add_argument("--quick", action="store_true", help="fewer sentences and rounds: a few minutes")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()

    texts = load(arguments.testsets, "flores200-dev", source="en", target="pt").sources
    texts = texts[:250] if arguments.quick else texts
    num_rounds = 3 if arguments.quick else 5
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        calibration = load(arguments.testsets, "pud", source="en", target="pt").sources[:200]
        print("exporting the student, calibrated on PUD, and the same weights for CTranslate2", flush=True)
        twins = export_student(read_student(arguments.student), folder, calibration)
        sources = sorted(twins.tokenizer.encode_sources(texts), key=len)
        _check_agreement(twins, sources[:: max(1, len(sources) // 100)])
        rows = _measure(twins, sources, num_threads=arguments.threads, num_rounds=num_rounds)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


def _check_agreement(twins: TwinModels, sources: Sequence[list[int]]) -> None:
    peer = CTranslate2Engine(twins.ctranslate2_float32, vocabulary(twins.checkpoint), compute_type="float32")
    with LocalEngine.open(twins.bundle, variant="cpu-fp32") as engine:
        for beam_size in (1, 4):
            theirs = peer.translate(sources, beam_size=beam_size, scores=True)
            found = engine.translate(
                sources, DecodingOptions(beam_size=beam_size), max_target_tokens=MAX_TARGET_TOKENS
            )
            same = sum(
                mine.token_ids == other.token_ids and abs(mine.score - (other.score or 0.0)) < 1e-3
                for (mine, *_), (other, *_) in zip(found, theirs, strict=True)
            )
            print(
                f"float32, beam {beam_size}: {same} of {len(sources)} sentences have equal tokens and score",
                flush=True,
            )


def _measure(
    twins: TwinModels, sources: list[list[int]], *, num_threads: int, num_rounds: int
) -> list[dict[str, object]]:
    with contextlib.ExitStack() as stack:
        engines = {
            shortlist: stack.enter_context(
                LocalEngine.open(twins.bundle, use_shortlist=shortlist, num_threads=num_threads)
            )
            for shortlist in (False, True)
        }
        return _compete(twins, engines, sources, num_threads=num_threads, num_rounds=num_rounds)


def _compete(
    twins: TwinModels,
    engines: Mapping[bool, LocalEngine],
    sources: list[list[int]],
    *,
    num_threads: int,
    num_rounds: int,
) -> list[dict[str, object]]:
    pieces = vocabulary(twins.checkpoint)
    one, many = (
        {
            vmap: CTranslate2Engine(twins.ctranslate2_int8, pieces, num_threads=number, use_vmap=vmap)
            for vmap in (False, True)
        }
        for number in (1, num_threads)
    )
    longest_first = sources[::-1]
    alone = sources[::_ONE_BY_ONE]

    def theirs_alone(beam_size: int, vmap: bool) -> int:
        return sum(
            len(result.hypotheses[0]) + 1
            for tokens in one[vmap].tokens_of(alone)
            for result in one[vmap].translate_raw([tokens], beam_size=beam_size, batch_size=1)
        )

    def theirs_together(beam_size: int, vmap: bool, batch_size: int) -> int:
        tokens = many[vmap].tokens_of(longest_first)
        results = many[vmap].translate_raw(tokens, beam_size=beam_size, batch_size=batch_size)
        return sum(len(result.hypotheses[0]) + 1 for result in results)

    def ours(translate: Callable[..., list[Hypotheses]], chosen: list[list[int]], beam_size: int) -> int:
        options = DecodingOptions(beam_size=beam_size)
        return num_tokens(translate(chosen, options, max_target_tokens=MAX_TARGET_TOKENS))

    contests = []
    for shortlist, engine in engines.items():
        suffix = ", shortlist" if shortlist else ""
        for beam_size in (1, 4):
            kind = "greedy" if beam_size == 1 else "beam 4"
            contests.append(
                Contest(
                    f"{kind}, one sentence, 1 thread{suffix}",
                    lambda e=engine, k=beam_size: ours(e.one_by_one, alone, k),  # type: ignore[misc]
                    [lambda k=beam_size, v=shortlist: theirs_alone(k, v)],  # type: ignore[misc]
                )
            )
            contests.append(
                Contest(
                    f"{kind}, saturated, {num_threads} threads{suffix}",
                    lambda e=engine, k=beam_size: ours(e.translate, longest_first, k),  # type: ignore[misc]
                    [
                        lambda k=beam_size, v=shortlist, b=batch: theirs_together(k, v, b)  # type: ignore[misc]
                        for batch in _CT2_BATCHES
                    ],
                )
            )
    rates: dict[str, list[list[float]]] = {}
    for _ in range(num_rounds + 1):  # the first round only warms up
        for contest in contests:
            runs = [contest.ours, *contest.theirs]
            rates.setdefault(contest.name, []).append([_rate(run) for run in runs])
    rows: list[dict[str, object]] = []
    print(f"\n{'target tokens/s':45s} {'ours':>8s} {'CTranslate2':>12s} {'ratio':>6s}")
    for name, rounds in rates.items():
        mine = statistics.median(round_[0] for round_ in rounds[1:])
        theirs = max(statistics.median(round_[i] for round_ in rounds[1:]) for i in range(1, len(rounds[0])))
        ratio = statistics.median(round_[0] / max(round_[1:]) for round_ in rounds[1:])
        print(f"{name:45s} {mine:8.0f} {theirs:12.0f} {ratio:6.2f}", flush=True)
        rows.append(
            {"what": name, "ours": round(mine), "ctranslate2": round(theirs), "ratio": round(ratio, 2)}
        )
    return rows


def _rate(run: Callable[[], int]) -> float:
    started_at_s = time.perf_counter()
    made = run()
    return made / (time.perf_counter() - started_at_s)


if __name__ == "__main__":
    main()
