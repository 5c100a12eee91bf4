"""A model that is pure arithmetic, behind the real protocol, asserting that it is driven right."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from app.decoding.greedy import GreedySearch
from app.decoding.hypothesis import FinishReason, Hypothesis
from app.runtime.entry import Entry, Outcome
from app.runtime.request import Priority
from app.runtime.runner import Int64Array, RowGroup, SourceRow, StepOutput

EOS_ID = 0
VOCABULARY_SIZE = 97


def next_token(source_ids: Sequence[int], position: int, last_id: int) -> int:
    """Ends after a number of tokens that depends on the source; every token depends on all before it."""
    if position >= sum(source_ids) % 9:
        return EOS_ID
    return 1 + (sum(source_ids) * 31 + position * 7 + last_id * 13) % (VOCABULARY_SIZE - 1)


def log_prob_of(token_id: int, position: int) -> float:
    return -(token_id + 1) / (position + 8)


def translate_alone(source_ids: Sequence[int], max_target_tokens: int) -> Hypothesis:
    """What the fake model says, without any of the code under test."""
    token_ids: list[int] = []
    total, last_id = 0.0, EOS_ID
    while True:
        token_id = next_token(source_ids, len(token_ids), last_id)
        total += float(np.float32(log_prob_of(token_id, len(token_ids))))
        if token_id == EOS_ID:
            return Hypothesis(tuple(token_ids), total, FinishReason.EOS)
        token_ids.append(token_id)
        last_id = token_id
        if len(token_ids) == max_target_tokens:
            return Hypothesis(tuple(token_ids), total, FinishReason.LENGTH)


@dataclass
class Row:
    source_ids: tuple[int, ...]
    max_target_tokens: int
    decoded: list[int] = field(default_factory=list)

    def copy(self) -> Row:
        return Row(self.source_ids, self.max_target_tokens, list(self.decoded))


class FakeRunner:
    """Rows by slot, as a real runner's buffers hold them.

    Attributes:
        seen: every source that was ever admitted.
        fail_admit, fail_step, fail_move: called before the work; may raise.
        change_output: called on the output of every step.
    """

    vocabulary_size = VOCABULARY_SIZE

    def __init__(self, lengths: Sequence[int] = (4, 8), max_rows: int = 3) -> None:
        self.groups = tuple(RowGroup(source_length=length, max_rows=max_rows) for length in lengths)
        self.rows: list[list[Row]] = [[] for _ in lengths]
        self.seen: list[tuple[int, ...]] = []
        self.thread: int | None = None
        self.num_steps = 0
        self.fail_admit: Callable[[], None] = lambda: None
        self.fail_step: Callable[[], None] = lambda: None
        self.fail_move: Callable[[], None] = lambda: None
        self.change_output: Callable[[StepOutput], StepOutput] = lambda output: output

    def admit(self, group: int, newcomers: Sequence[SourceRow]) -> None:
        self._check_thread()
        self.fail_admit()
        rows, slots = self.rows[group], [row.slot for row in newcomers]
        assert slots == list(range(slots[0], slots[0] + len(slots))), "newcomers must take dense slots"
        assert slots[0] <= len(rows), "there must be no hole before the newcomers"
        assert slots[-1] < self.groups[group].max_rows
        del rows[slots[0] :]
        for row in newcomers:
            assert 1 <= len(row.source_ids) <= self.groups[group].source_length
            rows.append(Row(tuple(row.source_ids), row.max_target_tokens))
            self.seen.append(tuple(row.source_ids))

    def step(self, group: int, last_ids: Int64Array, positions: Int64Array) -> StepOutput:
        self._check_thread()
        self.fail_step()
        self.num_steps += 1
        assert last_ids.dtype == positions.dtype == np.int64
        assert last_ids.shape == positions.shape
        assert 1 <= len(last_ids) <= len(self.rows[group]), "a step runs over admitted rows"
        del self.rows[group][len(last_ids) :]
        token_ids = []
        for row, last_id, position in zip(self.rows[group], last_ids, positions, strict=True):
            assert position == len(row.decoded), "the cache holds exactly the tokens decoded before"
            assert position < row.max_target_tokens, "the cache has no room beyond the announced limit"
            if row.decoded:
                assert last_id == row.decoded[-1], "the row is fed the token it chose"
            token_ids.append(
                next_token(row.source_ids, len(row.decoded), row.decoded[-1] if row.decoded else 0)
            )
            row.decoded.append(token_ids[-1])
        log_probs = [
            log_prob_of(token_id, int(at)) for token_id, at in zip(token_ids, positions, strict=True)
        ]
        return self.change_output(
            StepOutput(np.array(token_ids, dtype=np.int64), np.array(log_probs, dtype=np.float32))
        )

    def move(self, group: int, *, from_slot: int, to_slot: int) -> None:
        self._check_thread()
        self.fail_move()
        assert 0 <= to_slot < from_slot < len(self.rows[group]), "the last running row fills the gap"
        self.rows[group][to_slot] = self.rows[group][from_slot].copy()

    def _check_thread(self) -> None:
        self.thread = self.thread or threading.get_ident()
        assert self.thread == threading.get_ident(), "one thread drives a runner"


@dataclass
class Waiter:
    """An entry and the answers it got."""

    entry: Entry
    max_target_tokens: int
    outcomes: list[Outcome]
    answered: threading.Event

    @property
    def result(self) -> object:
        """Its only answer."""
        (outcome,) = self.outcomes
        return outcome.result[0] if isinstance(outcome.result, tuple) else outcome.result

    @property
    def expected(self) -> Hypothesis:
        return translate_alone(self.entry.source_ids, self.max_target_tokens)


def make_waiter(
    source_ids: Sequence[int],
    max_target_tokens: int = 20,
    submitted_at_s: float = 0.0,
    *,
    request: int = 0,
    priority: Priority = Priority.INTERACTIVE,
    deadline_s: float | None = None,
) -> Waiter:
    outcomes: list[Outcome] = []
    answered = threading.Event()

    def deliver(outcome: Outcome) -> None:
        outcomes.append(outcome)
        answered.set()

    entry = Entry(
        tuple(source_ids),
        GreedySearch(eos_id=EOS_ID, max_target_tokens=max_target_tokens),
        max_target_tokens=max_target_tokens,
        submitted_at_s=submitted_at_s,
        deliver=deliver,
        request=request,
        priority=priority,
        deadline_s=deadline_s,
    )
    return Waiter(entry, max_target_tokens, outcomes, answered)
