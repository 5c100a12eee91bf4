"""A text to token ids and back: segments, wrapping, warnings. Pure apart from the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from app.decoding.hypothesis import FinishReason, Hypothesis
from app.decoding.shortlist import Shortlist
from app.runtime.request import (
    Alignment,
    Alternative,
    SegmentResult,
    TextResult,
    TranslationWarning,
    WarningCode,
)
from app.runtime.runner import Int32Array
from app.text import SegmentedText, Tokenizer, split, wrap


@dataclass(frozen=True)
class PreparedSegment:
    """One unit of scheduling.

    Attributes:
        source: the slice of the text.
        source_ids: its token ids with the final end-of-sentence; at most the model's limit.
        candidates: sorted token ids its translation is limited to, or None.
    """

    source: str
    source_ids: tuple[int, ...]
    candidates: Int32Array | None = None


@dataclass(frozen=True)
class PreparedText:
    """A text cut into segments that all fit the model.

    Attributes:
        layout: segments and gaps; joining them gives the text byte for byte.
        segments: in the order of `layout`.
        warnings: what the cutting found.
    """

    layout: SegmentedText
    segments: tuple[PreparedSegment, ...]
    warnings: tuple[TranslationWarning, ...]

    @property
    def num_tokens(self) -> int:
        """Source tokens of all segments."""
        return sum(len(segment.source_ids) for segment in self.segments)


def prepare(
    text: str,
    *,
    language: str,
    tokenizer: Tokenizer,
    max_source_tokens: int,
    shortlist: Shortlist | None = None,
) -> PreparedText:
    """Cut a text into segments, tokenise them and look up their candidates.

    Args:
        text: valid Unicode (`check_text`).
        language: BCP-47 code of the text, for sentence borders.
        tokenizer: the model's; characters it does not know are folded to plain ones where it can.
        max_source_tokens: a longer segment is wrapped, and reported.
        shortlist: what limits the output, or None.
    """

    def segment_of(source: str, ids: Sequence[int]) -> PreparedSegment:
        return PreparedSegment(source, tuple(ids), None if shortlist is None else shortlist.candidates(ids))

    sentences = split(text, language)
    gaps: list[str] = [sentences.gaps[0]]
    segments: list[PreparedSegment] = []
    warnings: list[TranslationWarning] = []
    ids_of = tokenizer.encode_sources([tokenizer.fold_unknown(sentence) for sentence in sentences.segments])
    for sentence, ids, gap_after in zip(sentences.segments, ids_of, sentences.gaps[1:], strict=True):
        if len(ids) <= max_source_tokens:
            segments.append(segment_of(sentence, ids))
        else:
            pieces = wrap(
                sentence,
                max_tokens=max_source_tokens,
                count_tokens=lambda piece: tokenizer.count(tokenizer.fold_unknown(piece)),
            )
            warnings.append(
                TranslationWarning(
                    WarningCode.SEGMENT_WRAPPED,
                    len(segments),
                    f"a segment of {len(ids)} tokens exceeds the model's {max_source_tokens} and was "
                    f"translated in {len(pieces.segments)} pieces",
                )
            )
            gaps[-1] += pieces.gaps[0]
            piece_ids = tokenizer.encode_sources([tokenizer.fold_unknown(piece) for piece in pieces.segments])
            segments += [
                segment_of(piece, ids) for piece, ids in zip(pieces.segments, piece_ids, strict=True)
            ]
            gaps += pieces.gaps[1:]
            # The last gap appended so far, inside or before the pieces, also holds what follows them.
            gaps[-1] += gap_after
            continue
        gaps.append(gap_after)
    warnings += _unknown_character_warnings(segments, tokenizer)
    layout = SegmentedText(segments=tuple(segment.source for segment in segments), gaps=tuple(gaps))
    return PreparedText(layout, tuple(segments), tuple(sorted(warnings, key=lambda warning: warning.segment)))


def _unknown_character_warnings(
    segments: Sequence[PreparedSegment], tokenizer: Tokenizer
) -> list[TranslationWarning]:
    warnings = []
    for index, segment in enumerate(segments):
        if tokenizer.unknown_id not in segment.source_ids:
            continue
        count = tokenizer.unknown_characters(tokenizer.fold_unknown(segment.source))
        warnings.append(
            TranslationWarning(
                WarningCode.UNKNOWN_CHARACTERS,
                index,
                f"the model does not know {count} of the segment's characters; they may be missing in the "
                "translation",
            )
        )
    return warnings


def assemble(
    prepared: PreparedText,
    hypotheses: Sequence[Sequence[Hypothesis]],
    tokenizer: Tokenizer,
    *,
    with_alignment: bool = False,
) -> TextResult:
    """Detokenise and put the translations into the text's gaps.

    Args:
        prepared: the text.
        hypotheses: for each segment, in order, its hypotheses, best first, at least one.
        tokenizer: the model's.
        with_alignment: whether the best hypotheses kept their attention, to be told.
    """
    best = [ranked[0] for ranked in hypotheses]
    targets = tokenizer.decode_batch([hypothesis.token_ids for hypothesis in best])
    alternatives = [_alternatives(ranked[1:], tokenizer) for ranked in hypotheses]
    results = tuple(
        SegmentResult(
            source=segment.source,
            target=target,
            num_source_tokens=len(segment.source_ids),
            num_target_tokens=hypothesis.num_decoded,
            score=hypothesis.score,
            finish_reason=hypothesis.finish_reason,
            alternatives=others,
            alignment=_alignment(segment, hypothesis, tokenizer) if with_alignment else None,
        )
        for segment, hypothesis, target, others in zip(
            prepared.segments, best, targets, alternatives, strict=True
        )
    )
    warnings = [*prepared.warnings, *_incomplete_warnings(best)]
    return TextResult(
        text=prepared.layout.join(targets),
        segments=results,
        warnings=tuple(sorted(warnings, key=lambda warning: warning.segment)),
        alternatives=_whole_alternatives(prepared.layout, results),
    )


def _incomplete_warnings(best: Sequence[Hypothesis]) -> list[TranslationWarning]:
    why = {
        FinishReason.LENGTH: "decoding stopped at its limit of {} tokens before the sentence ended; raise "
        "max_target_tokens or max_target_ratio if the translation is incomplete",
        FinishReason.FORBIDDEN: "decoding stopped after {} tokens before the sentence ended, because the "
        "options forbid everything that could follow; ask for less with min_target_tokens, "
        "min_target_ratio, no_repeat_ngram_size or forbidden",
    }
    return [
        TranslationWarning(
            WarningCode.TARGET_TRUNCATED, index, why[hypothesis.finish_reason].format(hypothesis.num_decoded)
        )
        for index, hypothesis in enumerate(best)
        if hypothesis.finish_reason in why
    ]


def _alignment(segment: PreparedSegment, hypothesis: Hypothesis, tokenizer: Tokenizer) -> Alignment:
    weights: list[list[float]] = []
    if hypothesis.attention is not None:  # an empty translation has none
        # Padding stands behind the source. Rounded as float64: four digits then print as four.
        own = hypothesis.attention[:, : len(segment.source_ids)].astype(np.float64)
        weights = own.round(4).tolist()
    return Alignment(
        source_tokens=tuple(tokenizer.pieces(segment.source_ids)),
        target_tokens=tuple(tokenizer.pieces(hypothesis.token_ids)),
        weights=tuple(map(tuple, weights)),
    )


def _whole_alternatives(layout: SegmentedText, segments: Sequence[SegmentResult]) -> tuple[str, ...]:
    ranked = [[segment.target, *(other.target for other in segment.alternatives)] for segment in segments]
    most = max((len(targets) for targets in ranked), default=0)
    texts = [
        layout.join([targets[min(rank, len(targets) - 1)] for targets in ranked]) for rank in range(most)
    ]
    return tuple(dict.fromkeys(texts))[1:]


def _alternatives(hypotheses: Sequence[Hypothesis], tokenizer: Tokenizer) -> tuple[Alternative, ...]:
    targets = tokenizer.decode_batch([hypothesis.token_ids for hypothesis in hypotheses])
    return tuple(
        Alternative(target=target, score=hypothesis.score)
        for hypothesis, target in zip(hypotheses, targets, strict=True)
    )
