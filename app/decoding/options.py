"""What the caller may ask of decoding, checked once and frozen."""

from __future__ import annotations

import math
from dataclasses import dataclass

from app.decoding.hypothesis import LengthNormalisation
from app.errors import InvalidOption

MAX_TARGET_TOKENS_LIMIT = 4096
MAX_BEAM_SIZE = 16


@dataclass(frozen=True)
class DecodingOptions:
    """Options of one request's decoding.

    Attributes:
        max_target_tokens: absolute limit on a segment's target tokens, end-of-sentence included;
            None leaves it to ``max_target_ratio`` and the bundle.
        max_target_ratio: limit relative to the segment's source tokens (end-of-sentence included);
            None takes the bundle's default.
        beam_size: K, live beams; 1 is greedy search.
        num_hypotheses: translations wanted of each segment, best first; at most `beam_size`.
        length_penalty: a, exponent of the score's length normalisation; 0 ranks by plain sums.
        normalisation: ``n ** a`` or GNMT's ``((5 + n) / 6) ** a``.
        patience: beam search goes on until K x patience hypotheses are finished.
    """

    max_target_tokens: int | None = None
    max_target_ratio: float | None = None
    beam_size: int = 1
    num_hypotheses: int = 1
    length_penalty: float = 1.0
    normalisation: LengthNormalisation = LengthNormalisation.POWER
    patience: float = 1.0

    def __post_init__(self) -> None:
        """Refuse values no decoder can honour."""
        tokens, ratio = self.max_target_tokens, self.max_target_ratio
        if tokens is not None and not 1 <= tokens <= MAX_TARGET_TOKENS_LIMIT:
            raise InvalidOption(
                f"max_target_tokens is {tokens}; it must be between 1 and {MAX_TARGET_TOKENS_LIMIT}"
            )
        if ratio is not None and not 0.1 <= ratio <= 10.0:
            raise InvalidOption(f"max_target_ratio is {ratio}; it must be between 0.1 and 10")
        if not 1 <= self.beam_size <= MAX_BEAM_SIZE:
            raise InvalidOption(f"beam_size is {self.beam_size}; it must be between 1 and {MAX_BEAM_SIZE}")
        if not 1 <= self.num_hypotheses <= self.beam_size:
            raise InvalidOption(
                f"num_hypotheses is {self.num_hypotheses}; it must be between 1 and beam_size, which is "
                f"{self.beam_size}. Ask for more beams or fewer hypotheses"
            )
        if not 0.0 <= self.length_penalty <= 5.0:
            raise InvalidOption(f"length_penalty is {self.length_penalty}; it must be between 0 and 5")
        if not 1.0 <= self.patience <= 10.0:
            raise InvalidOption(f"patience is {self.patience}; it must be between 1 and 10")
        if self.beam_size == 1 and self.patience != 1.0:
            raise InvalidOption(
                f"patience is {self.patience} but beam_size is 1; greedy search has one hypothesis. "
                "Ask for more beams or leave patience out"
            )

    def target_limit(self, num_source_tokens: int, *, default_ratio: float, model_limit: int) -> int:
        """The most target tokens one segment may take, end-of-sentence included.

        ``ceil(ratio * source tokens)``, as Marian's ``max-length-factor``
        (marian-dev, src/translator/beam_search.cpp), within the other limits.

        Args:
            num_source_tokens: source length, end-of-sentence included.
            default_ratio: the bundle's ``max_target_ratio``.
            model_limit: the bundle's ``max_target_tokens``.
        """
        ratio = default_ratio if self.max_target_ratio is None else self.max_target_ratio
        limit = max(1, math.ceil(ratio * num_source_tokens))
        if self.max_target_tokens is not None:
            limit = min(limit, self.max_target_tokens)
        return min(limit, model_limit)
