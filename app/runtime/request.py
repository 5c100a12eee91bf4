"""What the engine is asked and what it answers; the web layer turns these into each dialect."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from app.decoding.hypothesis import FinishReason
from app.decoding.options import DecodingOptions
from app.errors import InvalidOption, InvalidRequest


class Priority(StrEnum):
    """Who goes first when both wait; see `Scheduler`."""

    INTERACTIVE = "interactive"
    """Somebody is waiting for the answer."""
    BULK = "bulk"
    """Takes what the others leave, but always a stated least share."""


@dataclass(frozen=True)
class TranslationRequest:
    """Texts to be translated together.

    Attributes:
        texts: any number of texts of any length, each may hold several paragraphs.
        source: BCP-47 code of the source language, case-insensitive.
        target: BCP-47 code of the target language, case-insensitive.
        options: decoding options for every segment.
        target_prefixes: for each text what the translation of its first segment starts with, empty for
            nothing; none at all when no text has one.
        timeout_s: seconds from the call in which the answer is worth having; None leaves it to the engine.
        priority: whether it goes before or after others.
    """

    texts: tuple[str, ...]
    source: str
    target: str
    options: DecodingOptions = field(default_factory=DecodingOptions)
    target_prefixes: tuple[str, ...] = ()
    timeout_s: float | None = None
    priority: Priority = Priority.INTERACTIVE

    def __post_init__(self) -> None:
        """Refuse prefixes that no text can be found for, and times that are none."""
        if self.timeout_s is not None and not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            raise InvalidOption(
                f"the request's timeout is {self.timeout_s:g} s; it must be a number of seconds above 0"
            )
        if self.target_prefixes and len(self.target_prefixes) != len(self.texts):
            raise InvalidRequest(
                f"target_prefixes has {len(self.target_prefixes)} items and texts has {len(self.texts)}; "
                "send one for each text, an empty one where the translation is free"
            )

    @property
    def prefixes(self) -> tuple[str, ...]:
        """`target_prefixes` with an empty one for each text when there are none."""
        return self.target_prefixes or ("",) * len(self.texts)

    @property
    def is_guided(self) -> bool:
        """Whether any segment's choice of tokens is not the model's alone."""
        return self.options.guides or any(self.prefixes)


class WarningCode(StrEnum):
    """Facts about a translation its reader should know."""

    SEGMENT_WRAPPED = "segment_wrapped"
    """A segment exceeded the model's source limit and was translated in pieces."""
    TARGET_TRUNCATED = "target_truncated"
    """Decoding ended before end-of-sentence, at its limit or because the request forbids all that could
    follow: the translation may be incomplete."""
    UNKNOWN_CHARACTERS = "unknown_characters"
    """The source holds characters the model does not know; they may be missing in the target."""


@dataclass(frozen=True)
class TranslationWarning:
    """One warning about one segment of one text.

    Attributes:
        code: what happened.
        segment: index into the text's segments.
        message: the value and the limit, without the text itself.
    """

    code: WarningCode
    segment: int
    message: str


@dataclass(frozen=True)
class Alignment:
    """What each token of a translation was made from, by the decoder's attention to the source.

    Attributes:
        source_tokens: the source's pieces, end-of-sentence included.
        target_tokens: the translation's pieces without end-of-sentence.
        weights: for each target token one weight for each source token, rounded to 4 digits; a row adds up
            to 1 as far as the rounding lets it.
    """

    source_tokens: tuple[str, ...]
    target_tokens: tuple[str, ...]
    weights: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Alternative:
    """A less probable translation of a segment.

    Attributes:
        target: the translation.
        score: as `SegmentResult.score`.
    """

    target: str
    score: float


@dataclass(frozen=True)
class SegmentResult:
    """One segment's translation.

    Attributes:
        source: the segment, a slice of the text.
        target: its translation.
        num_source_tokens: end-of-sentence included.
        num_target_tokens: decoded tokens, a given prefix and a chosen end-of-sentence included.
        score: length-normalised log-probability (see `Hypothesis.score`).
        finish_reason: why decoding ended.
        alternatives: further hypotheses, best first; empty unless more than one was asked for.
        alignment: where the translation comes from; None unless asked for.
    """

    source: str
    target: str
    num_source_tokens: int
    num_target_tokens: int
    score: float
    finish_reason: FinishReason
    alternatives: tuple[Alternative, ...] = ()
    alignment: Alignment | None = None


@dataclass(frozen=True)
class TextResult:
    """One text's translation, gaps restored byte for byte.

    Attributes:
        text: the translation.
        segments: in the order of the text; empty when there was nothing to translate.
        warnings: in the order of the segments.
        alternatives: further translations of the whole text, made of each segment's next hypothesis
            (its last one where it has no more); distinct, without `text` itself.
    """

    text: str
    segments: tuple[SegmentResult, ...]
    warnings: tuple[TranslationWarning, ...]
    alternatives: tuple[str, ...] = ()


@dataclass(frozen=True)
class Timings:
    """Where the time of one request went, in seconds.

    Attributes:
        total_s: from the call to the answer.
        queue_s: the longest wait of a segment for its slot.
        decode_s: the longest decoding of a segment, encoder included.
        prepared_s: from the call to when all texts were cut up and tokenised.
        first_row_s: from the call to when the first segment got its row; as `decoded_s` if none needed one.
        first_encoded_s: from the call to when that segment's encoder pass had ended.
        decoded_s: from the call to when the last segment's last step had ended; what is left is putting the
            texts together.
    """

    total_s: float
    queue_s: float
    decode_s: float
    prepared_s: float = 0.0
    first_row_s: float = 0.0
    first_encoded_s: float = 0.0
    decoded_s: float = 0.0


@dataclass(frozen=True)
class TranslationResult:
    """The answer to a request; ``len(texts)`` equals the request's."""

    texts: tuple[TextResult, ...]
    model: str
    timings: Timings


@dataclass(frozen=True)
class PairInfo:
    """A language pair the engine translates.

    Attributes:
        source: BCP-47 code.
        target: BCP-47 code.
        model: bundle id.
    """

    source: str
    target: str
    model: str
