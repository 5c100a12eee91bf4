"""A short translation by which a model shows that it can translate.

What a sound model of any language makes of the canary cannot be known. What damaged weights make of it can:
scores that are no numbers, which `app.runtime.lane` refuses in every translation, no text at all, or the same
few tokens again and again until the limit ends it. A translation that merely reaches its limit is let pass:
a bundle's limit may be short for a language that takes many tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from app.decoding.hypothesis import FinishReason, Hypothesis
from app.decoding.options import DecodingOptions
from app.errors import BundleUnsupported, DragomanError
from app.runtime.dispatch import Terms, make_entry
from app.runtime.entry import Outcome
from app.runtime.lane import Lane
from app.runtime.preparation import PreparedText
from app.runtime.request import TranslationRequest
from app.runtime.served_model import ServedModel

_TEXT = "Hello."
_MAX_PERIOD = 3
_MIN_REPEATS = 3
"""One to three tokens so many times, and nothing else up to the limit, are no translation of a word."""


def canary_of(model: ServedModel, options: DecodingOptions | None = None) -> TranslationRequest:
    """The request that shows whether a model can translate."""
    pair = model.pairs[0]
    return TranslationRequest((_TEXT,), pair.source, pair.target, options or DecodingOptions())


def prove(model: ServedModel, lane: Lane) -> None:
    """Translate a canary with each kind of search that the model has, in the calling thread.

    Args:
        model: newly loaded.
        lane: of this model; no worker has it.

    Raises:
        BundleUnsupported: a graph fails, computes a score that is no number, or makes no sense.
    """
    kinds = [DecodingOptions()]
    if model.max_beam_size > 1:
        kinds.append(DecodingOptions(beam_size=2))
    if model.can_guide:
        kinds.append(DecodingOptions(alignment=True))
    for options in kinds:
        request, prepared, outcomes = _translated(model, lane, options)
        for outcome in outcomes:
            if isinstance(outcome.result, DragomanError):
                cause = outcome.result.__cause__ or outcome.result
                # The frames that the cause has passed hold this outcome: a circle, with the model in it.
                outcome.result.__cause__ = None
                raise BundleUnsupported(
                    f"bundle {model.id} was loaded and cannot translate ({type(cause).__name__}); export it "
                    "again with this version"
                ) from cause
        check_canary(model, request, prepared, outcomes)


def check_canary(
    model: ServedModel,
    request: TranslationRequest,
    prepared: Sequence[PreparedText],
    outcomes: Iterable[Outcome],
) -> None:
    """Refuse a canary's translation that no sound model gives.

    Args:
        model: whose it is.
        request: the canary.
        prepared: its texts.
        outcomes: of its segments, none of them an error.

    Raises:
        BundleUnsupported: it is empty, or repeats itself up to its limit.
    """
    hypotheses = [outcome.result for outcome in outcomes if not isinstance(outcome.result, DragomanError)]
    fault = None
    if any(_repeats_itself(found[0]) for found in hypotheses):
        fault = "repeats the same tokens up to its limit"
    elif not all(text.text.strip() for text in model.assemble(request, prepared, hypotheses)):
        fault = "is empty"
    if fault is not None:
        raise BundleUnsupported(
            f"bundle {model.id} was loaded and cannot translate: its translation of {_TEXT!r} {fault}; its "
            "weights are damaged or do not belong to its graphs, export it again"
        )


def _repeats_itself(hypothesis: Hypothesis) -> bool:
    tokens = hypothesis.token_ids
    return hypothesis.finish_reason is FinishReason.LENGTH and any(
        len(tokens) >= _MIN_REPEATS * period and tokens[period:] == tokens[:-period]
        for period in range(1, _MAX_PERIOD + 1)
    )


def _translated(
    model: ServedModel, lane: Lane, options: DecodingOptions
) -> tuple[TranslationRequest, list[PreparedText], list[Outcome]]:
    request = canary_of(model, options)
    prepared, plans = model.prepare(request)
    segments = [segment for text in prepared for segment in text.segments]
    outcomes: list[Outcome] = []
    for segment, plan in zip(segments, plans, strict=True):
        lane.add(make_entry(model, segment, plan, Terms(0, options), outcomes.append))
    while lane.has_work:
        lane.tick()
    return request, prepared, outcomes
