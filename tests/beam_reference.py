"""Drives a beam search over any model that tells log-probabilities after a prefix: no cache, no graph.

Also what a request's guidance means, from its definition: no code is shared with app.decoding.guidance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from app.decoding.beam import BeamOptions, BeamSearch
from app.decoding.guidance import Adjustment, Guidance
from app.decoding.guided import GuidedBeamSearch
from app.decoding.hypothesis import Float32Array, Hypothesis

Prefix = tuple[int, ...]
Logits = Callable[[Prefix], npt.NDArray[np.floating]]
LogProbs = Callable[[Prefix], npt.NDArray[np.floating]]
Attention = Callable[[Prefix], Float32Array]


def search_beams(log_probs: LogProbs, options: BeamOptions, *, eos_id: int = 0) -> tuple[Hypothesis, ...]:
    """Drive a search as a lane does: the best 2K continuations of all its beams, best first."""
    search = BeamSearch(eos_id=eos_id, options=options)
    beams: list[Prefix] = [()] * options.beam_size
    while not search.finished:
        beams = _followed(search, beams)
        search.advance(*_best(search, [log_probs(beam) for beam in beams]))
    return search.hypotheses()


def search_guided(
    logits: Logits,
    options: BeamOptions,
    guidance: Guidance,
    *,
    eos_id: int = 0,
    attention: Attention | None = None,
) -> tuple[Hypothesis, ...]:
    """Drive a guided search as a lane does, the search's own adjustments applied to the logits."""
    search = GuidedBeamSearch(eos_id=eos_id, options=options, guidance=guidance)
    beams: list[Prefix] = [()] * options.beam_size
    while not search.finished:
        beams = _followed(search, beams)
        adjusted = [
            with_adjustments(logits(beam), changes)
            for beam, changes in zip(beams, search.adjustments(), strict=True)
        ]
        # As the graph does: a stuck beam must not share all probability among what is forbidden.
        rows = [np.where(row < -1e8, -1e9, log_softmax(row)) for row in adjusted]
        token_ids, best_beams, scores = _best(search, rows)
        looked_at = None if attention is None else np.stack([attention(beam) for beam in beams])
        allowed = [score if score > -1e8 else -math.inf for score in scores]
        search.advance(token_ids, best_beams, allowed, looked_at)
    return search.hypotheses()


def _followed(search: BeamSearch, beams: Sequence[Prefix]) -> list[Prefix]:
    """The targets of the live beams, from nothing but parents and last tokens, as a cache follows them."""
    followed = [
        (*beams[parent], last) if search.num_decoded else ()
        for parent, last in zip(search.parents, search.last_ids, strict=True)
    ]
    assert all(len(beam) == search.num_decoded for beam in followed)
    return followed


def _best(
    search: BeamSearch, rows: Sequence[npt.NDArray[np.floating]]
) -> tuple[list[int], list[int], list[float]]:
    table = np.stack([score + row for score, row in zip(search.scores, rows, strict=True)])
    order = np.argsort(-table, axis=None, kind="stable")[: 2 * search.num_beams]
    best_beams, tokens = np.unravel_index(order, table.shape)
    return tokens.tolist(), best_beams.tolist(), table[best_beams, tokens].tolist()


def log_softmax(logits: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Log-probabilities [V] of logits [V], of which not all may be -inf."""
    shifted = np.asarray(logits, dtype=np.float64) - np.max(logits)
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def with_adjustments(
    logits: npt.NDArray[np.floating], changes: Sequence[Adjustment]
) -> npt.NDArray[np.float64]:
    """What the guided step graph makes of logits [V]; in float32, where forbidden ones become all alike."""
    changed = np.array(logits, dtype=np.float64)
    for token_id, divisor, addend in changes:
        changed[token_id] = np.float32(min(logits[token_id] / divisor, logits[token_id] * divisor) + addend)
    return changed


def is_forbidden(token_id: int, guidance: Guidance, target: Prefix, *, eos_id: int = 0) -> bool:
    """Whether the definitions forbid a token after a target."""
    longer = (*target, token_id)
    if token_id == eos_id and len(longer) < guidance.min_target_tokens:
        return True
    if any(longer[max(0, len(longer) - len(words)) :] == words for words in guidance.forbidden):
        return True
    size = guidance.no_repeat_ngram_size
    ngrams = [longer[start : start + size] for start in range(len(longer) - size + 1)] if size else []
    return bool(ngrams) and ngrams[-1] in ngrams[:-1]


def guided_log_probs(
    logits: npt.NDArray[np.floating], guidance: Guidance, target: Prefix, *, eos_id: int = 0
) -> npt.NDArray[np.float64]:
    """The definition: log-probabilities [V] shared by what is allowed; -inf for all else."""
    changed = np.full(len(logits), -math.inf)
    for token_id, logit in enumerate(logits.tolist()):
        if is_forbidden(token_id, guidance, target, eos_id=eos_id):
            continue
        penalty = guidance.repetition_penalty if token_id in target else 1.0
        changed[token_id] = logit / penalty if logit > 0 else logit * penalty
    return changed if np.isneginf(changed).all() else log_softmax(changed)


def guided_sum(logits: Logits, guidance: Guidance, hypothesis: Hypothesis, *, eos_id: int = 0) -> float:
    """The summed log-probability that the definitions give to a found target, its prefix for nothing."""
    tokens = [*hypothesis.token_ids, *([eos_id] if hypothesis.finish_reason == "eos" else [])]
    steps = range(len(guidance.prefix), len(tokens))
    return math.fsum(
        guided_log_probs(logits(tuple(tokens[:at])), guidance, tuple(tokens[:at]), eos_id=eos_id)[tokens[at]]
        for at in steps
    )
