"""The native dialect's bodies. Strict: no coercion, no unknown fields, no NaN."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field

from app.decoding.options import (
    MAX_BEAM_SIZE,
    MAX_FORBIDDEN_CHARACTERS,
    MAX_FORBIDDEN_PHRASES,
    MAX_NGRAM_SIZE,
    MAX_REPETITION_PENALTY,
    MAX_TARGET_RATIO_LIMIT,
    MAX_TARGET_TOKENS_LIMIT,
)

_PHRASE_PATTERN = (
    r"^[^\u0000-\u001f\u007f-\u009f]*[^\s\u0000-\u001f\u007f-\u009f][^\u0000-\u001f\u007f-\u009f]*$"
)


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


_Phrase = Annotated[
    str, Field(max_length=MAX_FORBIDDEN_CHARACTERS, json_schema_extra={"pattern": _PHRASE_PATTERN})
]
LanguageCode = Annotated[
    str, Field(json_schema_extra={"pattern": "^[A-Za-z]{2,8}([-_][A-Za-z0-9]{2,8}){0,4}$"})
]
"""As `app.api.languages.checked_code` has it."""


class OptionsBody(_Body):
    """Decoding options, the same for every segment of the request."""

    max_target_tokens: int | None = Field(
        default=None,
        ge=1,
        le=MAX_TARGET_TOKENS_LIMIT,
        description="Most target tokens of a segment, end-of-sentence included; null: the model's limit.",
    )
    max_target_ratio: float | None = Field(
        default=None,
        ge=0.1,
        le=MAX_TARGET_RATIO_LIMIT,
        description="Most target tokens per source token of a segment; null takes the model's default.",
    )
    min_target_tokens: int = Field(
        default=0,
        ge=0,
        le=MAX_TARGET_TOKENS_LIMIT,
        description="Fewest target tokens of a segment, end-of-sentence included; 0: none. Raises the "
        "limit of the model's default ratio; a max_ option that the request names comes before it.",
    )
    min_target_ratio: float = Field(
        default=0.0,
        ge=0,
        le=MAX_TARGET_RATIO_LIMIT,
        description="Fewest target tokens per source token of a segment; 0: none.",
    )
    beam_size: int = Field(default=1, ge=1, le=MAX_BEAM_SIZE, description="Live beams; 1 is greedy search.")
    num_hypotheses: int = Field(
        default=1,
        ge=1,
        le=MAX_BEAM_SIZE,
        description="Translations wanted of each segment, best first; at most beam_size.",
    )
    length_penalty: float = Field(
        default=1.0, ge=0, le=5, description="Exponent a of the score's length normalisation; 0: plain sums."
    )
    normalisation: Literal["power", "gnmt"] = Field(
        default="power", description="Scores are divided by n**a (power) or ((5 + n) / 6)**a (gnmt)."
    )
    patience: float = Field(
        default=1.0, ge=1, le=10, description="Beam search ends after beam_size x patience hypotheses."
    )
    no_repeat_ngram_size: int = Field(
        default=0,
        ge=0,
        le=MAX_NGRAM_SIZE,
        description="No sequence of so many tokens comes twice in a segment's translation; 0: off.",
    )
    repetition_penalty: float = Field(
        default=1.0,
        ge=1,
        le=MAX_REPETITION_PENALTY,
        description="Tokens a segment's translation has already become less likely: their logits are "
        "divided by it, or multiplied when negative; 1: off.",
    )
    forbidden: Annotated[list[_Phrase], FailFast()] = Field(
        default=[],
        max_length=MAX_FORBIDDEN_PHRASES,
        description="Phrases that no translation may contain where a word starts, in whatever tokens the "
        "model spells them; words that begin with one and go on in further tokens are forbidden too. "
        "Other cases of the letters, and the phrase inside a word or right behind a bracket or quotation "
        "mark, are not: list them as well. None may be blank or hold control characters.",
    )
    alignment: bool = Field(
        default=False,
        description="Tell for each segment which source tokens each target token was made from. For "
        "requests of up to 20,000 characters.",
    )


class TranslateBody(_Body):
    """Texts to be translated."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {"texts": ["Good morning.", "How are you?"], "source": "en", "target": "pt"},
        }
    )

    # A million wrong items would be a million faults of which three are named.
    texts: Annotated[list[str], FailFast()] = Field(
        description="Texts of any length, each may hold several paragraphs."
    )
    source: LanguageCode = Field(
        description="BCP-47 code of the source language, in any case; en-GB also finds en."
    )
    target: LanguageCode = Field(
        description="BCP-47 code of the target language, in any case; pt-BR also finds pt."
    )
    options: OptionsBody = Field(default_factory=OptionsBody, description="Decoding options.")
    target_prefixes: Annotated[list[str], FailFast()] = Field(
        default=[],
        description="None at all, or one for each text: what the translation of the text's first segment "
        "starts with, byte for byte; empty leaves it free. The model may go on within its last word; a space "
        "at the end says that the word is complete. A text without words takes an empty one only.",
    )


