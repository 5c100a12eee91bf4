"""Ways in which sentences can reach the decoder: order, company, pace, cancellations, threads."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from app.decoding.options import DecodingOptions
from app.decoding.search import make_search
from app.decoding.shortlist import Shortlist
from app.errors import RequestCancelled
from app.runtime.entry import Entry, Outcome
from app.runtime.events import SilentObserver
from app.runtime.lane import Lane
from app.runtime.onnx_model import OnnxModel
from app.runtime.onnx_runner import OnnxRunner
from app.runtime.worker import Worker
from benchmarks.local_engine import Hypotheses, hypotheses_of

_ALONE_ADMISSION_TOKENS = 1024
_STOP_S = 60.0
_HANG_S = 600.0
"""No answer for so long means that one was lost."""


@dataclass(frozen=True)
class Job:
    """One sentence and what is wanted of it."""

    source: Sequence[int]
    options: DecodingOptions


@dataclass(frozen=True)
class Arrivals:
    """One way to arrive.

    Attributes:
        name: shown in the report.
        seed: of the order and everything else drawn; None keeps the order of the jobs.
        max_rows: rows of a row group.
        max_admission_tokens: padded source tokens encoded at most between two steps.
        min_newcomers: newcomers a full group waits for; None as the service has it, a quarter of the rows.
        burst: fewest and most sentences that arrive together.
        gap_ticks: fewest and most decoder steps between two bursts; with threads, of ten times so many
            answers are waited for.
        guests: for each sentence so many others arrive, half of which are cancelled on the way.
        num_threads: worker threads; 0 drives one lane by hand, whose order of steps is then repeatable.
    """

    name: str
    seed: int | None = None
    max_rows: int = 64
    max_admission_tokens: int = 1024
    min_newcomers: int | None = None
    burst: tuple[int, int] = (1, 1)
    gap_ticks: tuple[int, int] = (0, 0)
    guests: float = 0.0
    num_threads: int = 0


ALL_AT_ONCE = 1_000_000
PATTERNS: Sequence[Arrivals] = (
    Arrivals("all at once, 32 rows", burst=(ALL_AT_ONCE, ALL_AT_ONCE)),
    Arrivals("shuffled, bursts of up to 40, 5 rows", 1, 5, 64, burst=(1, 40), gap_ticks=(0, 12)),
    Arrivals("shuffled, bursts, 64 rows, 4096 tokens", 2, 64, 4096, burst=(1, 90), gap_ticks=(0, 30)),
    Arrivals("trickle, one every 1 to 3 steps, 16 rows", 3, 16, 256, 1, burst=(1, 1), gap_ticks=(1, 3)),
    Arrivals("cancellations in between, 7 rows", 4, 7, 128, burst=(1, 12), gap_ticks=(0, 6), guests=0.5),
    Arrivals(
        "one worker thread, shuffled bursts", 5, 32, 1024, burst=(1, 60), gap_ticks=(0, 6), num_threads=1
    ),
    Arrivals(
        "two worker threads, cancellations",
        6,
        12,
        512,
        burst=(1, 60),
        gap_ticks=(0, 6),
        guests=0.3,
        num_threads=2,
    ),
)


class WrongAnswer(Exception):
    """An entry was answered twice, or never, or with what it must not be answered with."""


@dataclass
class _Visitor:
    """A job on its way. Guests have `is_guest` set and may be cancelled."""

    index: int
    entry: Entry
    is_guest: bool = False
    outcomes: list[Outcome] = field(default_factory=list)


class Decoder:
    """One model, over which any number of lanes and workers are built."""

    def __init__(self, model: OnnxModel, shortlist: Shortlist | None) -> None:
        """Take loaded graphs, with their shortlist exactly when one is given."""
        self._model = model
        self._shortlist = shortlist

    def alone(self, job: Job) -> Hypotheses:
        """Translate a job by a lane that never saw another."""
        lane = self._lane(Arrivals("alone", max_rows=1))
        visitor = self._visitor(0, job)
        lane.add(visitor.entry)
        while lane.has_work:
            lane.tick()
        return _answer(visitor)

    def together(self, jobs: Sequence[Job], arrivals: Arrivals) -> Iterator[tuple[int, Hypotheses]]:
        """Translate jobs in one way to arrive.

        Yields:
            The index and answer of every job, then those of the guests that were not cancelled.

        Raises:
            WrongAnswer: some entry did not get exactly one answer of the right kind.
            DragomanError: an entry failed.
        """
        choice = random.Random(arrivals.seed)
        done = threading.Semaphore(0)
        visitors = [self._visitor(index, job, done.release) for index, job in enumerate(jobs)]
        for _ in range(int(len(jobs) * arrivals.guests)):
            index = choice.randrange(len(jobs))
            visitors.append(self._visitor(index, jobs[index], done.release, is_guest=True))
        if arrivals.seed is not None:
            choice.shuffle(visitors)
        if arrivals.num_threads:
            self._run_workers(visitors, arrivals, choice, done)
        else:
            self._run_lane(visitors, arrivals, choice)
        for visitor in visitors:
            if len(visitor.outcomes) != 1:
                raise WrongAnswer(f"sentence {visitor.index} got {len(visitor.outcomes)} answers")
            was_cancelled = isinstance(visitor.outcomes[0].result, RequestCancelled)
            if was_cancelled and not visitor.entry.cancelled:
                raise WrongAnswer(f"sentence {visitor.index} was cancelled by nobody")
            if not was_cancelled:
                yield visitor.index, _answer(visitor)

    def _run_lane(self, visitors: Sequence[_Visitor], arrivals: Arrivals, choice: random.Random) -> None:
        lane = self._lane(arrivals)
        bursts = _bursts(visitors, arrivals, choice)
        arrived: list[_Visitor] = []
        wait, pending = 0, True
        while pending or lane.has_work:
            if wait == 0 and pending:
                burst = next(bursts, None)
                pending = burst is not None
                for visitor in burst or ():
                    lane.add(visitor.entry)
                    arrived.append(visitor)
                wait = choice.randint(*arrivals.gap_ticks)
            else:
                wait = max(0, wait - 1)
            _cancel_some(arrived, choice)
            lane.tick()

    def _run_workers(
        self,
        visitors: Sequence[_Visitor],
        arrivals: Arrivals,
        choice: random.Random,
        done: threading.Semaphore,
    ) -> None:
        workers = [
            Worker(f"arrivals-{index}", {"lane": self._lane(arrivals)})
            for index in range(arrivals.num_threads)
        ]
        for worker in workers:
            worker.start()
        num_answered = num_arrived = 0
        arrived: list[_Visitor] = []
        for burst in _bursts(visitors, arrivals, choice):
            for visitor in burst:
                workers[choice.randrange(len(workers))].submit("lane", visitor.entry)
                arrived.append(visitor)
            num_arrived += len(burst)
            _cancel_some(arrived, choice)
            wanted = min(10 * choice.randint(*arrivals.gap_ticks), num_arrived - num_answered)
            num_answered += _await(done, wanted)
            _cancel_some(arrived, choice)
        _await(done, num_arrived - num_answered)
        in_time = [worker.stop(timeout_s=_STOP_S) for worker in workers]
        if not all(in_time):
            raise WrongAnswer("a worker thread did not end")

    def _lane(self, arrivals: Arrivals) -> Lane:
        quarter = max(1, arrivals.max_rows // 4)
        return Lane(
            self._model.manifest.id,
            OnnxRunner(self._model, max_rows=arrivals.max_rows),
            max_admission_tokens=arrivals.max_admission_tokens,
            min_newcomers=quarter if arrivals.min_newcomers is None else arrivals.min_newcomers,
            observer=SilentObserver(),
        )

    def _visitor(
        self, index: int, job: Job, on_answer: Callable[[], None] = lambda: None, *, is_guest: bool = False
    ) -> _Visitor:
        limits, tokens = self._model.manifest.limits, self._model.manifest.tokens
        limit = job.options.target_limit(
            len(job.source), default_ratio=limits.max_target_ratio, model_limit=limits.max_target_tokens
        )
        outcomes: list[Outcome] = []

        def deliver(outcome: Outcome) -> None:
            outcomes.append(outcome)
            on_answer()

        entry = Entry(
            job.source,
            make_search(job.options, eos_id=tokens.eos_id, max_target_tokens=limit),
            max_target_tokens=limit,
            submitted_at_s=0.0,
            deliver=deliver,
            candidates=None if self._shortlist is None else self._shortlist.candidates(job.source),
        )
        return _Visitor(index, entry, is_guest, outcomes)


def _bursts(
    visitors: Sequence[_Visitor], arrivals: Arrivals, choice: random.Random
) -> Iterator[Sequence[_Visitor]]:
    start = 0
    while start < len(visitors):
        size = choice.randint(*arrivals.burst)
        yield visitors[start : start + size]
        start += size


def _cancel_some(arrived: list[_Visitor], choice: random.Random) -> None:
    """Cancel half of the guests, waiting or running; forget whoever needs no more thought."""
    for visitor in arrived[:]:
        is_running = visitor.entry.admitted_at_s is not None
        if not visitor.is_guest:
            arrived.remove(visitor)
        elif choice.random() < (0.1 if is_running else 0.005):
            arrived.remove(visitor)
            if choice.random() < 0.5:
                visitor.entry.cancel()


def _await(done: threading.Semaphore, count: int) -> int:
    for _ in range(count):
        if not done.acquire(timeout=_HANG_S):
            raise WrongAnswer(f"no answer came for {_HANG_S:.0f} s; an entry is lost")
    return count


def _answer(visitor: _Visitor) -> Hypotheses:
    return hypotheses_of(visitor.outcomes[0])
