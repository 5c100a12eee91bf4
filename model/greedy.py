"""Greedy decoding in PyTorch: the plain reference that exported graphs are verified against."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.transformer import Transformer


@dataclass(frozen=True)
class GreedyResult:
    """One row's translation.

    Attributes:
        token_ids: the chosen tokens, without the end token.
        log_prob: sum of the natural log-probabilities of the chosen tokens, the end token included
            if it was chosen; normalised over the allowed ids; no length penalty.
        ended: whether the end token was chosen; if not, the step limit cut the row.
    """

    token_ids: tuple[int, ...]
    log_prob: float
    ended: bool


@torch.no_grad()
def greedy(
    model: Transformer,
    source_ids: Tensor,
    source_mask: Tensor,
    *,
    max_steps: int | Tensor,
    allowed: Sequence[Tensor] | None = None,
) -> list[GreedyResult]:
    """Choose the most probable token at each step; the lowest id wins a tie.

    All rows keep stepping until the last one is done: a row's answer does not depend on the others,
    and what a finished row would say is not recorded.

    Args:
        model: in eval mode.
        source_ids: i64 [B, S].
        source_mask: bool [B, S], True at real tokens.
        max_steps: limit of decoder steps for all rows, or i64 [B]; the end token takes a step too.
        allowed: for each row the ids that may be chosen, i64 [N_b] in any order; None allows all.

    Returns:
        One result for each row.

    Raises:
        ValueError: the model is in training mode; a row has no real token; ``allowed`` or ``max_steps``
            does not have one entry for each row; a limit is negative; or a row allows no id.
    """
    num_rows = source_ids.shape[0]
    limits = max_steps.tolist() if isinstance(max_steps, Tensor) else [max_steps] * num_rows
    _check(model, source_mask, limits, allowed)

    forbidden = torch.zeros(num_rows, model.config.vocabulary_size, dtype=torch.bool)  # [B, V]
    if allowed is not None:
        forbidden[:] = True
        for row, ids in enumerate(allowed):
            forbidden[row, ids.cpu()] = False
    forbidden = forbidden.to(source_ids.device)  # [B, V]

    token_ids: list[list[int]] = [[] for _ in range(num_rows)]
    sums = [0.0] * num_rows
    ended = [False] * num_rows

    cross = model.cross_keys_values(model.encode(source_ids, source_mask))  # L x [B, H, S, D]
    state = model.initial_state(num_rows)
    last_ids: Tensor | None = None
    for step in range(max(limits, default=0)):
        logits, state = model.step(last_ids, state, cross, source_mask)  # [B, V]
        logits = logits.float().masked_fill(forbidden, -math.inf)  # [B, V]
        # From the logits: rounding in log_softmax can make a tie of two different ones.
        last_ids = logits.argmax(dim=1)  # [B], the first of equals
        log_probs = logits.log_softmax(dim=1).gather(1, last_ids[:, None])[:, 0]  # [B]
        chosen = zip(last_ids.tolist(), log_probs.tolist(), strict=True)
        for row, (token_id, log_prob) in enumerate(chosen):
            if ended[row] or step >= limits[row]:
                continue
            sums[row] += log_prob
            if token_id == model.config.eos_id:
                ended[row] = True
            else:
                token_ids[row].append(token_id)
        if all(done or step + 1 >= limit for done, limit in zip(ended, limits, strict=True)):
            break
    return [
        GreedyResult(tuple(ids), total, done) for ids, total, done in zip(token_ids, sums, ended, strict=True)
    ]


def _check(
    model: Transformer, source_mask: Tensor, limits: list[int], allowed: Sequence[Tensor] | None
) -> None:
    """Refuse what has no right answer; see `greedy` for the errors."""
    num_rows = source_mask.shape[0]
    if model.training:
        raise ValueError("the model is in training mode, where dropout is random; call eval() first")
    if not bool(source_mask.any(dim=1).all()):
        row = int(source_mask.any(dim=1).logical_not().nonzero()[0])
        raise ValueError(f"row {row} has no real source token; each row needs at least 1")
    if len(limits) != num_rows or any(limit < 0 for limit in limits):
        raise ValueError(f"max_steps is {limits}; it must be {num_rows} numbers of at least 0")
    if allowed is not None and len(allowed) != num_rows:
        raise ValueError(f"allowed has {len(allowed)} rows; it must have {num_rows}, one for each source")
    for row, ids in enumerate(allowed or ()):
        if ids.numel() == 0:
            raise ValueError(f"row {row} allows 0 ids; allow at least 1")
