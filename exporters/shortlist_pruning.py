"""A lexical shortlist without the targets that parallel text never shows beside their source tokens.

Lists as importers bring them hold as many targets for each source token, the last of which are chance. Text
says which: where a source token is frequent enough to judge, a target that never comes with it is not needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from app.decoding.shortlist import Shortlist
from app.errors import InvalidOption
from exporters.word_alignment import Int32Array, Int64Array, TokenPairs

_CHUNK_PAIRS = 10_000


@dataclass(frozen=True)
class PruningOptions:
    """What stays.

    Attributes:
        rare_below: source tokens in fewer pairs than this keep their whole lists.
        together: the others keep the targets that come with them in so many pairs.
    """

    rare_below: int = 20
    together: int = 2

    def __post_init__(self) -> None:
        """Refuse values that prune nothing or by nothing."""
        for name in ("rare_below", "together"):
            if getattr(self, name) < 1:
                raise InvalidOption(f"{name} is {getattr(self, name)}; it is at least 1")


def prune_shortlist(
    shortlist: Shortlist, tokens: TokenPairs, options: PruningOptions, *, eos_id: int
) -> Shortlist:
    """The lists without the targets that the text does not bear out.

    End-of-sentence, which no text shows, and each source token itself, which may have to be copied, stay
    where they are. Memory grows with the shortlist, not with the text.

    Args:
        shortlist: to start from.
        tokens: parallel text in the model's direction, as `exporters.word_alignment.tokenize_pairs` gives it.
        options: what stays.
        eos_id: ends every source and target.
    """
    size = shortlist.vocabulary_size
    lists = [shortlist.targets_of(source) for source in range(size)]
    sources = np.repeat(np.arange(size, dtype=np.int64), [len(each) for each in lists])
    targets = np.concatenate(lists).astype(np.int64)
    entries = sources * size + targets  # ascending
    num_pairs_of, num_together = _counts(entries, tokens, size)
    keeps = (
        (num_pairs_of[sources] < options.rare_below)
        | (num_together >= options.together)
        | (targets == eos_id)
        | (targets == sources)
    )
    offsets = np.searchsorted(entries[keeps], np.arange(size + 1, dtype=np.int64) * size)
    return Shortlist(
        offsets.astype(np.int64), targets[keeps].astype(np.int32), num_frequent=shortlist.num_frequent
    )


def _counts(entries: Int64Array, tokens: TokenPairs, size: int) -> tuple[Int64Array, Int64Array]:
    """In how many pairs each source token comes, i64 [size], and each entry's two tokens, i64 [entries]."""
    num_pairs_of = np.zeros(size, dtype=np.int64)
    num_together = np.zeros(len(entries), dtype=np.int64)
    for start in range(0, len(tokens), _CHUNK_PAIRS):
        keys = []
        for pair in range(start, min(start + _CHUNK_PAIRS, len(tokens))):
            source = np.unique(_side(tokens.source_ids, tokens.source_offsets, pair))
            target = np.unique(_side(tokens.target_ids, tokens.target_offsets, pair))
            num_pairs_of[source] += 1
            keys.append((source[:, None] * size + target).ravel())
        found, counts = np.unique(np.concatenate(keys), return_counts=True)
        places = np.searchsorted(entries, found)
        listed = places < len(entries)
        listed[listed] = entries[places[listed]] == found[listed]
        num_together[places[listed]] += counts[listed]
    return num_pairs_of, num_together


def _side(ids: Int32Array, offsets: Int64Array, pair: int) -> Int64Array:
    return ids[offsets[pair] : offsets[pair + 1]].astype(np.int64)
