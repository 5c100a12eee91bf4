"""A sentence's translation is token-identical alone, in any batch and in any order of arrival.

    python -m benchmarks.determinism --testsets DIR [--part 1/4] [--variants cpu-int8] [--searches greedy]

Real sentences (FLORES-200 dev and PUD, English into Portuguese, and some the other way) go through the
service's own lane, scheduler, runner and worker, first each by a lane that never saw another, then in every
way of `benchmarks.arrivals.PATTERNS`. All hypotheses are compared, token by token. Beams alone are slow, so
only `--alone-beams` sentences of a bundle are searched so; the others are compared with the answer of the
first pattern. Every difference is printed by the sentence's number in its bundle's list, never by its text,
and ends the program with status 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.bundle import Bundle, default_directory, discover, open_bundle
from app.bundle.manifest import Variant
from app.decoding.hypothesis import LengthNormalisation
from app.decoding.options import DecodingOptions
from app.runtime.onnx_model import load_model
from app.text import Tokenizer
from benchmarks.arrivals import PATTERNS, Arrivals, Decoder, Job
from benchmarks.local_engine import Hypotheses, load_shortlist
from benchmarks.parts import Part
from benchmarks.testsets import NAMES, load

SEARCHES: dict[str, Sequence[DecodingOptions]] = {
    "greedy": (DecodingOptions(),),
    "beam4": (DecodingOptions(beam_size=4, num_hypotheses=4),),
    "mixed": (
        DecodingOptions(),
        DecodingOptions(beam_size=2, length_penalty=0.6),
        DecodingOptions(beam_size=3, num_hypotheses=3, patience=2.0),
        DecodingOptions(beam_size=4),
        DecodingOptions(beam_size=4, num_hypotheses=4, length_penalty=2.0),
        DecodingOptions(
            beam_size=5, num_hypotheses=2, length_penalty=0.8, normalisation=LengthNormalisation.GNMT
        ),
        DecodingOptions(beam_size=8, num_hypotheses=2, length_penalty=0.0),
        DecodingOptions(max_target_tokens=12),
    ),
}
"""What the sentences ask for, in turn."""


@dataclass(frozen=True)
class Sentences:
    """A bundle and what it translates.

    Attributes:
        bundle: the model.
        numbers: of each source, its line in the test sets put one after another.
        sources: token ids, each with the final end-of-sentence.
    """

    bundle: Bundle
    numbers: Sequence[int]
    sources: Sequence[Sequence[int]]


@dataclass(frozen=True)
class Run:
    """One bundle, variant and search, to be compared over all patterns."""

    sentences: Sentences
    variant: Variant
    search: str
    use_shortlist: bool
    num_alone: int
    patterns: Sequence[Arrivals]

    @property
    def name(self) -> str:
        """Shown in every line."""
        return f"{self.sentences.bundle.manifest.id} {self.variant} {self.search}"


def difference(alone: Hypotheses, together: Hypotheses) -> str | None:
    """Where two answers to one sentence differ first, or None."""
    if len(alone) != len(together):
        return f"{len(alone)} hypotheses and {len(together)}"
    for rank, (one, other) in enumerate(zip(alone, together, strict=True)):
        if one.token_ids == other.token_ids and one.finish_reason == other.finish_reason:
            continue
        position = next(
            (
                at
                for at, pair in enumerate(zip(one.token_ids, other.token_ids, strict=False))
                if len(set(pair)) > 1
            ),
            min(len(one.token_ids), len(other.token_ids)),
        )
        lengths = f"{len(one.token_ids)} and {len(other.token_ids)}"
        return (
            f"hypothesis {rank}, first at token {position} of {lengths}; "
            f"scores {one.score:.7f} and {other.score:.7f}, {abs(one.score - other.score):.1e} apart"
        )
    return None


def compare(run: Run) -> int:
    """Translate alone and in all patterns; print every difference and return their number."""
    bundle, options = run.sentences.bundle, SEARCHES[run.search]
    decoder = Decoder(
        load_model(bundle, variant=run.variant, use_shortlist=run.use_shortlist),
        load_shortlist(bundle) if run.use_shortlist else None,
    )
    jobs = [Job(source, options[index % len(options)]) for index, source in enumerate(run.sentences.sources)]
    expected = _alone(run, decoder, jobs)
    num_differences = 0
    for pattern in run.patterns:
        started_at_s = time.monotonic()
        num_here = num_answers = 0
        max_score_difference = 0.0
        for index, answer in decoder.together(jobs, pattern):
            num_answers += 1
            found = difference(expected.setdefault(index, answer), answer)
            if found is None:
                max_score_difference = max(max_score_difference, _score_difference(expected[index], answer))
                continue
            num_here += 1
            print(f"DIFFERENT {run.name}, {pattern.name}, sentence {run.sentences.numbers[index]}: {found}")
        num_differences += num_here
        print(
            f"{run.name:34s} {pattern.name:42s} {num_answers:6d} answers, {num_here:3d} different, "
            f"scores within {max_score_difference:.0e}, {time.monotonic() - started_at_s:4.0f} s",
            flush=True,
        )
    return num_differences


def _alone(run: Run, decoder: Decoder, jobs: Sequence[Job]) -> dict[int, Hypotheses]:
    """The answers of sentences alone, by index: all of them, or as many as the run wants, evenly spread."""
    started_at_s = time.monotonic()
    # An odd stride meets every one of the options in turn.
    stride = max(1, len(jobs) // run.num_alone) | 1
    answers: dict[int, Hypotheses] = {}
    for index in range(0, len(jobs), stride):
        answers[index] = decoder.alone(jobs[index])
        if len(answers) % 250 == 0:
            print(f"{run.name:34s} alone: {len(answers)} so far", flush=True)
    print(
        f"{run.name:34s} {'alone':42s} {len(answers):6d} of {len(jobs)} sentences, "
        f"{sum(answer[0].num_decoded for answer in answers.values())} tokens, "
        f"{time.monotonic() - started_at_s:.0f} s"
        + ("" if stride == 1 else "; the others are compared with the first pattern"),
        flush=True,
    )
    return answers


def _score_difference(one: Hypotheses, other: Hypotheses) -> float:
    return max(abs(a.score - b.score) for a, b in zip(one, other, strict=True))


def sentences_of(bundle: Bundle, testsets: Path, *, num: int | None, part: Part) -> Sentences:
    """Tokenise the test sets in the bundle's source language; None takes all sentences."""
    pair = bundle.manifest.pairs[0]
    texts = [
        text
        for name in NAMES
        for text in load(testsets, name, source=pair.source, target=pair.target).sources
    ][:num]
    tokenizer = Tokenizer.open(bundle.file(bundle.manifest.tokenizer), eos_id=bundle.manifest.tokens.eos_id)
    numbered = part.of(list(enumerate(tokenizer.encode_sources(texts))))
    limit = bundle.manifest.limits.max_source_tokens
    kept = [(number, source) for number, source in numbered if len(source) <= limit]
    left_out = (
        "" if len(kept) == len(numbered) else f" ({len(numbered) - len(kept)} are too long for the model)"
    )
    print(f"{bundle.manifest.id}: {len(kept)} sentences{left_out}")
    return Sentences(bundle, [number for number, _ in kept], [source for _, source in kept])


