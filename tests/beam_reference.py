"""Drives a beam search over any model that tells log-probabilities after a prefix: no cache, no graph."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from app.decoding.beam import BeamOptions, BeamSearch
from app.decoding.hypothesis import Hypothesis

Prefix = tuple[int, ...]
LogProbs = Callable[[Prefix], npt.NDArray[np.floating]]


def search_beams(log_probs: LogProbs, options: BeamOptions, *, eos_id: int = 0) -> tuple[Hypothesis, ...]:
    """Drive a search as a lane does: the best 2K continuations of all its beams, best first."""
    search = BeamSearch(eos_id=eos_id, options=options)
    beams: list[Prefix] = [()] * options.beam_size
    while not search.finished:
        beams = [
            (*beams[parent], last) if search.num_decoded else ()
            for parent, last in zip(search.parents, search.last_ids, strict=True)
        ]
        assert all(len(beam) == search.num_decoded for beam in beams)
        table = np.stack([score + log_probs(beam) for score, beam in zip(search.scores, beams, strict=True)])
        order = np.argsort(-table, axis=None, kind="stable")[: 2 * options.beam_size]
        best_beams, tokens = np.unravel_index(order, table.shape)
        search.advance(tokens.tolist(), best_beams.tolist(), table[best_beams, tokens].tolist())
    return search.hypotheses()
