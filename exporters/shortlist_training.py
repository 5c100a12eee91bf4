"""A lexical shortlist for any model: from aligned text to the lists that `app.decoding.shortlist` reads.

The rule of look-up stays Marian's: a sentence's candidates are the union of its source tokens' lists. What is
always needed therefore lies in lists that every sentence brings along. The most frequent target tokens are in
the list of end-of-sentence, which ends every source. (Marian's own ``frequent`` counts ids from 0, which are
the frequent ones only of a vocabulary that is sorted by frequency in the target language.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from importlib import metadata

import numpy as np

from app.decoding.shortlist import Shortlist
from app.errors import InvalidOption
from app.text import Tokenizer
from exporters.word_alignment import (
    Int64Array,
    LexicalTable,
    Progress,
    lexical_table,
    tokenize_pairs,
)

DEFAULT_MAX_PAIRS = 1_000_000
"""Bounds time and memory: about 17 minutes on one core and 3.5 GB for pairs of 15 tokens a side."""


@dataclass(frozen=True)
class ShortlistOptions:
    """How long the lists are.

    The defaults favour quality. Frequent tokens are cheap: rows that run together share them, so 1,000
    instead of 100 hardly lengthen the union that the output projection runs over.

    Attributes:
        num_frequent: so many target tokens, the most frequent ones, are candidates of every sentence.
        num_best: at most so many targets of each source token, by probability; equal ones by lower id.
        min_probability: targets below are left out, p(target | source) being the share of the source
            token's links.
        copies: whether each source token is its own candidate too, so that names and numbers that
            the text lacks can be copied.
    """

    num_frequent: int = 1000
    num_best: int = 100
    min_probability: float = 0.0
    copies: bool = True

    def __post_init__(self) -> None:
        """Refuse values that leave no list."""
        if self.num_frequent < 0:
            raise InvalidOption(f"the number of frequent tokens is {self.num_frequent}; it is at least 0")
        if self.num_best < 1:
            raise InvalidOption(f"the number of best targets is {self.num_best}; it is at least 1")
        if not 0.0 <= self.min_probability < 1.0:
            raise InvalidOption(
                f"the smallest probability is {self.min_probability}; it is at least 0 and below 1"
            )


@dataclass(frozen=True)
class TrainedShortlist:
    """A shortlist and what it was made of.

    Attributes:
        shortlist: the lists.
        num_pairs: pairs aligned.
        num_empty: pairs left out because a side was empty.
        num_long: pairs left out because a side was too long.
        has_more: whether the text goes on after the pairs that were to be read.
        provenance: facts for a manifest.
    """

    shortlist: Shortlist
    num_pairs: int
    num_empty: int
    num_long: int
    has_more: bool
    provenance: dict[str, str]


def train_shortlist(
    pairs: Iterable[tuple[str, str]],
    tokenizer: Tokenizer,
    options: ShortlistOptions,
    *,
    max_tokens: int = 128,
    max_pairs: int = DEFAULT_MAX_PAIRS,
    progress: Progress = lambda _: None,
) -> TrainedShortlist:
    """Tokenise, align, count and cut. The same pairs and options give the same lists.

    Args:
        pairs: source and target texts, in the model's direction.
        tokenizer: of the model.
        options: how long the lists are.
        max_tokens: pairs with a longer side are left out and counted.
        max_pairs: read so many at most.
        progress: told what is being done.

    Raises:
        InvalidOption: no pair is left, or the aligner's library is missing.
    """
    tokens = tokenize_pairs(pairs, tokenizer, max_tokens=max_tokens, max_pairs=max_pairs, progress=progress)
    table = lexical_table(tokens, vocabulary_size=tokenizer.vocabulary_size, progress=progress)
    shortlist = build_shortlist(table, options, eos_id=tokenizer.eos_id, never=(tokenizer.unknown_id,))
    return TrainedShortlist(
        shortlist=shortlist,
        num_pairs=len(tokens),
        num_empty=tokens.num_empty,
        num_long=tokens.num_long,
        has_more=tokens.has_more,
        provenance={
            "shortlist_aligner": f"eflomal of sil-thot {metadata.version('sil-thot')}, grow-diag-final-and",
            "shortlist_pairs": str(len(tokens)),
            "shortlist_options": f"frequent {options.num_frequent}, best {options.num_best}, "
            f"min probability {options.min_probability}, copies {options.copies}",
        },
    )


def build_shortlist(
    table: LexicalTable, options: ShortlistOptions, *, eos_id: int, never: Collection[int]
) -> Shortlist:
    """Cut a table to lists.

    End-of-sentence is in every list, so that every sentence may end.

    Args:
        table: counted links.
        options: how long the lists are.
        eos_id: ends every source and target.
        never: ids that no list holds, such as the unknown piece.
    """
    size = table.vocabulary_size
    totals = np.bincount(table.sources, weights=table.counts, minlength=size)
    probabilities = table.counts / totals[table.sources]
    wanted = (probabilities >= options.min_probability) & ~np.isin(table.targets, list(never))
    sources, targets, counts = (column[wanted] for column in (table.sources, table.targets, table.counts))
    order = np.lexsort((targets, -counts, sources))
    sources, targets = sources[order], targets[order]
    rank = np.arange(len(sources)) - np.searchsorted(sources, sources)
    best = rank < options.num_best
    frequent = _most_frequent(table, options.num_frequent, never)
    everything = np.arange(size, dtype=np.int64)
    rows = [
        sources[best].astype(np.int64) * size + targets[best],
        eos_id * size + frequent,
        everything * size + eos_id,
    ]
    if options.copies:
        copied = np.setdiff1d(everything, list(never))
        rows.append(copied * size + copied)
    keys = np.unique(np.concatenate(rows))
    offsets = np.searchsorted(keys, np.arange(size + 1, dtype=np.int64) * size)
    return Shortlist(offsets.astype(np.int64), (keys % size).astype(np.int32), num_frequent=0)


def _most_frequent(table: LexicalTable, num_wanted: int, never: Collection[int]) -> Int64Array:
    """int64, the ids seen most often as targets; equal ones by lower id."""
    frequency = table.target_frequency.copy()
    frequency[list(never)] = 0
    order = np.argsort(-frequency, kind="stable")[:num_wanted]
    return order[frequency[order] > 0].astype(np.int64)
