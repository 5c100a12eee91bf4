"""A finished translation of one segment, in token ids, and how it is scored."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]


class FinishReason(StrEnum):
    """Why decoding of a segment ended."""

    EOS = "eos"
    """The model chose end-of-sentence."""
    LENGTH = "length"
    """The limit on target tokens was reached; the translation may be incomplete."""
    FORBIDDEN = "forbidden"
    """The request forbids everything that could follow; the translation may be incomplete."""


class LengthNormalisation(StrEnum):
    """By what the sum of log-probabilities is divided; n counts end-of-sentence when it was chosen."""

    POWER = "power"
    """``n ** a`` (CTranslate2, OpenNMT): a = 1 is the mean log-probability per token."""
    GNMT = "gnmt"
    """``((5 + n) / 6) ** a`` (Wu et al. 2016, equation 14)."""


@dataclass(frozen=True)
class Hypothesis:
    """One finished target sequence.

    Attributes:
        token_ids: target tokens without end-of-sentence.
        sum_log_probs: natural log of the sequence's probability: the sum over all decoded tokens,
            the end-of-sentence included when ``finish_reason`` is EOS; tokens that the request gave cost
            nothing, though they count in the length, as in CTranslate2. Under a shortlist the
            distribution is normalised over the allowed tokens.
        finish_reason: why decoding ended.
        length_penalty: a, the exponent of the normalisation; 0 leaves the plain sum.
        normalisation: which formula a belongs to.
        attention: float32 [tokens, S], what each target token was translated from, as weights over the source
            tokens and the padding behind them; None unless asked for.
    """

    token_ids: tuple[int, ...]
    sum_log_probs: float
    finish_reason: FinishReason
    length_penalty: float = 1.0
    normalisation: LengthNormalisation = LengthNormalisation.POWER
    attention: Float32Array | None = field(default=None, compare=False, repr=False)

    @property
    def num_decoded(self) -> int:
        """n, the decoded tokens counted by the score (end-of-sentence included when chosen)."""
        return len(self.token_ids) + (self.finish_reason is FinishReason.EOS)

    @property
    def score(self) -> float:
        """The normalised sum of log-probabilities; 0 is certain, less is less likely."""
        length = max(1, self.num_decoded)
        if self.normalisation is LengthNormalisation.POWER:
            return float(self.sum_log_probs / length**self.length_penalty)
        return float(self.sum_log_probs / ((5 + length) / 6) ** self.length_penalty)
