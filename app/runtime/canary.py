"""A short translation by which a model shows that it can translate."""

from __future__ import annotations

from app.decoding.options import DecodingOptions
from app.errors import BundleUnsupported, DragomanError
from app.runtime.dispatch import Terms, make_entry
from app.runtime.entry import Outcome
from app.runtime.lane import Lane
from app.runtime.request import TranslationRequest
from app.runtime.served_model import ServedModel

_TEXT = "Hello."


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
        BundleUnsupported: a graph fails, or computes a score that is no number.
    """
    kinds = [DecodingOptions()]
    if model.max_beam_size > 1:
        kinds.append(DecodingOptions(beam_size=2))
    if model.can_guide:
        kinds.append(DecodingOptions(alignment=True))
    for options in kinds:
        for outcome in _translated(model, lane, options):
            if isinstance(outcome.result, DragomanError):
                cause = outcome.result.__cause__ or outcome.result
                # The frames that the cause has passed hold this outcome: a circle, with the model in it.
                outcome.result.__cause__ = None
                raise BundleUnsupported(
                    f"bundle {model.id} was loaded and cannot translate ({type(cause).__name__}); export it "
                    "again with this version"
                ) from cause


def _translated(model: ServedModel, lane: Lane, options: DecodingOptions) -> list[Outcome]:
    prepared, plans = model.prepare(canary_of(model, options))
    segments = [segment for text in prepared for segment in text.segments]
    outcomes: list[Outcome] = []
    for segment, plan in zip(segments, plans, strict=True):
        lane.add(make_entry(model, segment, plan, Terms(0, options), outcomes.append))
    while lane.has_work:
        lane.tick()
    return outcomes
