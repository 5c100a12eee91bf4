"""Whether a device computes what the CPU's float32 graphs compute, by step and by sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from app.runtime.runner import ModelRunner, SearchKind, SourceRow
from benchmarks.driven_lane import DrivenLane
from benchmarks.local_engine import Hypotheses

MAX_STEP_DIFFERENCE = 0.1
"""Largest accepted difference of the best log-probability at any one step: what fp16 logits may cost."""
MIN_EQUAL_STEPS = 0.97
"""Least share of steps, given the same tokens before, whose best token is the same."""
MIN_EQUAL_ALONE = 0.98
"""Least share of sentences with the same tokens alone and in company: products of other row counts round
otherwise on a GPU, and in fp16 a near tie may fall the other way."""
MAX_SCORE_DIFFERENCE = 0.02
"""Largest accepted difference of the score of a sentence with the same tokens alone and in company."""


@dataclass(frozen=True)
class StepAgreement:
    """Greedy steps of both sides, both given the reference's tokens so far.

    Attributes:
        num_steps: rows times steps.
        num_equal: with the same best token.
        max_difference: largest difference of the best log-probability at one step; where the tokens
            differ, by how much the device was wrong about the best.
    """

    num_steps: int
    num_equal: int
    max_difference: float

    @property
    def passed(self) -> bool:
        """Within what float16 may do."""
        return (
            self.num_steps > 0
            and self.num_equal >= MIN_EQUAL_STEPS * self.num_steps
            and self.max_difference <= MAX_STEP_DIFFERENCE
        )


@dataclass(frozen=True)
class SentenceAgreement:
    """Whole translations of the same sentences by two sides.

    Attributes:
        num_sentences: compared.
        num_equal: with the same tokens.
        max_score_difference: largest difference of the score among those with the same tokens.
    """

    num_sentences: int
    num_equal: int
    max_score_difference: float

    @property
    def passed(self) -> bool:
        """Within the tolerance stated for one device alone and in company."""
        return (
            self.num_equal >= MIN_EQUAL_ALONE * self.num_sentences
            and self.max_score_difference <= MAX_SCORE_DIFFERENCE
        )


def compare_steps(
    reference: ModelRunner,
    device: ModelRunner,
    sources: Sequence[Sequence[int]],
    limits: Sequence[int],
    *,
    eos_id: int,
    max_rows: int,
) -> StepAgreement:
    """Let both runners take the same greedy steps.

    Args:
        reference: whose tokens both go on with.
        device: the runner in question.
        sources: token ids, each with the final end-of-sentence.
        limits: most target tokens of each.
        eos_id: after it a row no longer counts.
        max_rows: sentences at a time, at most what either runner has rows.
    """
    num_steps = num_equal = 0
    max_difference = 0.0
    order = sorted(range(len(sources)), key=lambda index: len(sources[index]))
    for start in range(0, len(order), max_rows):
        chosen = order[start : start + max_rows]
        rows = [
            SourceRow(slot=slot, source_ids=sources[index], max_target_tokens=limits[index])
            for slot, index in enumerate(chosen)
        ]
        longest = max(len(row.source_ids) for row in rows)
        groups = [_greedy_group(runner, longest) for runner in (reference, device)]
        for runner, group in zip((reference, device), groups, strict=True):
            runner.admit(group, rows)
        last_ids = np.zeros(len(rows), dtype=np.int64)
        counts = np.ones(len(rows), dtype=bool)
        row_limits = np.array([row.max_target_tokens for row in rows])
        for position in range(int(row_limits.max())):
            positions = np.full(len(rows), position, dtype=np.int64)
            ours, theirs = (
                runner.step(group, last_ids, positions)
                for runner, group in zip((device, reference), reversed(groups), strict=True)
            )
            counts &= position < row_limits
            num_steps += int(counts.sum())
            num_equal += int((counts & (ours.token_ids == theirs.token_ids)).sum())
            differences = np.abs(ours.log_probs - theirs.log_probs)[counts]
            # A NaN must not hide: max() would drop it or keep it by the order of its arguments.
            worst = float(differences.max(initial=0.0)) if np.isfinite(differences).all() else float("inf")
            max_difference = max(max_difference, worst)
            last_ids = theirs.token_ids
            counts &= last_ids != eos_id
            if not counts.any():
                break
    return StepAgreement(num_steps, num_equal, max_difference)


def compare_sentences(some: Sequence[Hypotheses], others: Sequence[Hypotheses]) -> SentenceAgreement:
    """Compare the best hypotheses of two sides."""
    pairs = [(one[0], other[0]) for one, other in zip(some, others, strict=True)]
    equal = [(one, other) for one, other in pairs if one.token_ids == other.token_ids]
    return SentenceAgreement(
        num_sentences=len(pairs),
        num_equal=len(equal),
        max_score_difference=max((abs(one.score - other.score) for one, other in equal), default=0.0),
    )


def compare_alone(
    lane: DrivenLane, sources: Sequence[Sequence[int]], limits: Sequence[int], *, seed: int
) -> SentenceAgreement:
    """Translate every sentence alone, and all of them together in a random order."""
    alone = lane.one_by_one(sources, limits)
    order = np.random.default_rng(seed).permutation(len(sources)).tolist()
    mixed = lane.translate([sources[index] for index in order], [limits[index] for index in order])
    together = dict(zip(order, mixed, strict=True))
    return compare_sentences(alone, [together[index] for index in range(len(sources))])


def _greedy_group(runner: ModelRunner, source_length: int) -> int:
    return next(
        index
        for index, group in enumerate(runner.groups)
        if group.kind is SearchKind.GREEDY and group.source_length >= source_length
    )
