"""How long a lexical shortlist must be: list sizes, what the lists allow, and scores with each of them.

    python -m benchmarks.shortlist --bundles DIR [DIR ...] --text FILE [FILE ...] --testsets DIR
        [--table FILE.npz] [--frequent 50,100] [--best 20,50] [--min-probability 0] [--no-scores]

Aligns the parallel text once (`--table` keeps the counts for the next run), cuts lists in every wanted
length, and compares each with no list and with the bundle's own: candidates of a sentence, of 32 sentences
of similar length together (the projection runs over the union of all running rows), the share of tokens of
the greedy full-vocabulary translation that the list allows (in brackets: of sentences all of whose tokens it
allows), the share of sentences translated as without a list, and BLEU and chrF of decoding with it. Bundles
must share one vocabulary.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from app.bundle import Bundle, open_bundle
from app.decoding.shortlist import Shortlist
from app.runtime.onnx_model import OnnxModel, load_model
from app.text import Tokenizer
from benchmarks.quality import score
from benchmarks.testsets import TestSet, load
from exporters.shortlist_training import ShortlistOptions, build_shortlist
from exporters.verification import serve
from exporters.word_alignment import LexicalTable, lexical_table, tokenize_pairs
from model.data.parallel_text import ParallelText

_GROUP = 32
_MAX_TOKENS = 128


@dataclass(frozen=True)
class Sizes:
    """How long the lists are.

    Attributes:
        name: what the row is called.
        megabytes: of the file in its compact form.
        mean_candidates: of one sentence.
        median_union: of 32 sentences of similar length.
        max_union: the largest of these.
    """

    name: str
    megabytes: float
    mean_candidates: int
    median_union: int
    max_union: int


@dataclass(frozen=True)
class Effect:
    """What a list does to one bundle's translations.

    Attributes:
        allowed_tokens: share of the full-vocabulary translation's tokens that are candidates, in percent.
        allowed_sentences: share of sentences all of whose tokens are, in percent.
        same_sentences: share of sentences translated as without a list, in percent; None if not decoded.
        bleu: sacrebleu; None if not decoded.
        chrf: sacrebleu; None if not decoded.
    """

    allowed_tokens: float
    allowed_sentences: float
    same_sentences: float | None
    bleu: float | None
    chrf: float | None


class Subject:
    """One bundle with a test set translated over the whole vocabulary."""

    def __init__(self, bundle: Bundle, testset: TestSet, *, variant: str) -> None:
        """Load both kinds of step graph and translate without a list."""
        manifest = bundle.manifest
        self.name = manifest.id
        self.tokenizer = _tokenizer(bundle)
        self._testset = testset
        texts = [self.tokenizer.fold_unknown(text) for text in testset.sources]
        self.sources = self.tokenizer.encode_sources(texts)
        if manifest.shortlist is None:
            raise SystemExit(f"bundle {manifest.id} has no shortlist graphs; export it with a shortlist")
        self.own = Shortlist.load(bundle.file(manifest.shortlist))
        self._with_list: OnnxModel = load_model(bundle, variant=variant, use_shortlist=True)  # type: ignore[arg-type]
        full = load_model(bundle, variant=variant, use_shortlist=False)  # type: ignore[arg-type]
        self._translations = [
            hypothesis.token_ids for hypothesis in serve(full, self.sources, shortlist=None)
        ]

    def without_list(self) -> Effect:
        """The scores over the whole vocabulary."""
        return Effect(100.0, 100.0, 100.0, *self._scores(self._translations))

    def with_list(self, shortlist: Shortlist, *, decode: bool) -> Effect:
        """What a list allows, and with `decode` the scores with it."""
        allowed = [
            np.isin(ids, shortlist.candidates(source)) if ids else np.ones(0, dtype=np.bool_)
            for source, ids in zip(self.sources, self._translations, strict=True)
        ]
        tokens = 100 * float(np.concatenate(allowed).mean())
        sentences = 100 * statistics.mean(bool(row.all()) for row in allowed)
        if not decode:
            return Effect(tokens, sentences, None, None, None)
        found = [
            hypothesis.token_ids for hypothesis in serve(self._with_list, self.sources, shortlist=shortlist)
        ]
        same = 100 * statistics.mean(a == b for a, b in zip(found, self._translations, strict=True))
        return Effect(tokens, sentences, same, *self._scores(found))

    def _scores(self, translations: Sequence[Sequence[int]]) -> tuple[float, float]:
        scores = score(self._testset, self.tokenizer.decode_batch(translations))
        return float(str(scores["bleu"])), float(str(scores["chrf"]))


def sizes_of(name: str, shortlist: Shortlist, sources: Sequence[Sequence[int]]) -> Sizes:
    """Measure a list on a test set's sources."""
    alone = [shortlist.candidates(source) for source in sources]
    order = sorted(range(len(sources)), key=lambda index: len(sources[index]))
    groups = [order[start : start + _GROUP] for start in range(0, len(order) - _GROUP + 1, _GROUP)]
    unions = [len(np.unique(np.concatenate([alone[index] for index in group]))) for group in groups]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "shortlist.bin"
        shortlist.save(file)
        megabytes = file.stat().st_size / 1e6
    return Sizes(
        name,
        round(megabytes, 2),
        round(statistics.mean(len(candidates) for candidates in alone)),
        round(statistics.median(unions)),
        max(unions),
    )