def main() -> int:
    """Compare everything asked for; 1 when anything differed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--testsets", type=Path, required=True, help="folder with NAME.en and NAME.pt_BR")
    parser.add_argument("--bundle", type=Path, help="this folder instead of the shipped bundles")
    parser.add_argument("--variants", default="cpu-int8,cpu-fp32")
    parser.add_argument("--searches", default=",".join(SEARCHES))
    parser.add_argument("--patterns", default="", help="only those whose name contains one of these words")
    parser.add_argument("--num", type=int, help="sentences of the first bundle; all unless given")
    parser.add_argument("--num-other", type=int, default=200, help="sentences of every other bundle")
    parser.add_argument("--alone-beams", type=int, default=500, help="sentences of a part to search alone")
    parser.add_argument(
        "--part", type=Part.parse, default=Part(1, 1), help="I/N: every N-th sentence from I on"
    )
    parser.add_argument("--no-shortlist", action="store_true")
    arguments = parser.parse_args()

    bundles = [open_bundle(arguments.bundle)] if arguments.bundle else list(discover(default_directory()))
    nums = [arguments.num, *[arguments.num_other] * (len(bundles) - 1)]
    all_sentences = [
        sentences_of(bundle, arguments.testsets, num=num, part=arguments.part)
        for bundle, num in zip(bundles, nums, strict=True)
    ]
    num_differences = sum(map(compare, _runs(arguments, all_sentences)))
    print(f"{num_differences} differences" if num_differences else "every answer is the same in all company")
    return 1 if num_differences else 0


def _runs(arguments: argparse.Namespace, all_sentences: Sequence[Sentences]) -> Iterable[Run]:
    words = arguments.patterns.split(",")
    patterns = [pattern for pattern in PATTERNS if any(word in pattern.name for word in words)]
    if not patterns:
        raise ValueError(f"no pattern's name contains {arguments.patterns!r}")
    for sentences in all_sentences:
        for variant in arguments.variants.split(","):
            for search in arguments.searches.split(","):
                yield Run(
                    sentences,
                    variant,
                    search,
                    use_shortlist=not arguments.no_shortlist
                    and sentences.bundle.manifest.shortlist is not None,
                    num_alone=len(sentences.sources) if search == "greedy" else arguments.alone_beams,
                    patterns=patterns,
                )


if __name__ == "__main__":
    sys.exit(main())
