"""Our engine below asyncio and text: token ids in, hypotheses out, for measurements and comparisons."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from app.bundle import Bundle
from app.bundle.manifest import Variant
from app.decoding.guidance import Guidance
from app.decoding.hypothesis import Hypothesis
from app.decoding.options import DecodingOptions
from app.decoding.search import make_search
from app.decoding.shortlist import Shortlist
from app.errors import DragomanError, WorkerFailed
from app.runtime.engine_options import COMPANY, MAX_HELD_STEPS
from app.runtime.entry import Entry, Outcome
from app.runtime.events import RuntimeObserver, SilentObserver
from app.runtime.lane import Lane
from app.runtime.onnx_model import OnnxModel, load_model
from app.runtime.onnx_runner import OnnxRunner
from app.runtime.worker import Worker

Hypotheses = tuple[Hypothesis, ...]
"""All hypotheses of one segment, best first."""

_LANE = "benchmark"
_MAX_ADMISSION_TOKENS = 1024
_LOOK_S = 1.0
"""Seconds between two looks at whether the worker threads still live."""
_STOP_S = 60.0


class LocalEngine:
    """Workers for throughput and one lane for latency, over the same loaded graphs.

    A context manager: the worker threads live as long as its block. The parts are those of the
    service (lane, scheduler, runner, worker), without its queue budget, event loop and text handling.
    """

    def __init__(
        self,
        model: OnnxModel,
        *,
        shortlist: Shortlist | None = None,
        num_threads: int = 1,
        max_rows: int = 64,
        observer: RuntimeObserver | None = None,
    ) -> None:
        """Put the parts together.

        Args:
            model: loaded graphs, with their shortlist exactly when `shortlist` is given.
            shortlist: limits each segment's output, or None for the whole vocabulary.
            num_threads: decoding threads of `translate` and `submit`.
            max_rows: rows of a row group, for each thread.
            observer: told of every step, or None.
        """
        self.model = model
        self._shortlist = shortlist
        self._max_rows = max_rows
        self._observer = observer or SilentObserver()
        self._lane = self._make_lane()
        self._workers = [
            Worker(f"benchmark-{index}", {_LANE: self._make_lane()}) for index in range(num_threads)
        ]
        # As the service's engine does: a segment goes to the worker with the fewest source tokens.
        self._tokens_of_worker = [0] * num_threads
        self._count_lock = threading.Lock()

    @classmethod
    def open(
        cls,
        bundle: Bundle,
        *,
        variant: Variant = "cpu-int8",
        use_shortlist: bool = False,
        num_threads: int = 1,
        max_rows: int = 64,
        observer: RuntimeObserver | None = None,
    ) -> LocalEngine:
        """Load a bundle's graphs; the other arguments are those of the constructor.

        Args:
            bundle: what to run.
            variant: which arithmetic.
            use_shortlist: limit each segment's output to the bundle's shortlist.
            num_threads: decoding threads.
            max_rows: rows of a row group.
            observer: told of every step, or None.

        Raises:
            ValueError: a shortlist is asked for and the bundle has none.
        """
        return cls(
            load_model(bundle, variant=variant, use_shortlist=use_shortlist),
            shortlist=load_shortlist(bundle) if use_shortlist else None,
            num_threads=num_threads,
            max_rows=max_rows,
            observer=observer,
        )

    def __enter__(self) -> LocalEngine:
        """Start the worker threads."""
        for worker in self._workers:
            worker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the worker threads."""
        for worker in self._workers:
            worker.stop(timeout_s=_STOP_S)

    def translate(
        self,
        sources: Sequence[Sequence[int]],
        options: DecodingOptions | None = None,
        *,
        max_target_tokens: int | Sequence[int] | None = None,
        guidances: Sequence[Guidance | None] | None = None,
    ) -> list[Hypotheses]:
        """Translate all at once over all threads; results in the order of the sources.

        Args:
            sources: token ids, each with the final end-of-sentence.
            options: greedy search unless given.
            max_target_tokens: limit of every segment, or of each; None for what options and bundle say.
            guidances: what is asked of each segment's target; None leaves all to the model.

        Raises:
            DragomanError: the first failure of a segment.
        """
        options = options or DecodingOptions()
        outcomes: list[Outcome | None] = [None] * len(sources)
        done = threading.Semaphore(0)

        def deliver_to(index: int) -> Callable[[Outcome], None]:
            def deliver(outcome: Outcome) -> None:
                outcomes[index] = outcome
                done.release()

            return deliver

        limits = self._limits(sources, options, max_target_tokens)
        guided = guidances or [None] * len(sources)
        for index, (source, limit, guidance) in enumerate(zip(sources, limits, guided, strict=True)):
            self.submit(
                source, options, max_target_tokens=limit, deliver=deliver_to(index), guidance=guidance
            )
        for _ in sources:
            while not done.acquire(timeout=_LOOK_S):
                self._check_alive()
        return [hypotheses_of(outcome) for outcome in outcomes if outcome is not None]

    def one_by_one(
        self,
        sources: Sequence[Sequence[int]],
        options: DecodingOptions | None = None,
        *,
        max_target_tokens: int | Sequence[int] | None = None,
        guidances: Sequence[Guidance | None] | None = None,
    ) -> list[Hypotheses]:
        """Translate one after another in the calling thread; arguments and errors as `translate`."""
        options = options or DecodingOptions()
        results: list[Hypotheses] = []
        limits = self._limits(sources, options, max_target_tokens)
        guided = guidances or [None] * len(sources)
        for source, limit, guidance in zip(sources, limits, guided, strict=True):
            outcomes: list[Outcome] = []
            self._lane.add(self._entry(source, options, limit, outcomes.append, guidance))
            while self._lane.has_work:
                self._lane.tick()
            results.append(hypotheses_of(outcomes[0]))
        return results

    def submit(
        self,
        source: Sequence[int],
        options: DecodingOptions,
        *,
        max_target_tokens: int,
        deliver: Callable[[Outcome], None],
        guidance: Guidance | None = None,
    ) -> None:
        """Hand one segment to the least busy worker; `deliver` is called from that worker's thread.

        Args:
            source: token ids with the final end-of-sentence.
            options: of the decoding.
            max_target_tokens: limit of the segment.
            deliver: called exactly once; must not raise.
            guidance: what is asked of the segment's target, or None.
        """
        num_tokens = len(source)

        def finish(outcome: Outcome) -> None:
            with self._count_lock:
                self._tokens_of_worker[index] -= num_tokens
            deliver(outcome)

        entry = self._entry(source, options, max_target_tokens, finish, guidance)
        with self._count_lock:
            index = min(range(len(self._workers)), key=self._tokens_of_worker.__getitem__)
            self._tokens_of_worker[index] += num_tokens
        self._workers[index].submit(_LANE, entry)

    def _make_lane(self) -> Lane:
        return Lane(
            self.model.manifest.id,
            OnnxRunner(self.model, max_rows=self._max_rows),
            max_admission_tokens=_MAX_ADMISSION_TOKENS,
            min_newcomers=max(1, self._max_rows // 4),
            company=COMPANY,
            max_held_steps=MAX_HELD_STEPS,
            observer=self._observer,
        )

    def _entry(
        self,
        source: Sequence[int],
        options: DecodingOptions,
        max_target_tokens: int,
        deliver: Callable[[Outcome], None],
        guidance: Guidance | None,
    ) -> Entry:
        return Entry(
            source,
            make_search(
                options,
                eos_id=self.model.manifest.tokens.eos_id,
                max_target_tokens=max_target_tokens,
                guidance=guidance,
            ),
            max_target_tokens=max_target_tokens,
            submitted_at_s=time.monotonic(),
            deliver=deliver,
            candidates=None if self._shortlist is None else self._shortlist.candidates(source),
        )

    def _limits(
        self,
        sources: Sequence[Sequence[int]],
        options: DecodingOptions,
        max_target_tokens: int | Sequence[int] | None,
    ) -> Sequence[int]:
        if isinstance(max_target_tokens, int):
            return [max_target_tokens] * len(sources)
        if max_target_tokens is not None:
            return max_target_tokens
        limits = self.model.manifest.limits
        return [
            options.target_limit(
                len(source), default_ratio=limits.max_target_ratio, model_limit=limits.max_target_tokens
            )
            for source in sources
        ]

    def _check_alive(self) -> None:
        if not all(worker.alive for worker in self._workers):
            raise WorkerFailed("a decoding thread has died or was never started; its segments have no answer")


def load_shortlist(bundle: Bundle) -> Shortlist:
    """The bundle's shortlist.

    Raises:
        ValueError: it has none.
    """
    name = bundle.manifest.shortlist
    if name is None:
        raise ValueError(f"bundle {bundle.manifest.id} has no shortlist; measure it without one")
    return Shortlist.load(bundle.file(name))


def hypotheses_of(outcome: Outcome) -> Hypotheses:
    """What an outcome holds.

    Raises:
        DragomanError: the failure it holds instead.
    """
    if isinstance(outcome.result, DragomanError):
        raise outcome.result
    return outcome.result


def num_tokens(results: Sequence[Hypotheses]) -> int:
    """Decoded tokens of the best hypotheses, end-of-sentence included where it was chosen."""
    return sum(hypotheses[0].num_decoded for hypotheses in results)