def read_table(arguments: argparse.Namespace, tokenizer: Tokenizer) -> LexicalTable:
    """The counts that an earlier run kept, or those of aligning the text now."""
    kept: Path | None = arguments.table
    if kept is not None and kept.exists():
        with np.load(kept) as arrays:
            return LexicalTable(**arrays)
    if not arguments.text:
        raise SystemExit("give --text, or the --table of an earlier run")
    started_at_s = time.perf_counter()
    texts = [
        ParallelText(
            path, source_column=arguments.source_column, target_column=arguments.target_column
        ).pairs()
        for path in arguments.text
    ]
    pairs = tokenize_pairs(
        itertools.chain.from_iterable(texts), tokenizer, max_tokens=_MAX_TOKENS, progress=_say
    )
    print(f"{len(pairs)} pairs; left out: {pairs.num_empty} empty, {pairs.num_long} long", flush=True)
    table = lexical_table(pairs, vocabulary_size=tokenizer.vocabulary_size, progress=_say)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"aligned in {time.perf_counter() - started_at_s:.0f} s, peak memory {peak_mb:.0f} MB", flush=True)
    if kept is not None:
        np.savez_compressed(kept, **{name: getattr(table, name) for name in table.__dataclass_fields__})
    return table


def _say(message: str) -> None:
    print(message, flush=True)


def _tokenizer(bundle: Bundle) -> Tokenizer:
    manifest = bundle.manifest
    return Tokenizer.open(bundle.file(manifest.tokenizer), eos_id=manifest.tokens.eos_id)


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bundles", type=Path, nargs="+", required=True)
    parser.add_argument("--text", type=Path, nargs="+", help="tables of parallel text, may be .gz or .zst")
    parser.add_argument("--source-column", type=int, default=-2)
    parser.add_argument("--target-column", type=int, default=-1)
    parser.add_argument("--testsets", type=Path, required=True, help="folder with flores200-dev")
    parser.add_argument("--testset", default="flores200-dev")
    parser.add_argument("--table", type=Path, help="keep the counts here, or take them from here")
    parser.add_argument("--variant", default="cpu-int8")
    parser.add_argument("--frequent", type=_numbers, default=[50, 100, 200])
    parser.add_argument("--best", type=_numbers, default=[10, 20, 30, 50, 100])
    parser.add_argument("--min-probability", type=_numbers, default=[0.0])
    parser.add_argument("--no-copies", action="store_true", help="a token is not its own candidate")
    parser.add_argument("--no-scores", action="store_true", help="sizes and allowed tokens only; much faster")
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser.parse_args()


def main() -> None:
    """Align, cut, measure, print a table in Markdown."""
    arguments = _arguments()
    bundles = [open_bundle(path) for path in arguments.bundles]
    if len({bundle.manifest.files[bundle.manifest.tokenizer].sha256 for bundle in bundles}) > 1:
        raise SystemExit("the bundles' tokenizers differ; a shortlist belongs to one vocabulary")
    pair = bundles[0].manifest.pairs[0]
    testset = load(arguments.testsets, arguments.testset, source=pair.source, target=pair.target)
    table = read_table(arguments, _tokenizer(bundles[0]))
    subjects = [Subject(bundle, testset, variant=arguments.variant) for bundle in bundles]
    tokenizer, sources = subjects[0].tokenizer, subjects[0].sources

    columns = [
        f"{what} {subject.name}" for subject in subjects for what in ("allowed", "same", "BLEU / chrF")
    ]
    print(f"\n| list | MB | a sentence | 32 together | {' | '.join(columns)} |")
    print("|---" * (4 + len(columns)) + "|")
    full = [subject.without_list() for subject in subjects]
    everything = Sizes("none", 0, tokenizer.vocabulary_size, tokenizer.vocabulary_size, 0)
    print(_row(everything, full), flush=True)
    rows = [_record(everything, subjects, full)]
    options = [
        ShortlistOptions(
            num_frequent=int(num_frequent),
            num_best=int(num_best),
            min_probability=min_probability,
            copies=not arguments.no_copies,
        )
        for num_frequent, num_best, min_probability in itertools.product(
            arguments.frequent, arguments.best, arguments.min_probability
        )
    ]
    lists = [(f"{subject.name}'s own", subject.own) for subject in subjects[:1]]
    lists += [
        (
            f"{chosen.num_frequent} + {chosen.num_best}"
            + (f", p >= {chosen.min_probability:g}" if chosen.min_probability else ""),
            build_shortlist(table, chosen, eos_id=tokenizer.eos_id, never=(tokenizer.unknown_id,)),
        )
        for chosen in options
    ]
    for name, shortlist in lists:
        sizes = sizes_of(name, shortlist, sources)
        effects = [subject.with_list(shortlist, decode=not arguments.no_scores) for subject in subjects]
        print(_row(sizes, effects), flush=True)
        rows.append(_record(sizes, subjects, effects))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


def _record(sizes: Sizes, subjects: Sequence[Subject], effects: Sequence[Effect]) -> dict[str, object]:
    named = {subject.name: asdict(effect) for subject, effect in zip(subjects, effects, strict=True)}
    return asdict(sizes) | {"effects": named}


def _row(sizes: Sizes, effects: Sequence[Effect]) -> str:
    cells = [sizes.name, f"{sizes.megabytes:.2f}", f"{sizes.mean_candidates:,}", f"{sizes.median_union:,}"]
    for effect in effects:
        cells.append(f"{effect.allowed_tokens:.2f} % ({effect.allowed_sentences:.1f} %)")
        cells.append("" if effect.same_sentences is None else f"{effect.same_sentences:.1f} %")
        cells.append("" if effect.bleu is None else f"{effect.bleu:.2f} / {effect.chrf:.2f}")
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
