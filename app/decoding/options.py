"""What the caller may ask of decoding, checked once and frozen."""

from __future__ import annotations

import math
import unicodedata
from dataclasses import dataclass
from typing import NamedTuple

from app.decoding.hypothesis import LengthNormalisation
from app.errors import InvalidOption

MAX_TARGET_TOKENS_LIMIT = 4096
MAX_TARGET_RATIO_LIMIT = 10.0
MAX_BEAM_SIZE = 16
MAX_NGRAM_SIZE = 64
MAX_REPETITION_PENALTY = 10.0
MAX_FORBIDDEN_PHRASES = 100
MAX_FORBIDDEN_CHARACTERS = 100


class TargetBounds(NamedTuple):
    """How long one segment's target may be, in tokens, end-of-sentence included."""

    min_tokens: int
    max_tokens: int


@dataclass(frozen=True)
class DecodingOptions:
    """Options of one request's decoding.

    Attributes:
        max_target_tokens: absolute limit on a segment's target tokens, end-of-sentence included;
            None leaves it to ``max_target_ratio`` and the bundle.
        max_target_ratio: limit relative to the segment's source tokens (end-of-sentence included);
            None takes the bundle's default.
        min_target_tokens: fewest target tokens of a segment, end-of-sentence included; 0 asks for none.
        min_target_ratio: the same, relative to the segment's source tokens; 0 asks for none.
        beam_size: K, live beams; 1 is greedy search.
        num_hypotheses: translations wanted of each segment, best first; at most `beam_size`.
        length_penalty: a, exponent of the score's length normalisation; 0 ranks by plain sums.
        normalisation: ``n ** a`` or GNMT's ``((5 + n) / 6) ** a``.
        patience: beam search goes on until K x patience hypotheses are finished.
        no_repeat_ngram_size: no sequence of so many tokens comes twice in a segment's target; 0 allows it.
        repetition_penalty: makes tokens that a segment's target has already less likely; 1 does nothing.
        forbidden: phrases that no translation may contain, as the tokenizer spells them at the start of a
            word (`app.runtime.guidance_of_request` says what that covers).
        alignment: tell what each target token was translated from.
    """

    max_target_tokens: int | None = None
    max_target_ratio: float | None = None
    min_target_tokens: int = 0
    min_target_ratio: float = 0.0
    beam_size: int = 1
    num_hypotheses: int = 1
    length_penalty: float = 1.0
    normalisation: LengthNormalisation = LengthNormalisation.POWER
    patience: float = 1.0
    no_repeat_ngram_size: int = 0
    repetition_penalty: float = 1.0
    forbidden: tuple[str, ...] = ()
    alignment: bool = False

    def __post_init__(self) -> None:
        """Refuse values no decoder can honour."""
        self._check_lengths()
        self._check_search()
        self._check_repetition()
        self._check_forbidden()

    @property
    def guides(self) -> bool:
        """Whether they ask for more than the model's own choice of tokens, so for a guided step."""
        return (
            self.min_target_tokens > 0
            or self.min_target_ratio > 0
            or self.no_repeat_ngram_size > 0
            or self.repetition_penalty != 1.0
            or bool(self.forbidden)
            or self.alignment
        )

    def target_bounds(
        self, num_source_tokens: int, *, default_ratio: float, model_limit: int
    ) -> TargetBounds:
        """How many target tokens one segment may take, end-of-sentence included.

        A ratio gives ``ceil(ratio * source tokens)``, as Marian's ``max-length-factor``
        (marian-dev, src/translator/beam_search.cpp). When bounds clash for a segment, the model's limit
        comes first, then the most that the request names, then the least that it names, and last the
        bundle's default ratio.

        Args:
            num_source_tokens: source length, end-of-sentence included.
            default_ratio: the bundle's ``max_target_ratio``.
            model_limit: the bundle's ``max_target_tokens``.
        """
        least = max(self.min_target_tokens, math.ceil(self.min_target_ratio * num_source_tokens))
        if self.max_target_ratio is None:
            most = math.ceil(default_ratio * num_source_tokens)
            if least >= most:
                most += least  # room to end behind the least
        else:
            most = math.ceil(self.max_target_ratio * num_source_tokens)
        if self.max_target_tokens is not None:
            most = min(most, self.max_target_tokens)
        most = min(max(1, most), model_limit)
        return TargetBounds(min(least, most), most)

    def target_limit(self, num_source_tokens: int, *, default_ratio: float, model_limit: int) -> int:
        """The most target tokens of `target_bounds`, from the same arguments."""
        bounds = self.target_bounds(num_source_tokens, default_ratio=default_ratio, model_limit=model_limit)
        return bounds.max_tokens

    def _check_lengths(self) -> None:
        max_tokens, max_ratio = self.max_target_tokens, self.max_target_ratio
        min_tokens, min_ratio = self.min_target_tokens, self.min_target_ratio
        if max_tokens is not None and not 1 <= max_tokens <= MAX_TARGET_TOKENS_LIMIT:
            raise InvalidOption(
                f"max_target_tokens is {max_tokens}; it must be between 1 and {MAX_TARGET_TOKENS_LIMIT}"
            )
        if max_ratio is not None and not 0.1 <= max_ratio <= MAX_TARGET_RATIO_LIMIT:
            raise InvalidOption(
                f"max_target_ratio is {max_ratio}; it must be between 0.1 and {MAX_TARGET_RATIO_LIMIT:g}"
            )
        if not 0 <= min_tokens <= MAX_TARGET_TOKENS_LIMIT:
            raise InvalidOption(
                f"min_target_tokens is {min_tokens}; it must be between 0 (none) and "
                f"{MAX_TARGET_TOKENS_LIMIT}"
            )
        if not 0.0 <= min_ratio <= MAX_TARGET_RATIO_LIMIT:
            raise InvalidOption(
                f"min_target_ratio is {min_ratio}; it must be between 0 (none) and {MAX_TARGET_RATIO_LIMIT:g}"
            )
        if max_tokens is not None and min_tokens > max_tokens:
            raise InvalidOption(
                f"min_target_tokens is {min_tokens} but max_target_tokens is {max_tokens}; the least may be "
                "at most the most. Lower one or raise the other"
            )
        if max_ratio is not None and min_ratio > max_ratio:
            raise InvalidOption(
                f"min_target_ratio is {min_ratio} but max_target_ratio is {max_ratio}; the least may be at "
                "most the most. Lower one or raise the other"
            )

    def _check_search(self) -> None:
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

    def _check_repetition(self) -> None:
        if not 0 <= self.no_repeat_ngram_size <= MAX_NGRAM_SIZE:
            raise InvalidOption(
                f"no_repeat_ngram_size is {self.no_repeat_ngram_size}; it must be between 0 (off) and "
                f"{MAX_NGRAM_SIZE}"
            )
        if not 1.0 <= self.repetition_penalty <= MAX_REPETITION_PENALTY:
            raise InvalidOption(
                f"repetition_penalty is {self.repetition_penalty}; it must be between 1 (off) and "
                f"{MAX_REPETITION_PENALTY:g}"
            )

    def _check_forbidden(self) -> None:
        if len(self.forbidden) > MAX_FORBIDDEN_PHRASES:
            raise InvalidOption(
                f"forbidden has {len(self.forbidden)} phrases, the limit is {MAX_FORBIDDEN_PHRASES}; "
                "leave out those this text cannot bring up"
            )
        for index, phrase in enumerate(self.forbidden):
            if not phrase.strip():
                raise InvalidOption(f"forbidden[{index}] is blank; leave it out or write a word")
            if len(phrase) > MAX_FORBIDDEN_CHARACTERS:
                raise InvalidOption(
                    f"forbidden[{index}] has {len(phrase)} characters, the limit is "
                    f"{MAX_FORBIDDEN_CHARACTERS}; forbid a part of it"
                )
            if any(unicodedata.category(character) in ("Cc", "Cs") for character in phrase):
                raise InvalidOption(
                    f"forbidden[{index}] holds a control character or half of a surrogate pair, which no "
                    "translation has; write it without"
                )
