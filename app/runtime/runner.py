"""The seam between search and model: what a decoder needs from whatever runs the graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


class SearchKind(StrEnum):
    """What the rows of a group are asked at every step."""

    GREEDY = "greedy"
    """`ModelRunner.step`: the best token of each row."""
    BEAMS = "beams"
    """`ModelRunner.beam_step`: the best continuations of each segment's beams."""
    GUIDED = "guided"
    """`ModelRunner.beam_step` with `LogitAdjustments`, returning attention."""


@dataclass(frozen=True)
class RowGroup:
    """A pool of row slots whose sources are padded to one length.

    A segment's group follows from its own length alone, so that padding, and with it every
    rounding in attention, is the same whoever its neighbours are (promise 1).

    Attributes:
        source_length: S of the group's cross-attention cache; longest source it takes, in tokens.
        max_rows: slots in the group, one a segment.
        num_beams: K, rows of each slot.
        kind: greedy search (K is 1), beam search, or beam search with adjusted logits.
    """

    source_length: int
    max_rows: int
    num_beams: int = 1
    kind: SearchKind = SearchKind.GREEDY


@dataclass(frozen=True)
class SourceRow:
    """A newcomer: one segment about to enter a slot.

    Attributes:
        slot: the free slot it takes.
        source_ids: token ids with the final end-of-sentence.
        max_target_tokens: most decoder steps this row will take; bounds its self cache.
        candidates: sorted token ids the output is limited to, or None for the whole vocabulary.
    """

    slot: int
    source_ids: Sequence[int]
    max_target_tokens: int
    candidates: Int32Array | None = None


@dataclass(frozen=True)
class StepOutput:
    """The tokens chosen by one decoder step.

    Attributes:
        token_ids: int64 [R].
        log_probs: float32 [R], log-probability of each chosen token among its allowed ones.
    """

    token_ids: Int64Array
    log_probs: Float32Array


@dataclass(frozen=True)
class LogitAdjustments:
    """M logits to be changed to ``min(x / divisor, x * divisor) + addend``, each at most once.

    Attributes:
        rows: int64 [M], row among the B x K.
        token_ids: int64 [M].
        divisors: float32 [M], at least 1.
        addends: float32 [M].
    """

    rows: Int64Array
    token_ids: Int64Array
    divisors: Float32Array
    addends: Float32Array


@dataclass(frozen=True)
class BeamStepInput:
    """The live beams of the B segments in slots ``0..B-1``, K each.

    Attributes:
        last_ids: int64 [B,K], the token decoded last; ignored at position 0.
        positions: int64 [B], target tokens decoded already.
        scores: float32 [B,K], summed log-probabilities; -inf for a beam that must not go on.
        parents: int64 [B,K], the beam of the step before that each one continues.
        num_candidates: C, continuations wanted a segment.
        adjustments: for guided groups, and for them alone.
    """

    last_ids: Int64Array
    positions: Int64Array
    scores: Float32Array
    parents: Int64Array
    num_candidates: int
    adjustments: LogitAdjustments | None = None


@dataclass(frozen=True)
class BeamStepOutput:
    """The best continuations of each segment's beams, best first.

    Attributes:
        token_ids: int64 [B,C].
        beams: int64 [B,C], the live beam each continues.
        scores: float32 [B,C], summed log-probabilities; below -1e8 for what is not allowed.
        attention: float32 [B,K,S], what each beam attended to, of guided groups.
    """

    token_ids: Int64Array
    beams: Int64Array
    scores: Float32Array
    attention: Float32Array | None = None


class DeviceLost(Exception):
    """The device of a runner answers nothing any more: no call of this process will succeed there."""


class ModelRunner(Protocol):
    """One model's graphs and row slots, driven by one thread.

    Slots 0..R-1 of a group hold the running rows; the search side decides which segment is where,
    the runner owns the caches and never sees a hypothesis. Any call may raise; `DeviceLost` says that
    every later one would too.
    """

    @property
    def groups(self) -> Sequence[RowGroup]:
        """The row groups, shortest source length first."""
        ...

    @property
    def vocabulary_size(self) -> int:
        """V; every token id a step returns is below it."""
        ...

    def admit(self, group: int, newcomers: Sequence[SourceRow]) -> None:
        """Encode the newcomers and write their cross cache, mask and empty state into their slots."""
        ...

    def step(self, group: int, last_ids: Int64Array, positions: Int64Array) -> StepOutput:
        """Run one decoder step over slots ``0..R-1``.

        Args:
            group: index into `groups`.
            last_ids: int64 [R], the token decoded last; ignored at position 0.
            positions: int64 [R], target tokens each row has decoded already.
        """
        ...

    def beam_step(self, group: int, beams: BeamStepInput) -> BeamStepOutput:
        """Let every row's state follow its parent, then run one decoder step of a beam group."""
        ...

    def move(self, group: int, *, from_slot: int, to_slot: int) -> None:
        """Copy a running row's caches onto another slot (a finished one's), keeping rows dense."""
        ...
