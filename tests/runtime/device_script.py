"""The same calls for several runners of made-up tokens, and how far apart what they say is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from device_guests import Decoders
from hypothesis import strategies as st

from app.runtime.runner import (
    BeamStepInput,
    BeamStepOutput,
    LogitAdjustments,
    ModelRunner,
    SearchKind,
    SourceRow,
    StepOutput,
)

MAX_ROWS = 8


def group_of(runner: ModelRunner, kind: SearchKind, num_beams: int) -> int:
    return next(
        index
        for index, group in enumerate(runner.groups)
        if (group.kind, group.num_beams) == (kind, num_beams)
    )


class Script:
    """The same calls for several runners: tokens, parents and scores are made up, so that no runner's own
    choices lead it another way."""

    def __init__(self, decoders: Decoders, runners: Sequence[ModelRunner], kind: SearchKind, num_beams: int):
        self._choice = np.random.default_rng(17)
        self._sources, self._runners, self._kind = decoders.sources, runners, kind
        self._group = group_of(runners[0], kind, num_beams)
        self._shape = runners[0].groups[self._group]
        self._positions: list[int] = []

    def admit(self, num_newcomers: int) -> None:
        num_newcomers = min(num_newcomers, self._shape.max_rows - len(self._positions))
        chosen = self._choice.choice(len(self._sources), num_newcomers)
        rows = [
            SourceRow(len(self._positions) + index, self._sources[source], 24)
            for index, source in enumerate(chosen)
        ]
        self._positions += [0] * num_newcomers
        if rows:
            for runner in self._runners:
                runner.admit(self._group, rows)

    def leave(self, place: int) -> None:
        if not self._positions:
            return
        slot, last = place % len(self._positions), len(self._positions) - 1
        self._positions[slot] = self._positions[last]
        del self._positions[last]
        if slot != last:
            for runner in self._runners:
                runner.move(self._group, from_slot=last, to_slot=slot)

    def do(self, event: Event) -> list[StepOutput | BeamStepOutput] | None:
        if event.name == "admit":
            return self.admit(event.number)
        if event.name == "leave":
            return self.leave(event.number)
        return self.step()

    def step(self) -> list[StepOutput | BeamStepOutput] | None:
        """One step of all runners, and what each of them said."""
        if not self._positions or max(self._positions) >= 24:
            return None
        positions = np.array(self._positions)
        self._positions = [position + 1 for position in self._positions]
        if self._kind is SearchKind.GREEDY:
            last_ids = self._choice.integers(2, 96, len(positions))
            return [runner.step(self._group, last_ids, positions) for runner in self._runners]
        beams = self._beams(positions)
        return [runner.beam_step(self._group, beams) for runner in self._runners]

    def _beams(self, positions: np.ndarray) -> BeamStepInput:
        shape = len(positions), self._shape.num_beams
        parents = self._choice.integers(0, shape[1], shape)
        parents[positions == 0] = 0
        scores = -self._choice.random(shape, dtype=np.float32)
        scores[positions == 0, 1:] = -np.inf
        adjustments = None
        if self._kind is SearchKind.GUIDED:
            num_rows = int(self._choice.integers(0, shape[0] * shape[1] + 1))
            adjustments = LogitAdjustments(
                rows=np.arange(num_rows),
                token_ids=self._choice.integers(0, 96, num_rows),
                divisors=np.full(num_rows, 1.3, dtype=np.float32),
                addends=np.where(np.arange(num_rows) % 2, -1e9, 0.5).astype(np.float32),
            )
        return BeamStepInput(
            last_ids=self._choice.integers(2, 96, shape),
            positions=positions,
            scores=scores,
            parents=parents,
            num_candidates=2 * shape[1],
            adjustments=adjustments,
        )


def distance(found: StepOutput | BeamStepOutput, expected: StepOutput | BeamStepOutput) -> float:
    """How far the best values are apart on average; no further than all are, whichever token has them."""
    if isinstance(found, StepOutput):
        assert isinstance(expected, StepOutput)
        return float(np.abs(found.log_probs - expected.log_probs).mean())
    assert isinstance(expected, BeamStepOutput)
    assert (found.attention is None) == (expected.attention is None)
    scores = np.where(expected.scores < -1e8, found.scores, expected.scores)
    distance = np.abs(np.where(found.scores < -1e8, scores, found.scores) - scores).mean()
    if found.attention is not None and expected.attention is not None:
        distance = max(distance, np.abs(found.attention - expected.attention).max())
    return float(distance)


def exactly(output: StepOutput | BeamStepOutput) -> list[bytes | None]:
    return [None if array is None else array.tobytes() for array in vars(output).values()]


@dataclass(frozen=True)
class Event:
    name: str
    number: int = 0


events = st.lists(
    st.one_of(
        st.builds(Event, st.just("admit"), st.integers(1, 4)),
        st.builds(Event, st.just("leave"), st.integers(0, 7)),
        st.just(Event("step")),
    ),
    max_size=25,
)
BUSY = [
    Event(*words)
    for words in (
        *(("admit", 3), ("step",), ("step",), ("step",), ("leave", 0), ("leave", 0), ("admit", 4), ("step",)),
        *(("leave", 1), ("step",), ("leave", 2), ("admit", 2), ("step",)),
    )
]
KINDS = [(SearchKind.GREEDY, 1), (SearchKind.BEAMS, 2), (SearchKind.GUIDED, 2), (SearchKind.GUIDED, 1)]
