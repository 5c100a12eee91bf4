"""The part of the vocabulary that the probabilities of a batch run over while a student learns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from model.data.batches import Batch

IdArray = npt.NDArray[np.int64]
Candidates = Callable[[Sequence[int]], npt.NDArray[np.integer[Any]]]
"""From source tokens to the target tokens that a translation of them may need."""
_NONE: IdArray = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class SampledVocabulary:
    """Which tokens compete in a batch.

    The whole vocabulary would cost the student more than the rest of a step. What it has to learn is which
    of the tokens that the teacher weighs against each other is the likelier one, so these are in; a sample
    of the shortlist's and some random ones keep the rest of the vocabulary down.

    Attributes:
        vocabulary_size: V.
        candidates: a shortlist; None offers the whole vocabulary.
        num_best: how many of the teacher's likeliest tokens of every position.
        num_candidates: how many of what the shortlist offers, drawn anew for every step.
        num_others: random ones.
        seed: of the sample, with the step.
    """

    vocabulary_size: int
    candidates: Candidates | None
    num_best: int
    num_candidates: int
    num_others: int
    seed: int

    def offered(self, batch: Batch) -> IdArray:
        """What a shortlist offers for the batch's sources, or all; sorted ids without repetition, i64 [N]."""
        if self.candidates is None:
            return np.arange(self.vocabulary_size, dtype=np.int64)
        sources = np.unique(batch.source_ids[batch.source_mask].cpu().numpy())
        return np.unique(np.asarray(self.candidates(sources.tolist()), dtype=np.int64))

    def ids(self, batch: Batch, *, step: int, offered: IdArray, best: IdArray = _NONE) -> IdArray:
        """Sorted ids without repetition, all targets among them, i64 [N].

        Args:
            batch: whose targets are in.
            step: sets the sample.
            offered: see `offered`.
            best: the teacher's likeliest, i64.
        """
        random = np.random.default_rng([self.seed, 2, step])
        targets = np.unique(batch.target_ids[batch.target_mask].cpu().numpy())
        if len(offered) > self.num_candidates:
            offered = random.choice(offered, self.num_candidates, replace=False)
        others = random.integers(0, self.vocabulary_size, self.num_others)
        return np.unique(np.concatenate([targets, best, offered, others])).astype(np.int64)
