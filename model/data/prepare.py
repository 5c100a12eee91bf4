"""From a source's text to pairs of token ids: read, filtered, encoded, and kept for the next run."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from app.errors import CheckpointError, InvalidOption
from app.text import Tokenizer
from model.data.dataset import TokenPairs
from model.data.exclusions import Exclusions
from model.data.filter_counts import FilterCounts
from model.data.filters import KEPT, FilterConfig, PairFilter, counts_of
from model.data.sources import SourceConfig, pairs_of
from model.data.text_files import OnRead

# Raised whenever the same text would give other pairs than before.
_CODE_VERSION = 3
_CHUNK_PAIRS = 2048
TOO_MANY_TOKENS = "tokens"
UNKNOWN_TARGET = "unknown"


@dataclass(frozen=True)
class Preparation:
    """What the sources of a run have in common.

    Attributes:
        source_language: BCP-47.
        target_language: BCP-47.
        filters: which pairs are left out.
        exclusions: sentences that must not be trained on.
        tokenizer: of both sides.
        tokenizer_path: the file it was opened from.
        max_tokens: of a side, its end token included; pairs with a longer side are left out.
        seed: of samples.
        cache_directory: where the pairs are kept; made if need be.
    """

    source_language: str
    target_language: str
    filters: FilterConfig
    exclusions: Exclusions
    tokenizer: Tokenizer
    tokenizer_path: Path
    max_tokens: int
    seed: int
    cache_directory: Path

    def digest(self, source: SourceConfig) -> str:
        """Of everything that the pairs of a source follow from. Files count by their size and time.

        Raises:
            InvalidOption: a file of the source is missing.
        """
        stats = [_stat(path) for path in source.files()]
        described = {
            "version": _CODE_VERSION,
            "source": source.model_dump(mode="json", exclude={"name", "weight"}),
            "seed": None if source.sample is None else self.seed,
            "files": [[stat.st_size, stat.st_mtime_ns] for stat in stats],
            "languages": [self.source_language, self.target_language],
            "filters": self.filters.model_dump(mode="json"),
            "exclusions": self.exclusions.digest(),
            "tokenizer": hashlib.sha256(self.tokenizer_path.read_bytes()).hexdigest(),
            "eos_id": self.tokenizer.eos_id,
            "max_tokens": self.max_tokens,
        }
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class PreparedSource:
    """The pairs of a source.

    Attributes:
        pairs: at least one.
        counts: of the source, under its name; `TOO_MANY_TOKENS` and `UNKNOWN_TARGET` are among the rules.
        notes: what the filters could not judge, a sentence each.
        path: where the pairs are kept.
        was_cached: whether they were made by an earlier run.
    """

    pairs: TokenPairs
    counts: FilterCounts
    notes: tuple[str, ...]
    path: Path
    was_cached: bool


def prepare(
    source: SourceConfig, preparation: Preparation, *, on_read: OnRead | None = None
) -> PreparedSource:
    """The pairs of a source, from the cache if an earlier run left them there.

    Args:
        source: whose pairs.
        preparation: how they are made.
        on_read: is told of the progress through the source's files.

    Raises:
        InvalidOption: a file of the source is missing or damaged, a line lacks a column, a library is
            missing, or no pair is kept.
        CheckpointError: what an earlier run kept is damaged.
    """
    path = preparation.cache_directory / f"{source.name}-{preparation.digest(source)[:16]}.safetensors"
    counts_path = path.with_suffix(".json")
    if path.exists():
        counts, notes = _read_counts(counts_path, source.name)
        return PreparedSource(TokenPairs.load(path), counts, notes, path, was_cached=True)

    pair_filter = PairFilter(
        preparation.filters,
        source_language=preparation.source_language,
        target_language=preparation.target_language,
        exclusions=preparation.exclusions,
    )
    counter: Counter[str] = Counter()
    kept = pair_filter.kept(pairs_of(source, seed=preparation.seed, on_read=on_read), counter=counter)
    pairs = TokenPairs.from_pairs(
        _encoded(kept, preparation.tokenizer, max_tokens=preparation.max_tokens, counter=counter)
    )
    counts = counts_of(source.name, counter)
    if not len(pairs):
        reasons = ", ".join(f"{rule} {number:,}" for rule, number in counts.total.num_rejected.items())
        raise InvalidOption(
            f"source {source.name}: none of {counts.total.num_read:,} pairs is kept"
            f"{f' (rejected by {reasons})' if reasons else ''}; mend the source, its `where` or the filters"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    # The counts first: where the pairs are, they are too.
    _write_counts(counts_path, counts, pair_filter.notes)
    pairs.save(path)
    return PreparedSource(pairs, counts, pair_filter.notes, path, was_cached=False)


def _encoded(
    pairs: Iterable[tuple[str, str]], tokenizer: Tokenizer, *, max_tokens: int, counter: Counter[str]
) -> Iterator[tuple[list[int], list[int]]]:
    """The token ids of the pairs that are short and can be spelled; the counter takes up the others."""
    stream = iter(pairs)
    while chunk := list(itertools.islice(stream, _CHUNK_PAIRS)):
        sources = tokenizer.encode_sources([source for source, _ in chunk])
        targets = tokenizer.encode_sources([target for _, target in chunk])
        for source_ids, target_ids in zip(sources, targets, strict=True):
            if max(len(source_ids), len(target_ids)) > max_tokens:
                counter[KEPT] -= 1
                counter[TOO_MANY_TOKENS] += 1
            elif min(len(source_ids), len(target_ids)) == 1:
                # Something that the vocabulary normalises to nothing, such as a zero-width space.
                counter[KEPT] -= 1
                counter["empty"] += 1
            elif tokenizer.unknown_id in target_ids:
                # Nobody can read the unknown piece: a model must not learn to write it.
                counter[KEPT] -= 1
                counter[UNKNOWN_TARGET] += 1
            else:
                yield source_ids, target_ids


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise InvalidOption(f"{path} cannot be read: {error.strerror}; name another file") from error


def _write_counts(path: Path, counts: FilterCounts, notes: Iterable[str]) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    content = {"counts": counts.to_json(), "notes": list(notes)}
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def _read_counts(path: Path, name: str) -> tuple[FilterCounts, tuple[str, ...]]:
    """The counts beside the pairs, under the source's present name."""
    try:
        content = json.loads(path.read_bytes())
        counts = FilterCounts.from_json(content["counts"])
        return FilterCounts({name: counts.total}), tuple(map(str, content["notes"]))
    except (OSError, ValueError, KeyError, TypeError, InvalidOption) as error:
        raise CheckpointError(
            f"{path} does not hold the counts of prepared pairs ({type(error).__name__}); delete it and "
            f"{path.with_suffix('.safetensors').name} beside it, they are made anew"
        ) from error
