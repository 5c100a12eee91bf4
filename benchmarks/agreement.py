"""Our float32 engine against CTranslate2's on the same weights: the same tokens, the same scores.

    pip install ctranslate2
    python -m benchmarks.agreement --student FILE.npz --testsets DIR [--num 500] [--part 1/4]

Real sentences (FLORES-200 dev) are translated by both, without a shortlist, in every setting of `SETTINGS`,
and all hypotheses of a sentence are compared. Two float32 implementations add in different orders, so where
two continuations are equally probable they may part. Every difference is therefore put before a third
opinion, the PyTorch model in float64, which says by how much the two continuations differ, and searches for
itself, deciding near-ties both ways: a difference is a rounding tie when each side's answer is one that the
search gives with some near-ties decided one way or the other, and a fault otherwise. A fault ends the
program with status 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ctranslate2
import torch

from app.decoding.options import DecodingOptions
from benchmarks.float64_search import Float64Search
from benchmarks.local_engine import Hypotheses, LocalEngine
from benchmarks.parts import Part
from benchmarks.peers.ctranslate2_model import open_translator, vocabulary
from benchmarks.student import read_student
from benchmarks.testsets import load
from benchmarks.twin_models import MAX_TARGET_TOKENS, TwinModels, export_student
from benchmarks.verdict import Found, Judge, first_difference

_NUM_CALIBRATION_TEXTS = 20
"""The export wants some; the float32 graphs do not use the scales."""
_BATCH_SIZE = 32


@dataclass(frozen=True)
class Setting:
    """What both sides are asked for; another option is compared by adding a setting to `SETTINGS`.

    Attributes:
        name: shown in the table.
        ours: our options.
        theirs: the same as keyword arguments of ``ctranslate2.Translator.translate_batch``.
    """

    name: str
    ours: DecodingOptions
    theirs: Mapping[str, Any] = field(default_factory=dict)


def _beams(name: str, beam_size: int, num_hypotheses: int = 1, **changes: float) -> Setting:
    """A setting whose options have the same names on both sides."""
    return Setting(
        name,
        DecodingOptions(beam_size=beam_size, num_hypotheses=num_hypotheses, **changes),  # type: ignore[arg-type]
        {"beam_size": beam_size, "num_hypotheses": num_hypotheses, **changes},
    )


SETTINGS: Sequence[Setting] = (
    Setting("greedy", DecodingOptions(), {"beam_size": 1}),
    _beams("beam 4", 4),
    _beams("beam 4, 4 hypotheses", 4, 4),
    _beams("beam 4, 4 hypotheses, length penalty 0", 4, 4, length_penalty=0.0),
    _beams("beam 4, length penalty 0", 4, length_penalty=0.0),
    _beams("beam 4, 4 hypotheses, length penalty 0.6", 4, 4, length_penalty=0.6),
    _beams("beam 4, 4 hypotheses, length penalty 2", 4, 4, length_penalty=2.0),
    _beams("beam 4, 4 hypotheses, patience 2", 4, 4, patience=2.0),
    _beams("beam 3, 2 hypotheses, patience 1.5, length penalty 0.6", 3, 2, patience=1.5, length_penalty=0.6),
    _beams("beam 8, 8 hypotheses", 8, 8),
)
_ALWAYS: Mapping[str, Any] = {
    "max_decoding_length": MAX_TARGET_TOKENS,
    "max_batch_size": _BATCH_SIZE,
    "return_scores": True,
    # Its default forbids an empty translation; ours does not.
    "min_decoding_length": 0,
}


@dataclass
class Tally:
    """What came of one setting; the score difference is over hypotheses with the same tokens."""

    num_same: int = 0
    num_ties: int = 0
    num_faults: int = 0
    max_score_difference: float = 0.0


def compare(
    setting: Setting,
    engine: LocalEngine,
    translator: ctranslate2.Translator,
    sources: Sequence[Sequence[int]],
    pieces: Sequence[str],
    judge: Judge,
) -> Tally:
    """Translate with both sides and print every difference."""
    id_of = {piece: index for index, piece in enumerate(pieces)}
    results = translator.translate_batch(
        [[pieces[token] for token in source[:-1]] for source in sources], **{**_ALWAYS, **setting.theirs}
    )
    found = engine.translate(sources, setting.ours, max_target_tokens=MAX_TARGET_TOKENS)
    tally = Tally()
    for index, (hypotheses, result) in enumerate(zip(found, results, strict=True)):
        ours = _ours(hypotheses)
        theirs = [
            Found(tuple(id_of[piece] for piece in target), score)
            for target, score in zip(result.hypotheses, result.scores, strict=True)
        ]
        tally.max_score_difference = max(
            [tally.max_score_difference]
            + [
                abs(a.score - b.score)
                for a, b in zip(ours, theirs, strict=False)
                if a.token_ids == b.token_ids
            ]
        )
        difference = first_difference(ours, theirs)
        if difference is None:
            tally.num_same += 1
            continue
        is_tie, lines = judge.explain(
            sources[index], setting.ours, difference, {"ours": ours, "theirs": theirs}
        )
        tally.num_ties += is_tie
        tally.num_faults += not is_tie
        print(f"{setting.name}: sentence {index}: {'tie' if is_tie else 'FAULT'}")
        print("\n".join(f"    {line}" for line in lines), flush=True)
    return tally


def _ours(hypotheses: Hypotheses) -> list[Found]:
    return [Found(hypothesis.token_ids, hypothesis.score) for hypothesis in hypotheses]


def main() -> int:
    """Export both models, compare every setting, print a table; 1 when there was a fault."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--student", type=Path, required=True, help="the student's .npz")
    parser.add_argument(
        "--testsets", type=Path, required=True, help="folder with flores200-dev.en and .pt_BR"
    )
    parser.add_argument("--num", type=int, default=500, help="sentences, the first of the set")
    parser.add_argument("--only", default="", help="only settings whose name contains this")
    parser.add_argument(
        "--part", type=Part.parse, default=Part(1, 1), help="I/N: every N-th setting from the I-th on"
    )
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()

    settings = arguments.part.of([setting for setting in SETTINGS if arguments.only in setting.name])
    if not settings:
        parser.error(f"this part has no setting whose name contains {arguments.only!r}")
    torch.set_num_threads(arguments.threads)
    texts = load(arguments.testsets, "flores200-dev", source="en", target="pt").sources[: arguments.num]
    print("exporting the student for both sides", flush=True)
    with tempfile.TemporaryDirectory() as name:
        twins = export_student(
            read_student(arguments.student), Path(name), calibration_texts=texts[:_NUM_CALIBRATION_TEXTS]
        )
        tallies = _compare_all(twins, texts, settings, num_threads=arguments.threads)
    num_faults = sum(tally.num_faults for tally in tallies)
    print(f"{num_faults} faults" if num_faults else "no difference that is not a rounding tie")
    return 1 if num_faults else 0


