"""The search that a request's options ask for."""

from __future__ import annotations

from app.decoding.beam import BeamOptions, BeamSearch
from app.decoding.greedy import GreedySearch
from app.decoding.guidance import Guidance
from app.decoding.guided import GuidedBeamSearch
from app.decoding.options import DecodingOptions

Search = GreedySearch | BeamSearch
"""Collects the tokens of one segment; greedy takes one row, a beam search `num_beams`."""


def make_search(
    options: DecodingOptions, *, eos_id: int, max_target_tokens: int, guidance: Guidance | None = None
) -> Search:
    """A fresh search for one segment.

    Args:
        options: the request's.
        eos_id: token that ends the target.
        max_target_tokens: the segment's limit, end-of-sentence included (`DecodingOptions.target_limit`).
        guidance: what is asked of this segment's target, or None to leave the choice to the model.
    """
    if options.beam_size == 1 and guidance is None:
        return GreedySearch(
            eos_id=eos_id,
            max_target_tokens=max_target_tokens,
            length_penalty=options.length_penalty,
            normalisation=options.normalisation,
        )
    beam_options = BeamOptions(
        beam_size=options.beam_size,
        num_hypotheses=options.num_hypotheses,
        length_penalty=options.length_penalty,
        normalisation=options.normalisation,
        patience=options.patience,
        max_target_tokens=max_target_tokens,
    )
    if guidance is None:
        return BeamSearch(eos_id=eos_id, options=beam_options)
    return GuidedBeamSearch(eos_id=eos_id, options=beam_options, guidance=guidance)
