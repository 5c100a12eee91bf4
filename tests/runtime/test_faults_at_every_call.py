"""A graph call that raises, or kills its thread, at any kind of step: nobody is left without an answer."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest
from fake_runner import EOS_ID, VOCABULARY_SIZE

from app.decoding.guidance import Guidance
from app.decoding.options import DecodingOptions
from app.decoding.search import make_search
from app.errors import WorkerFailed
from app.runtime.entry import Entry, Outcome
from app.runtime.events import SilentObserver
from app.runtime.lane import Lane
from app.runtime.runner import (
    BeamStepInput,
    BeamStepOutput,
    DeviceLost,
    Int64Array,
    RowGroup,
    SearchKind,
    SourceRow,
    StepOutput,
)
from app.runtime.worker import Worker

PATIENCE_S = 60.0
LIMIT = 12
KINDS: dict[str, tuple[DecodingOptions, Guidance | None]] = {
    "step": (DecodingOptions(), None),
    "beam_step": (DecodingOptions(beam_size=2), None),
    "guided_step": (DecodingOptions(), Guidance(keeps_attention=True)),
}
CALLS = ("admit", *KINDS, "move")


class Killed(BaseException):
    """What no border catches."""


class FaultyRunner:
    """Ends a translation after as many tokens as its source has; one call raises.

    Attributes:
        raised: set once it has.
    """

    vocabulary_size = VOCABULARY_SIZE
    groups = (
        RowGroup(8, 3),
        RowGroup(8, 3, num_beams=2, kind=SearchKind.BEAMS),
        RowGroup(8, 3, kind=SearchKind.GUIDED),
    )

    def __init__(self, call: str, *, number: int, error: BaseException) -> None:
        self._lengths: list[list[int]] = [[0] * 3 for _ in self.groups]
        self._call, self._left, self._error = call, number, error
        self.raised = threading.Event()

    def _maybe_raise(self, call: str) -> None:
        if call == self._call:
            self._left -= 1
            if not self._left:
                self.raised.set()
                raise self._error

    def admit(self, group: int, newcomers: Sequence[SourceRow]) -> None:
        self._maybe_raise("admit")
        for row in newcomers:
            self._lengths[group][row.slot] = len(row.source_ids)

    def move(self, group: int, *, from_slot: int, to_slot: int) -> None:
        self._maybe_raise("move")
        self._lengths[group][to_slot] = self._lengths[group][from_slot]

    def step(self, group: int, last_ids: Int64Array, positions: Int64Array) -> StepOutput:
        self._maybe_raise("step")
        lengths = np.array(self._lengths[group][: len(last_ids)])
        token_ids = np.where(positions >= lengths, EOS_ID, 5)
        return StepOutput(token_ids.astype(np.int64), np.full(len(last_ids), -0.5, dtype=np.float32))

    def beam_step(self, group: int, beams: BeamStepInput) -> BeamStepOutput:
        guided = self.groups[group].kind is SearchKind.GUIDED
        self._maybe_raise("guided_step" if guided else "beam_step")
        num_segments, num_beams = beams.last_ids.shape
        shape = num_segments, beams.num_candidates
        token_ids = np.broadcast_to(np.arange(5, 5 + beams.num_candidates), shape).copy()
        ends = beams.positions >= np.array(self._lengths[group][:num_segments])
        token_ids[ends, 0] = EOS_ID
        steps_down = np.arange(1, beams.num_candidates + 1, dtype=np.float32) * np.float32(0.1)
        attention = np.zeros((num_segments, num_beams, self.groups[group].source_length), dtype=np.float32)
        return BeamStepOutput(
            token_ids=token_ids.astype(np.int64),
            beams=np.zeros(shape, dtype=np.int64),
            scores=(beams.scores[:, :1] - steps_down).astype(np.float32),
            attention=attention if guided else None,
        )


class Guest:
    """An entry, and the answers it got."""

    def __init__(self, kind: str, num_tokens: int) -> None:
        options, guidance = KINDS[kind]
        self.outcomes: list[Outcome] = []
        self.answered = threading.Event()
        self.entry = Entry(
            (*range(1, num_tokens), EOS_ID),
            make_search(options, eos_id=EOS_ID, max_target_tokens=LIMIT, guidance=guidance),
            max_target_tokens=LIMIT,
            submitted_at_s=0.0,
            deliver=self._deliver,
        )

    def _deliver(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.answered.set()

    @property
    def failed(self) -> bool:
        (outcome,) = self.outcomes
        return isinstance(outcome.result, WorkerFailed)


def guests() -> list[Guest]:
    """More of each kind than there is room for, that end at different steps."""
    return [Guest(kind, 2 + number % 5) for number in range(8) for kind in KINDS]


def working(runner: FaultyRunner) -> Worker:
    return Worker(
        "decoding", {"tiny": Lane("tiny", runner, max_admission_tokens=64, observer=SilentObserver())}
    )


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_raises_fails_whom_it_held_and_the_thread_goes_on(call: str, number: int) -> None:
    runner = FaultyRunner(call, number=number, error=RuntimeError("no"))
    worker = working(runner)
    everybody = guests()
    for guest in everybody:
        worker.submit("tiny", guest.entry)
    worker.start()
    for guest in everybody:
        assert guest.answered.wait(PATIENCE_S)
    assert runner.raised.is_set()
    failed = [guest for guest in everybody if guest.failed]
    assert 1 <= len(failed) <= 3, "a group of three rows at most"
    late = guests()
    for guest in late:
        worker.submit("tiny", guest.entry)
    assert worker.stop(timeout_s=PATIENCE_S)
    assert not any(guest.failed for guest in late)


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("error", [Killed(), DeviceLost("gone")], ids=["killed", "device lost"])
def test_a_call_that_kills_the_thread_leaves_nobody_without_an_answer(
    call: str, number: int, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # in the place of a traceback on stderr
    runner = FaultyRunner(call, number=number, error=error)
    worker = working(runner)
    everybody = guests()
    for guest in everybody:
        worker.submit("tiny", guest.entry)
    worker.start()
    assert runner.raised.wait(PATIENCE_S)
    for guest in everybody:
        assert guest.answered.wait(PATIENCE_S)
    assert any(guest.failed for guest in everybody)
    assert not worker.stop(timeout_s=PATIENCE_S)
    assert not worker.alive
    with pytest.raises(WorkerFailed, match="died"):
        worker.submit("tiny", Guest("step", 2).entry)
