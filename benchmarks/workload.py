"""What both sides translate: sentences as token ids, each with the limit of its target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_FIRST_WORD_ID = 2
"""Below it are end-of-sentence and unknown."""
_FORCED_LENGTHS = (8, 12, 16, 20, 24, 28, 32, 40, 48, 64)
_FORCED_BLOCK = 32
"""Sentences of one target length: the other side's batches end all at once, which is the best for it."""


@dataclass(frozen=True)
class Workload:
    """Sentences to translate.

    Attributes:
        sources: token ids, each with the final end-of-sentence.
        limits: most target tokens of each.
        forced: whether the model never ends, so that every target has exactly its limit's length.
    """

    sources: Sequence[Sequence[int]]
    limits: Sequence[int]
    forced: bool = False

    def every(self, stride: int) -> Workload:
        """Every so many-th sentence."""
        return Workload(self.sources[::stride], self.limits[::stride], self.forced)

    def sample(self, num_sentences: int) -> Workload:
        """About this many of the sentences, evenly spread."""
        return self.every(max(1, len(self.sources) // num_sentences))

    def by_limit(self) -> dict[int, list[Sequence[int]]]:
        """The sources of each limit, for an engine whose limit holds for a whole call."""
        groups: dict[int, list[Sequence[int]]] = {}
        for source, limit in zip(self.sources, self.limits, strict=True):
            groups.setdefault(limit, []).append(source)
        return groups


def natural(sources: Sequence[Sequence[int]], *, max_target_tokens: int) -> Workload:
    """Real sentences, longest first, as every engine likes them offline."""
    ordered = sorted(sources, key=len, reverse=True)
    return Workload(ordered, [max_target_tokens] * len(ordered))


def forced(num_sentences: int, length: int, *, vocabulary_size: int, eos_id: int, seed: int) -> Workload:
    """Random sentences of `length` tokens, end-of-sentence included, that all decode as many."""
    return _random([length] * num_sentences, vocabulary_size=vocabulary_size, eos_id=eos_id, seed=seed)


def forced_mix(num_blocks: int, *, vocabulary_size: int, eos_id: int, seed: int) -> Workload:
    """Blocks of 32 random sentences whose lengths, 8 to 64 tokens, are drawn per block; longest first."""
    drawn = np.random.default_rng(seed).choice(_FORCED_LENGTHS, size=num_blocks)
    lengths = [int(length) for length in sorted(drawn, reverse=True) for _ in range(_FORCED_BLOCK)]
    return _random(lengths, vocabulary_size=vocabulary_size, eos_id=eos_id, seed=seed + 1)


def _random(lengths: Sequence[int], *, vocabulary_size: int, eos_id: int, seed: int) -> Workload:
    draw = np.random.default_rng(seed)
    sources = [
        [*draw.integers(_FIRST_WORD_ID, vocabulary_size, size=length - 1).tolist(), eos_id]
        for length in lengths
    ]
    return Workload(sources, lengths, forced=True)
