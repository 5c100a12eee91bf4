"""Our engine beside CTranslate2 on the same weights, and how near it comes to what the CPU can do.

    pip install ctranslate2
    python -m benchmarks.decode --student FILE.npz --testsets DIR [--quick] [--json FILE]

Two models: a trained student (benchmarks/student.py) on real sentences, and one of the base size with random
weights that never ends, so that both sides make exactly as many tokens. Both sides compute in int8, greedy
and with 4 beams, one sentence on one thread and everything at once on all threads, the student also with a
shortlist (CTranslate2: its vmap). CTranslate2 runs in a process of its own, in the best of its settings.
Rounds are interleaved, figures are medians, and before all that both float32 sides are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.breakdown import Breakdown, Setting, observe
from benchmarks.contest import Contest, ContestResult, compete
from benchmarks.contests import BEAM_SIZES, Sides, count_of_threads
from benchmarks.equal_tokens import Equality, compare_float32
from benchmarks.gemm_peak import GemmRates, WeightType, measure_gemm
from benchmarks.local_engine import LocalEngine
from benchmarks.machine import Machine, num_usable_cores, this_machine
from benchmarks.peak_share import ROW_COUNTS, PeakShare, peak_shares, shapes_to_measure
from benchmarks.peers.ctranslate2_model import vocabulary
from benchmarks.peers.tuning import TunedCTranslate2
from benchmarks.report import breakdown_tables, contest_table, gemm_table, peak_table, tuning_lines
from benchmarks.subjects import FULL, QUICK, Plan, Subject, base_subject, student_subject


@dataclass(frozen=True)
class Report:
    """Everything that was measured."""

    machine: Machine
    command: dict[str, str]
    equalities: list[Equality]
    contests: list[ContestResult]
    gemm: GemmRates
    peak_shares: list[PeakShare]
    breakdowns: list[Breakdown]
    elapsed_s: float


def main() -> None:
    """Export, check that the sides agree, time them, look inside, print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--student", type=Path, required=True, help="the student's .npz")
    parser.add_argument("--testsets", type=Path, required=True, help="folder with flores200-dev and pud")
    parser.add_argument("--quick", action="store_true", help="fewer sentences and rounds: under 10 minutes")
    parser.add_argument("--json", type=Path, help="write every figure here")
    parser.add_argument("--threads", type=int, default=num_usable_cores(), help="of everything at once")
    parser.add_argument("--rows", type=int, default=64, help="rows of a row group of ours")
    arguments = parser.parse_args()
    started_at_s = time.monotonic()
    plan = QUICK if arguments.quick else FULL
    machine = this_machine()
    print(machine.line(), flush=True)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _progress("exporting the student for both sides")
        student = student_subject(arguments.student, arguments.testsets, folder / "student", plan)
        _progress("exporting the random model of the base size for both sides")
        subjects = [student, base_subject(folder / "base", plan)]
        _progress("comparing both sides in float32")
        equalities = [
            compare_float32(subject.name, subject.twins, subject.compared, beam_size=beam_size)
            for subject in subjects
            for beam_size in BEAM_SIZES
        ]
        for equality in equalities:
            print(
                f"float32, {equality.model}, beam {equality.beam_size}: {equality.num_equal} of "
                f"{equality.num_sentences} sentences have equal tokens and scores",
                flush=True,
            )
        contests = _contests(subjects, machine, plan, num_threads=arguments.threads, max_rows=arguments.rows)
        _say(f"{contest_table(contests)}\n\nCTranslate2's settings\n{tuning_lines(contests)}")
        _progress("measuring the integer matrix product")
        gemm = measure_gemm(
            shapes_to_measure([subject.twins.bundle.manifest for subject in subjects]),
            ROW_COUNTS,
        )
        _say(f"GFLOP/s of the integer matrix product, uint8 activations, one thread\n{gemm_table(gemm)}")
        breakdowns, shares = _look_inside(
            subjects, machine, gemm, num_threads=arguments.threads, max_rows=arguments.rows
        )
    _say(peak_table(shares))
    _say(breakdown_tables(breakdowns))
    elapsed_s = time.monotonic() - started_at_s
    print(f"{elapsed_s:.0f} s in all")
    if arguments.json:
        command = {key: str(value) for key, value in vars(arguments).items()}
        report = Report(machine, command, equalities, contests, gemm, shares, breakdowns, elapsed_s)
        arguments.json.write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")


def _contests(
    subjects: Sequence[Subject], machine: Machine, plan: Plan, *, num_threads: int, max_rows: int
) -> list[ContestResult]:
    results: list[ContestResult] = []
    for subject in subjects:
        with contextlib.ExitStack() as stack:
            _progress(f"{subject.name}: tuning CTranslate2")
            peer = stack.enter_context(TunedCTranslate2(machine))
            contests: list[Contest] = []
            for shortlist in subject.shortlist_choices:
                engine = LocalEngine.open(
                    subject.twins.bundle, use_shortlist=shortlist, num_threads=num_threads, max_rows=max_rows
                )
                sides = Sides(
                    ours=stack.enter_context(engine),
                    peer=peer,
                    peer_folder=subject.twins.ctranslate2_int8,
                    pieces=vocabulary(subject.twins.checkpoint),
                    num_threads=num_threads,
                    shortlist=shortlist,
                )
                for beam_size in BEAM_SIZES:
                    contests.append(sides.alone(subject.name, subject.alone, beam_size=beam_size))
                    contests += [
                        sides.saturated(
                            " ".join(filter(None, [subject.name, kind])), work, beam_size=beam_size
                        )
                        for kind, work in subject.saturated.items()
                    ]
            _progress(f"{subject.name}: {len(contests)} contests")
            results += compete(contests, num_rounds=plan.num_rounds, progress=_progress)
    return results


def _look_inside(
    subjects: Sequence[Subject], machine: Machine, gemm: GemmRates, *, num_threads: int, max_rows: int
) -> tuple[list[Breakdown], list[PeakShare]]:
    weights: WeightType = "int8" if machine.vnni else "uint8"
    breakdowns: list[Breakdown] = []
    shares: list[PeakShare] = []
    variations = [(subject, choice) for subject in subjects for choice in subject.shortlist_choices]
    for subject, shortlist in variations:
        suffix = ", shortlist" if shortlist else ""
        _progress(f"{subject.name}{suffix}: breakdown")
        loads = dict.fromkeys([("one sentence", 1), ("saturated", 1), ("saturated", num_threads)])
        for load, threads in loads:
            setting = Setting(
                name=f"greedy, {subject.name}, {load}, {count_of_threads(threads)}{suffix}",
                bundle=subject.twins.bundle,
                workload=subject.alone if load == "one sentence" else subject.profiled,
                use_shortlist=shortlist,
                alone=load == "one sentence",
                num_threads=threads,
                max_rows=max_rows,
            )
            # Where one thread's time goes is seen undisturbed; with all threads, what their lock costs.
            observation = observe(setting, by_operator=threads == 1)
            breakdowns.append(observation.breakdown)
            if threads == 1 and not shortlist:
                shares += peak_shares(setting, observation, gemm, weights)
    return breakdowns, shares


def _progress(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def _say(text: str) -> None:
    print(f"\n{text}\n", flush=True)


if __name__ == "__main__":
    main()
