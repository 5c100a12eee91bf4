"""Beam search over one segment: keep the K most probable unfinished targets at every step.

The rule is CTranslate2's (src/decoding.cc, ``BeamSearch::search``), so that answers can be compared
with that engine's token by token:

* At a step every live beam proposes tokens; the 2K best continuations by summed log-probability are
  looked at, best first.
* Of the first K, one that ends (end-of-sentence, or any at the last step) becomes a finished
  hypothesis, and the best unfinished one behind the K takes its place among the live beams.
* The search ends when K x patience hypotheses are finished. With a length penalty of 0 (scores are
  plain sums, which only fall) it ends as soon as the best of the 2K ended and enough are finished.
* Finished hypotheses are ranked by their normalised score; ties keep the order of finishing.

Ties between continuations go to the lower beam, then to the lower token id, as far as the graph's
top-k keeps that order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from app.decoding.hypothesis import FinishReason, Float32Array, Hypothesis, LengthNormalisation

IMPOSSIBLE = float("-inf")
"""Score of a beam that does not go on."""


@dataclass(frozen=True)
class BeamOptions:
    """What one beam search is to do.

    Attributes:
        beam_size: K, live beams, 1 to 16.
        num_hypotheses: finished hypotheses wanted, at most K.
        length_penalty: exponent a of the normalisation; 0 ranks by plain sums.
        normalisation: which formula a belongs to.
        patience: K x patience finished hypotheses end the search (Kasai et al. 2022).
        max_target_tokens: most decoded tokens, end-of-sentence included.
    """

    beam_size: int
    num_hypotheses: int
    length_penalty: float
    normalisation: LengthNormalisation
    patience: float
    max_target_tokens: int


class BeamSearch:
    """The live beams of one segment, and what they finished.

    Fed by the lane: it reads `last_ids`, `scores` and `parents`, runs the model, and hands the best
    2K continuations to `advance`. It never sees the cache: `parents` says which row each live beam
    continues.
    """

    def __init__(self, *, eos_id: int, options: BeamOptions) -> None:
        """Start with one possible beam, the empty target; the other K-1 cannot be chosen."""
        self._eos_id = eos_id
        self._options = options
        self._token_ids: list[tuple[int, ...]] = [()] * options.beam_size
        self._attention: list[tuple[Float32Array, ...]] = [()] * options.beam_size
        self.scores: list[float] = [0.0, *[IMPOSSIBLE] * (options.beam_size - 1)]
        """Sum of log-probabilities of each live beam, float [K]."""
        self.parents: list[int] = list(range(options.beam_size))
        """For each live beam the beam of the step before that it continues, int [K]."""
        self._finished: list[Hypothesis] = []
        self._best_ended = False
        self._done = False

    @property
    def num_beams(self) -> int:
        """K, the rows this search takes."""
        return self._options.beam_size

    @property
    def num_decoded(self) -> int:
        """Tokens of every live beam: the position of the next step."""
        return len(self._token_ids[0])

    @property
    def last_ids(self) -> list[int]:
        """The token decoded last by each live beam, int [K]; end-of-sentence before the first step."""
        return [ids[-1] if ids else self._eos_id for ids in self._token_ids]

    @property
    def finished(self) -> bool:
        """Whether `hypotheses` may be taken."""
        return self._done

    def advance(
        self,
        token_ids: Sequence[int],
        beams: Sequence[int],
        scores: Sequence[float],
        attention: Float32Array | None = None,
    ) -> bool:
        """Take the 2K best continuations, best first; say whether the search is finished.

        Args:
            token_ids: the proposed tokens, [2K].
            beams: the live beam each continues, [2K].
            scores: summed log-probabilities with the proposed token, [2K]; -inf is not allowed.
            attention: float32 [K,S], what each live beam looked at, kept with its tokens.
        """
        options = self._options
        looked_at = self._attention
        if attention is not None:
            looked_at = [(*before, attention[beam]) for beam, before in enumerate(self._attention)]
        is_last_step = self.num_decoded + 1 >= options.max_target_tokens
        replacement = options.beam_size
        kept: list[int] = []
        live_scores: list[float] = []
        for rank in range(options.beam_size):
            ends = token_ids[rank] == self._eos_id
            if scores[rank] == IMPOSSIBLE or not (ends or is_last_step):
                kept.append(rank)
                live_scores.append(scores[rank])
                continue
            self._best_ended = self._best_ended or rank == 0
            ids = self._token_ids[beams[rank]] if ends else (*self._token_ids[beams[rank]], token_ids[rank])
            reason = FinishReason.EOS if ends else FinishReason.LENGTH
            self._finish(ids, scores[rank], looked_at[beams[rank]], reason)
            while replacement < len(token_ids) and token_ids[replacement] == self._eos_id:
                replacement += 1
            if replacement < len(token_ids):
                kept.append(replacement)
                live_scores.append(scores[replacement])
                replacement += 1
            else:
                # Nothing else is left, as with fewer than 2K continuations: an ended beam does not go on.
                kept.append(rank)
                live_scores.append(IMPOSSIBLE)
        none_goes_on = max(live_scores) == IMPOSSIBLE
        self._done = is_last_step or none_goes_on or self._has_enough()
        if self._done and not self._finished:
            # Nothing may follow: what there is so far is the answer.
            best = max(range(len(self.scores)), key=self.scores.__getitem__)
            self._finish(
                self._token_ids[best], self.scores[best], self._attention[best], FinishReason.FORBIDDEN
            )
        if not self._done:
            self._attention = [looked_at[beams[rank]] for rank in kept]
            self._token_ids = [(*self._token_ids[beams[rank]], token_ids[rank]) for rank in kept]
            self.scores = live_scores
            self.parents = [beams[rank] for rank in kept]
        return self._done

    def force(self, token_id: int, attention: Float32Array | None = None) -> None:
        """Let every live beam continue with a given token, at no cost to its score.

        Args:
            token_id: not end-of-sentence.
            attention: as for `advance`.
        """
        self._token_ids = [(*ids, token_id) for ids in self._token_ids]
        self.parents = list(range(self.num_beams))
        if attention is not None:
            self._attention = [(*before, attention[beam]) for beam, before in enumerate(self._attention)]

    def hypotheses(self) -> tuple[Hypothesis, ...]:
        """The finished hypotheses, best first, at most `num_hypotheses`."""
        if not self._done:
            raise RuntimeError("the search is not finished")
        ranked = sorted(self._finished, key=lambda hypothesis: -hypothesis.score)  # stable
        return tuple(ranked[: self._options.num_hypotheses])

    def _has_enough(self) -> bool:
        options = self._options
        if options.length_penalty == 0 and options.patience == 1:
            return self._best_ended and len(self._finished) >= options.num_hypotheses
        # Half a hypothesis counts as one, as in CTranslate2.
        return len(self._finished) >= max(1, math.floor(options.beam_size * options.patience + 0.5))

    def _finish(
        self,
        token_ids: tuple[int, ...],
        score: float,
        attention: tuple[Float32Array, ...],
        reason: FinishReason,
    ) -> None:
        self._finished.append(
            Hypothesis(
                token_ids=token_ids,
                sum_log_probs=score,
                finish_reason=reason,
                length_penalty=self._options.length_penalty,
                normalisation=self._options.normalisation,
                attention=_rows(attention, len(token_ids)),
            )
        )


def _rows(attention: tuple[Float32Array, ...], num_tokens: int) -> Float32Array | None:
    """Attention by token [tokens,S]; what end-of-sentence looked at belongs to no word."""
    if not attention:
        return None
    return np.stack(attention)[:num_tokens]
