"""Our float32 engine against CTranslate2's on the same weights: the same tokens, the same scores.

    pip install ctranslate2
    python -m benchmarks.agreement --student FILE.npz --testsets DIR [--num 500] [--only NAME] [--part 1/4]

Real sentences (FLORES-200 dev) are translated by both, without a shortlist, in every setting of `SETTINGS`,
and all hypotheses of a sentence are compared. Two float32 implementations add in different orders, so where
two continuations are equally probable they may part. Every difference is therefore put before a third
opinion, the PyTorch model in float64, which says by how much the two continuations differ, and searches for
itself, deciding near-ties both ways: a difference is a rounding tie when each side's answer is one that the
search gives with some near-ties decided one way or the other, and a fault otherwise. A fault ends the
program with status 1.

What guides a target (`app.decoding.guidance`) is compared likewise, and so is the attention, as the weights
of the last layer's first head, which is what CTranslate2 returns. With beams its first row is not compared:
CTranslate2 has there what another beam looked at. All our rows are therefore also compared with our own
attention when the same target is forced on the model.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
import torch

from app.decoding.guidance import Guidance
from app.decoding.hypothesis import Float32Array
from app.decoding.options import DecodingOptions
from benchmarks.agreement_settings import SETTINGS, Guide, Known, Setting
from benchmarks.float64_search import Asked, Float64Search
from benchmarks.local_engine import Hypotheses, LocalEngine
from benchmarks.parts import Part
from benchmarks.peers.ctranslate2_model import open_translator, vocabulary
from benchmarks.student import read_student
from benchmarks.testsets import load
from benchmarks.twin_models import MAX_TARGET_TOKENS, TwinModels, export_student
from benchmarks.verdict import Found, Judge, first_difference
from exporters.checkpoint import AlignmentHeads

_NUM_CALIBRATION_TEXTS = 20
"""The export wants some; the float32 graphs do not use the scales."""
_BATCH_SIZE = 32
MAX_ATTENTION_DIFFERENCE = 1e-3
"""Largest accepted difference between two weights of attention, which lie between 0 and 1."""
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


@dataclass(frozen=True)
class Sides:
    """Both engines, over the same weights.

    Attributes:
        engine: ours.
        translator: CTranslate2's.
        pieces: the vocabulary, by token id.
    """

    engine: LocalEngine
    translator: ctranslate2.Translator
    pieces: Sequence[str]

    def ours(
        self,
        sources: Sequence[Sequence[int]],
        options: DecodingOptions,
        guidances: Sequence[Guidance] | None = None,
    ) -> list[Hypotheses]:
        """Our hypotheses of each source, best first."""
        return self.engine.translate(
            sources, options, max_target_tokens=MAX_TARGET_TOKENS, guidances=guidances
        )

    def theirs(self, sources: Sequence[Sequence[int]], options: Mapping[str, Any]) -> list[Any]:
        """CTranslate2's results of each source."""
        return list(
            self.translator.translate_batch(
                [[self.pieces[token] for token in source[:-1]] for source in sources],
                **{**_ALWAYS, **options},
            )
        )

    def guidances(self, guide: Guide, greedy: Sequence[tuple[int, ...]]) -> list[Guidance]:
        """Of every sentence, from the greedy translations of all."""
        id_of = {piece: index for index, piece in enumerate(self.pieces)}
        return [
            guide(Known(id_of, own, other))
            for own, other in zip(greedy, [*greedy[1:], *greedy[:1]], strict=True)
        ]

    def their_guidance(self, guidances: Sequence[Guidance]) -> dict[str, Any]:
        """The same as keyword arguments of ``translate_batch``.

        Raises:
            ValueError: they differ in more than their prefix, which CTranslate2 has no option for.
        """
        common = replace(guidances[0], prefix=())
        if any(replace(guidance, prefix=()) != common for guidance in guidances):
            raise ValueError("guidances of one setting may differ in nothing but their prefix")
        return {
            # It counts no end-of-sentence.
            "min_decoding_length": max(0, common.min_target_tokens - 1),
            "no_repeat_ngram_size": common.no_repeat_ngram_size,
            "repetition_penalty": common.repetition_penalty,
            "suppress_sequences": [[self.pieces[token] for token in phrase] for phrase in common.forbidden]
            or None,
            "target_prefix": [[self.pieces[token] for token in guidance.prefix] for guidance in guidances],
            "return_attention": common.keeps_attention,
        }


def compare(
    setting: Setting,
    sides: Sides,
    sources: Sequence[Sequence[int]],
    *,
    greedy: Sequence[tuple[int, ...]],
    judge: Judge,
) -> Tally:
    """Translate with both sides and print every difference; `greedy` has our translation of each source."""
    id_of = {piece: index for index, piece in enumerate(sides.pieces)}
    guidances = sides.guidances(setting.guide, greedy) if setting.guide else None
    their_guidance = sides.their_guidance(guidances) if guidances else {}
    results = sides.theirs(sources, {**setting.theirs, **their_guidance})
    found = sides.ours(sources, setting.ours, guidances)
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
        asked = Asked(
            sources[index], setting.ours, MAX_TARGET_TOKENS, guidances[index] if guidances else None
        )
        is_tie, lines = judge.explain(asked, difference, sides={"ours": ours, "theirs": theirs})
        tally.num_ties += is_tie
        tally.num_faults += not is_tie
        print(f"{setting.name}: sentence {index}: {'tie' if is_tie else 'FAULT'}")
        print("\n".join(f"    {line}" for line in lines), flush=True)
    if guidances and guidances[0].keeps_attention:
        tally.num_faults += _compare_attention(setting, sides, sources, found, results)
    return tally


