"""A third opinion on a search: the PyTorch model in float64, with near-ties decided both ways."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from app.decoding.greedy import GreedySearch
from app.decoding.guidance import FORBIDDEN, Adjustment, Guidance, adjustments
from app.decoding.guided import GuidedBeamSearch
from app.decoding.hypothesis import FinishReason, Hypothesis
from app.decoding.options import DecodingOptions
from app.decoding.search import Search, make_search
from exporters.checkpoint import Checkpoint
from exporters.torch_reference import to_module
from model.attention import KeysValues
from model.transformer import DecoderState

_MAX_OUTCOMES = 64
"""Searches of one sentence at most: more near-ties than that are no explanation any more."""


@dataclass(frozen=True)
class Asked:
    """One sentence, and what a search is asked to find for it.

    Attributes:
        source: token ids with the final end-of-sentence.
        options: of the search.
        max_target_tokens: its limit, end-of-sentence included.
        guidance: what is asked of the target, or None.
    """

    source: Sequence[int]
    options: DecodingOptions
    max_target_tokens: int
    guidance: Guidance | None = None


@dataclass(frozen=True)
class ForcedTarget:
    """What the model thinks of a given target, under the guidance if there is one.

    Attributes:
        token_ids: without end-of-sentence.
        decoded_ids: the scored tokens: the same, with end-of-sentence when it was decoded.
        log_probs: float64 log-probability of each of them; 0 for those of the guidance's prefix.
        sum_log_probs: their sum.
        score: the sum normalised as the options say.
    """

    token_ids: tuple[int, ...]
    decoded_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    sum_log_probs: float
    score: float


@dataclass(frozen=True)
class Decision:
    """A near-tie that was decided against the float64 order.

    Attributes:
        what: "choice" of a continuation, or "ranking" of finished hypotheses.
        position: target tokens decoded before it.
        gap: by how much the summed log-probabilities differ.
    """

    what: str
    position: int
    gap: float


@dataclass(frozen=True)
class Outcome:
    """One answer the search may give, and the decisions that lead to it."""

    hypotheses: tuple[Hypothesis, ...]
    decisions: tuple[Decision, ...]


@dataclass(frozen=True)
class _Branch:
    """A search on its way; `state` is the model's after `search.num_decoded` tokens, of K rows."""

    search: Search
    state: DecoderState
    decisions: tuple[Decision, ...]


