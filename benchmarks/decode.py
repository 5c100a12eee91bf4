"""Our engine beside CTranslate2 on the same trained weights: latency of one sentence, saturated throughput.

    pip install ctranslate2
    python -m benchmarks.decode --student FILE.npz --testsets DIR [--quick] [--json FILE]

Both sides compute in int8 on the same student (benchmarks/student.py), greedy and with 4 beams, with and
without a shortlist (CTranslate2: its vmap). Rounds are interleaved and medians reported. Before timing, both
float32 sides must agree token by token without a shortlist.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import ctranslate2

from app.bundle import Bundle
from app.bundle.manifest import LanguagePair, Variant
from app.decoding.hypothesis import Hypothesis
from app.decoding.options import DecodingOptions
from app.decoding.search import make_search
from app.decoding.shortlist import Shortlist
from app.runtime.entry import Entry, Outcome
from app.runtime.events import SilentObserver
from app.runtime.lane import Lane
from app.runtime.onnx_model import load_model
from app.runtime.onnx_runner import OnnxRunner
from app.runtime.worker import Worker
from app.text import Tokenizer
from benchmarks.peers.ctranslate2_model import open_translator, vocabulary, write_ctranslate2_model
from benchmarks.student import read_student
from benchmarks.testsets import load
from exporters.calibration import calibrated
from exporters.checkpoint import Checkpoint
from exporters.export import ExportOptions, export_bundle, without_unknown
from exporters.quantization import quantized

_MAX_TARGET_TOKENS = 384
_CT2_BATCHES = (32, 64)
_ONE_BY_ONE = 8
"""Every so many-th sentence is translated alone for the latency."""


class Ours:
    """Our engine's parts below asyncio: workers for throughput, one lane for latency."""

    def __init__(
        self, bundle: Bundle, *, variant: Variant, shortlist: bool, num_threads: int, max_rows: int
    ) -> None:
        """Load the graphs and start the workers."""
        self._model = load_model(bundle, variant=variant, use_shortlist=shortlist)
        self._shortlist = Shortlist.load(bundle.file(str(bundle.manifest.shortlist))) if shortlist else None
        self._lane = self._make_lane(max_rows)
        self._workers = [
            Worker(f"bench-{index}", {"student": self._make_lane(max_rows)}) for index in range(num_threads)
        ]
        for worker in self._workers:
            worker.start()

    def _make_lane(self, max_rows: int) -> Lane:
        return Lane(
            "student",
            OnnxRunner(self._model, max_rows=max_rows),
            max_admission_tokens=1024,
            min_newcomers=max(1, max_rows // 4),
            observer=SilentObserver(),
        )

    def translate(self, sources: Sequence[list[int]], beam_size: int) -> list[Hypothesis]:
        """All at once, over all workers."""
        results: dict[int, Hypothesis] = {}
        done = threading.Event()

        def deliver(index: int, outcome: Outcome) -> None:
            assert isinstance(outcome.result, tuple)
            results[index] = outcome.result[0]
            if len(results) == len(sources):
                done.set()

        for index, source in enumerate(sources):
            worker = self._workers[index % len(self._workers)]
            worker.submit("student", self._entry(source, beam_size, lambda o, index=index: deliver(index, o)))
        done.wait()
        return [results[index] for index in range(len(sources))]

    def one_by_one(self, sources: Sequence[list[int]], beam_size: int) -> list[Hypothesis]:
        """One after another, in this thread."""
        results: list[Hypothesis] = []
        for source in sources:
            self._lane.add(self._entry(source, beam_size, lambda o: results.append(o.result[0])))  # type: ignore[index,arg-type]
            while self._lane.has_work:
                self._lane.tick()
        return results

    def stop(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.stop(timeout_s=10)

    def _entry(self, source: list[int], beam_size: int, deliver: Callable[[Outcome], None]) -> Entry:
        options = DecodingOptions(beam_size=beam_size)
        return Entry(
            source,
            make_search(options, eos_id=0, max_target_tokens=_MAX_TARGET_TOKENS),
            max_target_tokens=_MAX_TARGET_TOKENS,
            submitted_at_s=time.monotonic(),
            deliver=deliver,
            candidates=None if self._shortlist is None else self._shortlist.candidates(source),
        )


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
        checkpoint, bundle = _export(arguments.student, folder, calibration)
        tokenizer = Tokenizer.open(bundle.file(bundle.manifest.tokenizer), eos_id=0)
        sources = sorted(tokenizer.encode_sources(texts), key=len)
        pieces = vocabulary(checkpoint)
        _check_agreement(bundle, folder, sources[:: max(1, len(sources) // 100)], pieces)
        rows = _measure(bundle, folder, sources, pieces, num_threads=arguments.threads, num_rounds=num_rounds)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


def _export(student: Path, folder: Path, texts: Sequence[str]) -> tuple[Checkpoint, Bundle]:
    print("exporting the student, calibrated on PUD, and the same weights for CTranslate2", flush=True)
    checkpoint = quantized(without_unknown(read_student(student)))
    (folder / "tokenizer").write_bytes(checkpoint.tokenizer)
    tokenizer = Tokenizer.open(folder / "tokenizer", eos_id=0)
    bundle = export_bundle(
        calibrated(checkpoint, tokenizer.encode_sources(list(texts))),
        folder / "bundle",
        ExportOptions(
            bundle_id="student",
            pairs=[LanguagePair(source="en", target="pt")],
            licence="MPL-2.0",
            model_card="For the benchmark only.\n",
            verification_texts=texts[:20],
        ),
    )
    for quantization in (None, "int8"):
        write_ctranslate2_model(
            checkpoint, folder / f"ct2-{quantization or 'float32'}", quantization=quantization
        )
    return checkpoint, bundle


def _check_agreement(bundle: Bundle, folder: Path, sources: Sequence[list[int]], pieces: list[str]) -> None:
    translator = open_translator(folder / "ct2-float32", compute_type="float32", num_threads=1)
    ours = Ours(bundle, variant="cpu-fp32", shortlist=False, num_threads=1, max_rows=32)
    for beam_size in (1, 4):
        theirs = _ct2(
            translator, sources, pieces, beam_size=beam_size, batch_size=32, vmap=False, scores=True
        )
        found = ours.translate(sources, beam_size)
        same = sum(
            [pieces[token] for token in mine.token_ids] == other.hypotheses[0]
            and abs(mine.score - other.scores[0]) < 1e-3
            for mine, other in zip(found, theirs, strict=True)
        )
        print(
            f"float32, beam {beam_size}: {same} of {len(sources)} sentences have the same tokens and score",
            flush=True,
        )
    ours.stop()


def _ct2(
    translator: ctranslate2.Translator,
    sources: Sequence[list[int]],
    pieces: list[str],
    *,
    beam_size: int,
    batch_size: int,
    vmap: bool,
    scores: bool = False,
) -> list[ctranslate2.TranslationResult]:
    return list(
        translator.translate_batch(
            [[pieces[token] for token in source[:-1]] for source in sources],
            beam_size=beam_size,
            max_decoding_length=_MAX_TARGET_TOKENS,
            max_batch_size=batch_size,
            use_vmap=vmap,
            return_scores=scores,
        )
    )


def _measure(
    bundle: Bundle,
    folder: Path,
    sources: list[list[int]],
    pieces: list[str],
    *,
    num_threads: int,
    num_rounds: int,
) -> list[dict[str, object]]:
    one = open_translator(folder / "ct2-int8", compute_type="int8", num_threads=1)
    many = open_translator(folder / "ct2-int8", compute_type="int8", num_threads=num_threads)
    engines = {
        shortlist: Ours(bundle, variant="cpu-int8", shortlist=shortlist, num_threads=num_threads, max_rows=32)
        for shortlist in (False, True)
    }
    longest_first = sources[::-1]
    alone = sources[::_ONE_BY_ONE]

    def theirs_alone(beam_size: int, vmap: bool) -> int:
        return sum(
            len(result.hypotheses[0]) + 1
            for source in alone
            for result in _ct2(one, [source], pieces, beam_size=beam_size, batch_size=1, vmap=vmap)
        )

    def theirs_together(beam_size: int, vmap: bool, batch_size: int) -> int:
        results = _ct2(many, longest_first, pieces, beam_size=beam_size, batch_size=batch_size, vmap=vmap)
        return sum(len(result.hypotheses[0]) + 1 for result in results)

    contests = []
    for shortlist, engine in engines.items():
        suffix = ", shortlist" if shortlist else ""
        for beam_size in (1, 4):
            kind = "greedy" if beam_size == 1 else "beam 4"
            contests.append(
                Contest(
                    f"{kind}, one sentence, 1 thread{suffix}",
                    lambda e=engine, k=beam_size: _tokens(e.one_by_one(alone, k)),  # type: ignore[misc]
                    [lambda k=beam_size, v=shortlist: theirs_alone(k, v)],  # type: ignore[misc]
                )
            )
            contests.append(
                Contest(
                    f"{kind}, saturated, {num_threads} threads{suffix}",
                    lambda e=engine, k=beam_size: _tokens(e.translate(longest_first, k)),  # type: ignore[misc]
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
        ours = statistics.median(round_[0] for round_ in rounds[1:])
        theirs = max(statistics.median(round_[i] for round_ in rounds[1:]) for i in range(1, len(rounds[0])))
        ratio = statistics.median(round_[0] / max(round_[1:]) for round_ in rounds[1:])
        print(f"{name:45s} {ours:8.0f} {theirs:12.0f} {ratio:6.2f}", flush=True)
        rows.append(
            {"what": name, "ours": round(ours), "ctranslate2": round(theirs), "ratio": round(ratio, 2)}
        )
    for engine in engines.values():
        engine.stop()
    return rows


def _tokens(hypotheses: Sequence[Hypothesis]) -> int:
    return sum(hypothesis.num_decoded for hypothesis in hypotheses)


def _rate(run: Callable[[], int]) -> float:
    started_at_s = time.perf_counter()
    num_tokens = run()
    return num_tokens / (time.perf_counter() - started_at_s)


if __name__ == "__main__":
    main()