def _compare_attention(
    setting: Setting,
    sides: Sides,
    sources: Sequence[Sequence[int]],
    found: Sequence[Hypotheses],
    results: Sequence[Any],
) -> int:
    """Print by how much the attention of the best hypotheses differs; how many sentences are faults."""
    same = [
        index
        for index, (hypotheses, result) in enumerate(zip(found, results, strict=True))
        if hypotheses[0].token_ids
        and [sides.pieces[token] for token in hypotheses[0].token_ids] == result.hypotheses[0]
    ]
    forced = sides.ours(
        [sources[index] for index in same],
        DecodingOptions(),
        # A prefix leaves room for one token.
        [
            Guidance(prefix=found[index][0].token_ids[: MAX_TARGET_TOKENS - 1], keeps_attention=True)
            for index in same
        ],
    )
    faults, their_first_rows = set(), 0
    largest, largest_forced = 0.0, 0.0
    first_row = 0 if setting.ours.beam_size == 1 else 1
    for index, teacher in zip(same, forced, strict=True):
        num_source = len(sources[index])
        ours = _attention_of(found[index])[:, :num_source]  # [T,S]
        # CTranslate2 leaves out what looks at the source's end-of-sentence.
        theirs = np.array(results[index].attention[0])[: len(ours)]  # [T,S-1]
        by_row = np.abs(ours[:, :-1] - theirs).max(axis=1)  # [T]
        from_forced = float(np.abs(ours - _attention_of(teacher)[: len(ours), :num_source]).max())
        largest = max([largest, *by_row[first_row:].tolist()])
        largest_forced = max(largest_forced, from_forced)
        their_first_rows += bool(by_row[0] > MAX_ATTENTION_DIFFERENCE)
        if by_row[first_row:].max(initial=0.0) > MAX_ATTENTION_DIFFERENCE or (
            from_forced > MAX_ATTENTION_DIFFERENCE
        ):
            faults.add(index)
    rows = "all rows" if first_row == 0 else "rows from the second on"
    print(
        f"{setting.name}: attention of {len(same)} sentences with the same tokens: {rows} differ by at most "
        f"{largest:.1e} from CTranslate2's, all rows by {largest_forced:.1e} from ours with forced targets; "
        f"{len(faults)} faults; CTranslate2's first row is another in {their_first_rows} sentences",
        flush=True,
    )
    return len(faults)


def _attention_of(hypotheses: Hypotheses) -> Float32Array:
    attention = hypotheses[0].attention
    assert attention is not None, "the guidance keeps it"
    return attention


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
    parser.add_argument(
        "--only", action="append", help="only settings whose name contains this; may be given more than once"
    )
    parser.add_argument(
        "--part", type=Part.parse, default=Part(1, 1), help="I/N: every N-th setting from the I-th on"
    )
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()

    wanted = arguments.only or [""]
    settings = arguments.part.of(
        [setting for setting in SETTINGS if any(name in setting.name for name in wanted)]
    )
    if not settings:
        parser.error(f"this part has no setting whose name contains {' or '.join(wanted)}")
    torch.set_num_threads(arguments.threads)
    texts = load(arguments.testsets, "flores200-dev", source="en", target="pt").sources[: arguments.num]
    print("exporting the student for both sides", flush=True)
    with tempfile.TemporaryDirectory() as name:
        twins = export_student(
            # The attention that CTranslate2 returns is that of the last layer's first head.
            replace(read_student(arguments.student), alignment=AlignmentHeads(layer=-1, heads=(0,))),
            Path(name),
            calibration_texts=texts[:_NUM_CALIBRATION_TEXTS],
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
    judge = Judge(Float64Search(twins.checkpoint))
    pieces = vocabulary(twins.checkpoint)
    print(f"CTranslate2 {ctranslate2.__version__}, float32, {len(fitting)} sentences")
    print(f"{'setting':56s} {'same':>5s} {'ties':>5s} {'faults':>6s} {'score differs by':>17s} {'s':>5s}")
    tallies = []
    with LocalEngine.open(twins.bundle, variant="cpu-fp32", num_threads=num_threads) as engine:
        sides = Sides(engine, translator, pieces)
        greedy = [hypotheses[0].token_ids for hypotheses in sides.ours(fitting, DecodingOptions())]
        for setting in settings:
            started_at_s = time.monotonic()
            tally = compare(setting, sides, fitting, greedy=greedy, judge=judge)
            tallies.append(tally)
            print(
                f"{setting.name:56s} {tally.num_same:5d} {tally.num_ties:5d} {tally.num_faults:6d} "
                f"{tally.max_score_difference:17.1e} {time.monotonic() - started_at_s:5.0f}",
                flush=True,
            )
    return tallies


if __name__ == "__main__":
    sys.exit(main())
