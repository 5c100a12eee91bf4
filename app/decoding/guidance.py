"""What a request adds to the model's own choice of tokens. Pure.

A search asks, before every step, which logits of a live beam are to be changed (`adjustments`), and the
guided step graph changes them before they become probabilities: what is left shares all of it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

FORBIDDEN = -1e9
"""Added to the logit of a token that must not be chosen."""


class Adjustment(NamedTuple):
    """A change to the logit of one token: ``min(x / divisor, x * divisor) + addend``."""

    token_id: int
    divisor: float
    addend: float


@dataclass(frozen=True)
class Guidance:
    """What is asked of one segment's target.

    Attributes:
        min_target_tokens: end-of-sentence is forbidden while the target would have fewer tokens, itself
            included.
        no_repeat_ngram_size: no sequence of so many tokens comes twice; 0 allows it.
        repetition_penalty: at least 1; the logit of a token the target has already is divided by it, or
            multiplied when negative (Keskar et al. 2019, section 4.1).
        forbidden: sequences of tokens that may not occur; without end-of-sentence.
        prefix: what the target starts with; without end-of-sentence.
        not_after_prefix: tokens that may not come right behind the prefix.
        keeps_attention: whether hypotheses tell what each token was translated from.
    """

    min_target_tokens: int = 0
    no_repeat_ngram_size: int = 0
    repetition_penalty: float = 1.0
    forbidden: tuple[tuple[int, ...], ...] = ()
    prefix: tuple[int, ...] = ()
    not_after_prefix: frozenset[int] = frozenset()
    keeps_attention: bool = False

    def __post_init__(self) -> None:
        """Refuse what would fail only in the middle of a batch."""
        ids = itertools.chain(self.prefix, *self.forbidden)
        if not all(self.forbidden) or min(ids, default=0) < 0:
            raise ValueError("forbidden sequences need at least one token, and token ids are not negative")
        if not self.repetition_penalty >= 1:
            raise ValueError(f"repetition_penalty is {self.repetition_penalty}; it must be at least 1")

    @functools.cached_property
    def forbidden_after(self) -> Mapping[int, Mapping[tuple[int, ...], frozenset[int]]]:
        """By the length of what precedes it, and by what precedes it, the last tokens of `forbidden`."""
        after: dict[int, dict[tuple[int, ...], set[int]]] = {}
        for *before, last in self.forbidden:
            after.setdefault(len(before), {}).setdefault(tuple(before), set()).add(last)
        return {
            length: {before: frozenset(last) for before, last in of_length.items()}
            for length, of_length in after.items()
        }


def adjustments(guidance: Guidance, token_ids: Sequence[int], *, eos_id: int) -> list[Adjustment]:
    """What changes for the next token after the target so far; each token at most once.

    Args:
        guidance: what is asked.
        token_ids: the target so far, prefix included.
        eos_id: end-of-sentence.
    """
    forbidden = _forbidden(guidance, token_ids, eos_id)
    changes = [Adjustment(token_id, 1.0, FORBIDDEN) for token_id in sorted(forbidden)]
    if guidance.repetition_penalty != 1.0:
        repeated = sorted(set(token_ids) - forbidden)
        changes += [Adjustment(token_id, guidance.repetition_penalty, 0.0) for token_id in repeated]
    return changes


def _forbidden(guidance: Guidance, token_ids: Sequence[int], eos_id: int) -> set[int]:
    tokens = tuple(token_ids)
    forbidden: set[int] = set()
    for length, last_after in guidance.forbidden_after.items():
        forbidden |= last_after.get(tokens[len(tokens) - length :], frozenset())
    if len(tokens) == len(guidance.prefix):
        forbidden |= guidance.not_after_prefix
    if len(tokens) + 1 < guidance.min_target_tokens:
        forbidden.add(eos_id)
    size = guidance.no_repeat_ngram_size
    if size and len(tokens) >= size:
        last = tokens[len(tokens) - size + 1 :]
        forbidden.update(
            tokens[start + size - 1]
            for start in range(len(tokens) - size + 1)
            if tokens[start : start + size - 1] == last
        )
    return forbidden