def _compare_all(
    twins: TwinModels, texts: Sequence[str], settings: Sequence[Setting], *, num_threads: int
) -> list[Tally]:
    sources = twins.tokenizer.encode_sources(list(texts))
    limit = twins.bundle.manifest.limits.max_source_tokens
    fitting = [source for source in sources if len(source) <= limit]
    if len(fitting) < len(sources):
        print(f"{len(sources) - len(fitting)} sentences are longer than {limit} tokens and left out")
    translator = open_translator(twins.ctranslate2_float32, compute_type="float32", num_threads=num_threads)
    judge = Judge(Float64Search(twins.checkpoint), max_target_tokens=MAX_TARGET_TOKENS)
    pieces = vocabulary(twins.checkpoint)
    print(f"CTranslate2 {ctranslate2.__version__}, float32, {len(fitting)} sentences")
    print(f"{'setting':56s} {'same':>5s} {'ties':>5s} {'faults':>6s} {'score differs by':>17s} {'s':>5s}")
    tallies = []
    with LocalEngine.open(twins.bundle, variant="cpu-fp32", num_threads=num_threads) as engine:
        for setting in settings:
            started_at_s = time.monotonic()
            tally = compare(setting, engine, translator, fitting, pieces, judge)
            tallies.append(tally)
            print(
                f"{setting.name:56s} {tally.num_same:5d} {tally.num_ties:5d} {tally.num_faults:6d} "
                f"{tally.max_score_difference:17.1e} {time.monotonic() - started_at_s:5.0f}",
                flush=True,
            )
    return tallies


if __name__ == "__main__":
    sys.exit(main())
