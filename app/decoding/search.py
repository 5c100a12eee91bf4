"""The search that a request's options ask for."""

from __future__ import annotations

from app.decoding.beam import BeamOptions, BeamSearch
from app.decoding.greedy import GreedySearch
from app.decoding.options import DecodingOptions

Search = GreedySearch | BeamSearch
"""Collects the tokens of one segment; greedy takes one row, a beam search `num_beams`."""


def make_search(options: DecodingOptions, *, eos_id: int, max_target_tokens: int) -> Search:
    """A fresh search for one segment.

    Args:
        options: the request's.
        eos_id: token that ends the target.
        max_target_tokens: the segment's limit, end-of-sentence included (`DecodingOptions.target_limit`).
    """
    if options.beam_size == 1:
        return GreedySearch(
            eos_id=eos_id,
            max_target_tokens=max_target_tokens,
            length_penalty=options.length_penalty,
            normalisation=options.normalisation,
        )
    return BeamSearch(
        eos_id=eos_id,
        options=BeamOptions(
            beam_size=options.beam_size,
            num_hypotheses=options.num_hypotheses,
            length_penalty=options.length_penalty,
            normalisation=options.normalisation,
            patience=options.patience,
            max_target_tokens=max_target_tokens,
        ),
    )