class AlternativeAnswer(_Body):
    """A less probable translation of a segment."""

    target: str = Field(description="The translation.")
    score: float = Field(description="As the segment's.")


class AlignmentAnswer(_Body):
    """What each target token was made from: the decoder's attention to the source."""

    source_tokens: list[str] = Field(
        description="Pieces of the source, the final end-of-sentence included; U+2581 stands for a space."
    )
    target_tokens: list[str] = Field(description="Pieces of the translation, without end-of-sentence.")
    weights: list[list[float]] = Field(
        description="For each target token one weight for each source token, to 4 digits; a row adds up to 1."
    )


class SegmentAnswer(_Body):
    """One segment, the unit of translation."""

    source: str = Field(description="The segment, a slice of the text.")
    target: str = Field(description="Its translation.")
    num_source_tokens: int = Field(description="Source tokens, end-of-sentence included.")
    num_target_tokens: int = Field(
        description="Tokens of the translation, a target prefix and a chosen end-of-sentence included."
    )
    score: float = Field(
        description="Natural log-probability, normalised by length as the options say; 0 is certain. A "
        "target prefix costs nothing but counts in the length. Equal up to the rounding of float32 whatever "
        "else is translated at the time."
    )
    finish_reason: str = Field(
        description="eos; length when the limit on target tokens was reached; forbidden when the options "
        "forbid everything that could follow."
    )
    alternatives: list[AlternativeAnswer] = Field(
        description="Further hypotheses, best first; empty unless num_hypotheses is above 1."
    )
    alignment: AlignmentAnswer | None = Field(
        default=None, description="Of the translation, not of its alternatives; null unless asked for."
    )


class WarningAnswer(_Body):
    """A fact about the translation that its reader should know."""

    code: str = Field(description="segment_wrapped, target_truncated or unknown_characters.")
    segment: int = Field(description="Index into the text's segments.")
    message: str = Field(description="The value and the limit.")


class TextAnswer(_Body):
    """One text's translation."""

    text: str = Field(description="The translation; whitespace between segments is that of the source.")
    segments: list[SegmentAnswer] = Field(description="In the order of the text.")
    warnings: list[WarningAnswer] = Field(description="In the order of the segments.")
    alternatives: list[str] = Field(
        description="Further translations of the whole text; empty unless num_hypotheses is above 1."
    )


class TimingsAnswer(_Body):
    """Where the time went, in seconds."""

    total_s: float = Field(description="From the call to the answer.")
    queue_s: float = Field(description="The longest wait of a segment for its place in a batch.")
    decode_s: float = Field(description="The longest decoding of a segment.")


class TranslateAnswer(_Body):
    """The answer; as many texts as were sent, in their order."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "texts": [
                    {
                        "text": "Bom dia.",
                        "segments": [
                            {
                                "source": "Good morning.",
                                "target": "Bom dia.",
                                "num_source_tokens": 4,
                                "num_target_tokens": 4,
                                "score": -0.08,
                                "finish_reason": "eos",
                                "alternatives": [],
                                "alignment": None,
                            }
                        ],
                        "warnings": [],
                        "alternatives": [],
                    }
                ],
                "source": "en",
                "target": "pt",
                "model": "dragoman-en-pt",
                "timings": {"total_s": 0.031, "queue_s": 0.001, "decode_s": 0.029},
            }
        }
    )

    texts: list[TextAnswer]
    source: str = Field(description="The loaded code that the request's source stands for.")
    target: str = Field(description="The loaded code that the request's target stands for.")
    model: str = Field(description="Id of the bundle that translated.")
    timings: TimingsAnswer


class ModelAnswer(_Body):
    """A language pair and the bundle that translates it."""

    id: str = Field(description="Id of the bundle.")
    source: str = Field(description="BCP-47 code.")
    target: str = Field(description="BCP-47 code.")


class ModelsAnswer(_Body):
    """All loaded pairs."""

    models: list[ModelAnswer]


class ErrorDetail(_Body):
    """What went wrong."""

    code: str = Field(description="Stable name, for programs.")
    message: str = Field(description="The value, the limit and the remedy, for people.")
    retryable: bool = Field(description="Whether the same call may succeed later.")


class ErrorAnswer(_Body):
    """Every error below /v1."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "error": {
                    "code": "unsupported_pair",
                    "message": "en to xx is not available; available are: en to pt, pt to en",
                    "retryable": False,
                }
            }
        }
    )

    error: ErrorDetail
