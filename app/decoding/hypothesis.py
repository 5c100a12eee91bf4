"""A finished translation of one segment, in token ids."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    """Why decoding of a segment ended."""

    EOS = "eos"
    """The model chose end-of-sentence."""
    LENGTH = "length"
    """The limit on target tokens was reached; the translation may be incomplete."""


@dataclass(frozen=True)
class Hypothesis:
    """One finished target sequence.

    Attributes:
        token_ids: target tokens without end-of-sentence.
        sum_log_probs: natural log of the sequence's probability: the sum over all decoded tokens,
            the end-of-sentence included when ``finish_reason`` is EOS. Under a shortlist the
            distribution is normalised over the allowed tokens.
        finish_reason: why decoding ended.
    """

    token_ids: tuple[int, ...]
    sum_log_probs: float
    finish_reason: FinishReason

    @property
    def num_decoded(self) -> int:
        """n, the decoded tokens counted by the score (end-of-sentence included when chosen)."""
        return len(self.token_ids) + (self.finish_reason is FinishReason.EOS)

    @property
    def score(self) -> float:
        """Mean log-probability per decoded token, ``sum_log_probs / n``; 0 is certain."""
        return self.sum_log_probs / max(1, self.num_decoded)