class Float64Search:
    """Searches and scores over a checkpoint in float64."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Take the checkpoint whose weights both sides compute with."""
        self._eos_id = checkpoint.config.eos_id
        self._module = to_module(checkpoint).double()

    @torch.no_grad()
    def force(self, asked: Asked, token_ids: tuple[int, ...]) -> ForcedTarget:
        """Score a target that some search found; of the limit's length, it did not end by itself."""
        ended = len(token_ids) < asked.max_target_tokens
        finish_reason = FinishReason.EOS if ended else FinishReason.LENGTH
        decoded_ids = (*token_ids, self._eos_id) if ended else token_ids
        source_ids = torch.tensor([asked.source])
        mask = torch.ones_like(source_ids, dtype=torch.bool)
        logits = self._module(source_ids, mask, torch.tensor([decoded_ids]))[0]  # [T,V]
        guidance = asked.guidance or Guidance()
        changes = [
            adjustments(guidance, decoded_ids[:position], eos_id=self._eos_id)
            for position in range(len(decoded_ids))
        ]
        log_probs = _adjusted(logits, changes).log_softmax(dim=-1)
        chosen = log_probs.gather(1, torch.tensor(decoded_ids)[:, None])[:, 0]  # [T]
        if decoded_ids[: len(guidance.prefix)] == guidance.prefix:
            chosen[: len(guidance.prefix)] = 0.0
        options = asked.options
        hypothesis = Hypothesis(
            token_ids, float(chosen.sum()), finish_reason, options.length_penalty, options.normalisation
        )
        return ForcedTarget(
            token_ids, decoded_ids, tuple(chosen.tolist()), hypothesis.sum_log_probs, hypothesis.score
        )

    @torch.no_grad()
    def outcomes(self, asked: Asked, *, tie: float) -> Iterator[Outcome]:
        """Every answer that the search gives when near-ties go either way, the float64 one first.

        At each step of each search, two neighbouring continuations whose summed log-probabilities differ by
        at most `tie` may also come in the other order.

        Args:
            asked: the sentence and what is asked of the search.
            tie: natural log-probability.
        """
        source_ids = torch.tensor([asked.source])
        encoded = self._module.cross_keys_values(
            self._module.encode(source_ids, torch.ones_like(source_ids, dtype=torch.bool))
        )
        search = make_search(
            asked.options,
            eos_id=self._eos_id,
            max_target_tokens=asked.max_target_tokens,
            guidance=asked.guidance,
        )
        num_rows = search.num_beams
        cross = tuple(
            KeysValues(*(tensor.expand(num_rows, -1, -1, -1) for tensor in layer)) for layer in encoded
        )
        mask = torch.ones((num_rows, len(asked.source)), dtype=torch.bool)
        num_forced = len(asked.guidance.prefix) if asked.guidance else 0
        step = functools.partial(self._step, cross=cross, mask=mask, tie=tie, num_forced=num_forced)
        branches = [_Branch(search, self._module.initial_state(num_rows), ())]
        num_outcomes = 0
        while branches and num_outcomes < _MAX_OUTCOMES:
            branch = branches.pop(0)
            while not branch.search.finished:
                branch, *others = step(branch)
                branches += others
            num_outcomes += 1
            yield Outcome(branch.search.hypotheses(), branch.decisions)

    def _step(
        self, branch: _Branch, *, cross: tuple[KeysValues, ...], mask: Tensor, tie: float, num_forced: int
    ) -> list[_Branch]:
        """Take one step, in the float64 order and, where there are near-ties, in others."""
        search = branch.search
        if isinstance(search, GreedySearch):
            last_ids, parents, so_far = [search.last_id], [0], [0.0]
        else:
            last_ids, parents, so_far = search.last_ids, search.parents, search.scores
        state = branch.state.select(torch.tensor(parents))
        logits, state = self._module.step(
            torch.tensor(last_ids) if search.num_decoded else None, state, cross, mask
        )  # [K,V]
        if isinstance(search, GuidedBeamSearch):
            logits = _adjusted(logits, search.adjustments())
        table = logits.log_softmax(dim=-1) + torch.tensor(so_far, dtype=torch.float64)[:, None]  # [K,V]
        num_wanted = 1 if isinstance(search, GreedySearch) else 2 * search.num_beams
        best = table.flatten().topk(num_wanted + 1)
        scores = best.values.tolist()
        # With one beam only the best counts; a forced token is no choice, and forbidden ones are not chosen.
        num_deciding = 0 if search.num_decoded < num_forced else 1 if search.num_beams == 1 else num_wanted
        near = [
            rank
            for rank in range(num_deciding)
            if 0 <= scores[rank] - scores[rank + 1] <= tie and scores[rank + 1] > FORBIDDEN / 2
        ]
        branches = []
        for swapped in (None, *near):
            order = list(range(num_wanted + 1))
            decisions = branch.decisions
            if swapped is not None:
                order[swapped : swapped + 2] = swapped + 1, swapped
                gap = scores[swapped] - scores[swapped + 1]
                decisions = (*decisions, Decision("choice", search.num_decoded, gap))
            chosen = best.indices[torch.tensor(order[:num_wanted])]
            taken = copy.deepcopy(search)
            token_ids = (chosen % table.shape[1]).tolist()
            chosen_scores = [scores[rank] for rank in order[:num_wanted]]
            if isinstance(taken, GreedySearch):
                taken.advance(token_ids[0], chosen_scores[0])
            else:
                taken.advance(token_ids, (chosen // table.shape[1]).tolist(), chosen_scores)
            branches.append(_Branch(taken, state, decisions))
        return branches


def _adjusted(logits: Tensor, changes: Sequence[Sequence[Adjustment]]) -> Tensor:
    """The logits [R,V] after the changes of each row, [R]; see `Adjustment`."""
    adjusted = logits.clone()
    for row, of_row in zip(adjusted, changes, strict=True):
        for token_id, divisor, addend in of_row:
            row[token_id] = torch.minimum(row[token_id] / divisor, row[token_id] * divisor) + addend
    return adjusted
