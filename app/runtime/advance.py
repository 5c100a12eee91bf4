"""One decoder step of one row group: from the searches to the runner and back. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from app.decoding.beam import IMPOSSIBLE, BeamSearch
from app.decoding.greedy import GreedySearch
from app.decoding.guidance import Adjustment
from app.decoding.guided import GuidedBeamSearch
from app.runtime.entry import Entry
from app.runtime.runner import BeamStepInput, Float32Array, LogitAdjustments, ModelRunner, SearchKind

_NOT_ALLOWED = -1e8
"""Sums of log-probabilities below this went through a forbidden token (-1e9)."""


def advance(runner: ModelRunner, group: int, entries: Sequence[Entry]) -> list[Entry]:
    """Run one step over the group's entries, by slot, and tell every search its outcome.

    Returns:
        The entries whose search finished.

    Raises:
        ValueError: the runner returned what no graph of a sound model returns.
    """
    if runner.groups[group].kind is SearchKind.GREEDY:
        return _advance_greedy(runner, group, entries)
    return _advance_beams(runner, group, entries)


def _advance_greedy(runner: ModelRunner, group: int, entries: Sequence[Entry]) -> list[Entry]:
    searches = [entry.search for entry in entries if isinstance(entry.search, GreedySearch)]
    output = runner.step(
        group,
        np.array([search.last_id for search in searches], dtype=np.int64),
        np.array([search.num_decoded for search in searches], dtype=np.int64),
    )
    _check_shapes((len(entries),), token_ids=output.token_ids, log_probs=output.log_probs)
    token_ids, log_probs = output.token_ids.tolist(), output.log_probs.tolist()
    if not math.isfinite(sum(log_probs)):  # one that is not makes the sum likewise
        raise ValueError("the step returned a log-probability that is not a finite number")
    _check_range("token", token_ids, runner.vocabulary_size)
    chosen = zip(entries, searches, token_ids, log_probs, strict=True)
    return [entry for entry, search, token_id, log_prob in chosen if search.advance(token_id, log_prob)]


def _advance_beams(runner: ModelRunner, group: int, entries: Sequence[Entry]) -> list[Entry]:
    searches = [entry.search for entry in entries if isinstance(entry.search, BeamSearch)]
    num_beams = runner.groups[group].num_beams
    is_guided = runner.groups[group].kind is SearchKind.GUIDED
    num_candidates = min(2 * num_beams, runner.vocabulary_size)
    output = runner.beam_step(
        group,
        BeamStepInput(
            last_ids=np.array([search.last_ids for search in searches], dtype=np.int64),
            positions=np.array([search.num_decoded for search in searches], dtype=np.int64),
            scores=np.array([search.scores for search in searches], dtype=np.float32),
            parents=np.array([search.parents for search in searches], dtype=np.int64),
            num_candidates=num_candidates,
            adjustments=_adjustments(searches, num_beams) if is_guided else None,
        ),
    )
    shape = (len(entries), num_candidates)
    _check_shapes(shape, token_ids=output.token_ids, beams=output.beams, scores=output.scores)
    # The best continuation always can be.
    if not (np.isfinite(output.scores[:, 0]).all() and (output.scores < np.inf).all()):
        raise ValueError("the step returned a score that is not a number, or none that can be")
    _check_range("token", output.token_ids.ravel().tolist(), runner.vocabulary_size)
    _check_range("beam", output.beams.ravel().tolist(), num_beams)
    scores = np.where(output.scores < _NOT_ALLOWED, IMPOSSIBLE, output.scores)
    attention: Iterable[Float32Array | None] = itertools.repeat(None, len(entries))
    if is_guided:
        if output.attention is None:
            raise ValueError("the step of a guided group returned no attention")
        attention = output.attention
    chosen = zip(
        entries,
        searches,
        output.token_ids.tolist(),
        output.beams.tolist(),
        scores.tolist(),
        attention,
        strict=True,
    )
    return [entry for entry, search, *continuations in chosen if search.advance(*continuations)]


def _adjustments(searches: Sequence[BeamSearch], num_beams: int) -> LogitAdjustments:
    rows: list[int] = []
    changes: list[Adjustment] = []
    for index, search in enumerate(searches):
        assert isinstance(search, GuidedBeamSearch)  # guided groups take no other
        for beam, of_beam in enumerate(search.adjustments()):
            rows += [index * num_beams + beam] * len(of_beam)
            changes += of_beam
    return LogitAdjustments(
        rows=np.array(rows, dtype=np.int64),
        token_ids=np.array([change.token_id for change in changes], dtype=np.int64),
        divisors=np.array([change.divisor for change in changes], dtype=np.float32),
        addends=np.array([change.addend for change in changes], dtype=np.float32),
    )


def _check_shapes(expected: tuple[int, ...], **arrays: npt.NDArray[np.generic]) -> None:
    for name, array in arrays.items():
        if array.shape != expected:
            raise ValueError(f"the step returned {name} {array.shape}; expected {expected}")


def _check_range(what: str, ids: Sequence[int], limit: int) -> None:
    """A wrong id would surface as a wrong translation."""
    lowest, highest = min(ids), max(ids)
    if lowest < 0 or highest >= limit:
        raise ValueError(f"the step chose {what} {lowest} or {highest}; there are {limit}")
