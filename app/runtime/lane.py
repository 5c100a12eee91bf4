"""One model's decoding loop, a step at a time: scheduler, runner and searches put together.

Driven by exactly one worker thread; holds no lock and starts no thread, so tests drive it by hand.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

from app.errors import DeadlineExceeded, DragomanError, RequestCancelled, WorkerFailed
from app.runtime.advance import advance
from app.runtime.entry import Entry
from app.runtime.events import AdmissionEvent, RuntimeObserver, StepEvent
from app.runtime.runner import DeviceLost, ModelRunner, SourceRow
from app.runtime.scheduler import Admission, Departure, Scheduler

_MAX_PASS_S = 60.0
"""Most that is granted to a pass. At some 4 ms a token, a model of the base size on a slow core, the 1,024
tokens of a CPU's largest pass take 4 s, unless somebody allowed more; the 16,384 of a GPU's take less."""


def _nobody_listens(_expected_s: float) -> None:
    """Tests drive a lane by hand."""


class Lane:
    """Decodes the entries of one model, whoever joins or leaves in between."""

    def __init__(
        self,
        model: str,
        runner: ModelRunner,
        *,
        max_admission_tokens: int,
        min_newcomers: int = 1,
        company: int = 1,
        max_held_steps: int = 0,
        max_bulk_share: float = 0.75,
        first_pass_s: float = 0.0,
        observer: RuntimeObserver,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Put a model's parts together.

        Args:
            model: bundle id, for events and errors.
            runner: owned by this lane; not shared.
            max_admission_tokens: see `Scheduler`.
            min_newcomers: see `Scheduler`.
            company: see `Scheduler`.
            max_held_steps: see `Scheduler`.
            max_bulk_share: see `Scheduler`.
            first_pass_s: what a group's first pass may take, where the runner makes ready for the group then;
                0 where it does not, so that the first pass is like any other.
            observer: told of every step.
            clock: monotonic seconds.
        """
        self.model = model
        self._runner = runner
        self._scheduler = Scheduler(
            runner.groups,
            max_admission_tokens=max_admission_tokens,
            min_newcomers=min_newcomers,
            company=company,
            max_held_steps=max_held_steps,
            max_bulk_share=max_bulk_share,
        )
        self._observer = observer
        self._clock = clock
        self._first_pass_s = first_pass_s
        self._encoder_s_per_token: float | None = None  # of the last pass, long first ones aside
        self._groups_begun: set[int] = set()

    @property
    def has_work(self) -> bool:
        """Whether a tick would do anything."""
        return self._scheduler.has_work

    def add(self, entry: Entry) -> None:
        """Queue an entry."""
        self._scheduler.add(entry)

    def tick(self, beat: Callable[[float], None] = _nobody_listens) -> None:
        """Let cancelled and expired entries go, admit newcomers, run one decoder step of one group.

        Never raises for a failing graph: every entry it held is answered with WorkerFailed.

        Raises:
            DeviceLost: the runner can do nothing any more.

        Args:
            beat: called around every encoder pass, with the seconds that the pass is expected to take and
                with 0 behind it: a long pass is no hanging one.
        """
        self._release_lapsed()
        admissions = self._scheduler.schedule()
        for group, newcomers in itertools.groupby(
            sorted(admissions, key=lambda item: (item.group, item.slot)), key=lambda item: item.group
        ):
            self._admit(group, list(newcomers), beat)
        group_to_step = self._scheduler.next_group()
        if group_to_step is not None:
            self._step(group_to_step)

    def fail_all(self, error: DragomanError) -> None:
        """Answer everything waiting or running with the error."""
        now_s = self._clock()
        for entry in self._scheduler.clear():
            entry.resolve(error, now_s=now_s)

    def _release_lapsed(self) -> None:
        now_s = self._clock()
        lapses = self._scheduler.release(now_s)
        entries = [*lapses.never_ran, *(departure.entry for departure in lapses.departures)]
        if not entries:
            return
        for entry in entries:
            entry.resolve(
                RequestCancelled("the request was cancelled before it was translated")
                if entry.cancelled
                else DeadlineExceeded("the time allowed for the request passed before it was translated"),
                now_s=now_s,
            )
        for group, left in itertools.groupby(lapses.departures, key=lambda departure: departure.group):
            try:
                for departure in left:
                    self._close_gap(departure)
            except Exception as error:  # noqa: BLE001 - the border: whatever a runner raises becomes an answer
                self._fail(self._scheduler.clear_group(group), error)
                _end_if_lost(error)
        num_cancelled = sum(entry.cancelled for entry in entries)
        if num_cancelled:
            self._observer.on_cancelled(self.model, num_segments=num_cancelled)
        if len(entries) > num_cancelled:
            self._observer.on_expired(self.model, num_segments=len(entries) - num_cancelled)

    def _admit(self, group: int, admissions: Sequence[Admission], beat: Callable[[float], None]) -> None:
        num_padded_tokens = self._runner.groups[group].source_length * len(admissions)
        is_first = bool(self._first_pass_s) and group not in self._groups_begun
        if is_first or self._encoder_s_per_token is None:
            beat(self._first_pass_s)
        else:
            beat(min(_MAX_PASS_S, num_padded_tokens * self._encoder_s_per_token))
        started_at_s = self._clock()
        rows = [
            SourceRow(
                slot=admission.slot,
                source_ids=admission.entry.source_ids,
                max_target_tokens=admission.entry.max_target_tokens,
                candidates=admission.entry.candidates,
            )
            for admission in admissions
        ]
        for admission in admissions:
            admission.entry.admitted_at_s = started_at_s
        try:
            self._runner.admit(group, rows)
        except Exception as error:  # noqa: BLE001 - the border: whatever a graph raises becomes an answer
            # The newcomers sit behind all older rows, so taking the last first moves nobody.
            failed = [admission.entry for admission in reversed(admissions)]
            for entry in failed:
                self._scheduler.leave(group, entry)
            self._fail(failed, error)
            _end_if_lost(error)
            return
        finally:
            beat(0.0)
        duration_s = self._clock() - started_at_s
        for admission in admissions:
            admission.entry.encoded_at_s = started_at_s + duration_s
        if not is_first:
            self._encoder_s_per_token = duration_s / num_padded_tokens
        self._groups_begun.add(group)
        self._observer.on_admission(
            AdmissionEvent(
                model=self.model,
                queue_s=tuple(started_at_s - item.entry.submitted_at_s for item in admissions),
                num_source_tokens=sum(item.entry.num_source_tokens for item in admissions),
                num_padded_tokens=num_padded_tokens,
                duration_s=duration_s,
            )
        )

    def _step(self, group: int) -> None:
        entries = self._scheduler.running(group)
        started_at_s = self._clock()
        left: list[Entry] = []
        try:
            finished = advance(self._runner, group, entries)
            for entry in finished:
                left.append(entry)
                self._close_gap(self._scheduler.leave(group, entry))
            results = [entry.search.hypotheses() for entry in finished]
        except Exception as error:  # noqa: BLE001 - the border: whatever a graph raises becomes an answer
            self._fail([*self._scheduler.clear_group(group), *entries], error)
            _end_if_lost(error)
            return
        except BaseException as error:
            self._fail(left, error)  # the thread ends, and `fail_all` does not find them
            raise
        now_s = self._clock()
        # Answered first: what they left can no longer be answered by `fail_all`.
        for entry, hypotheses in zip(finished, results, strict=True):
            entry.resolve(hypotheses, now_s=now_s)
        self._observer.on_step(
            StepEvent(
                model=self.model,
                num_rows=len(entries) * self._runner.groups[group].num_beams,
                source_length=self._runner.groups[group].source_length,
                num_source_tokens=sum(entry.num_source_tokens for entry in entries),
                duration_s=now_s - started_at_s,
            )
        )
        for best, *_ in results:
            self._observer.on_finished(
                self.model, num_target_tokens=best.num_decoded, finish_reason=best.finish_reason.value
            )

    def _close_gap(self, departure: Departure) -> None:
        if departure.move is not None:
            self._runner.move(
                departure.group, from_slot=departure.move.from_slot, to_slot=departure.move.to_slot
            )

    def _fail(self, entries: Sequence[Entry], error: BaseException) -> None:
        now_s = self._clock()
        held = list(dict.fromkeys(entries))
        for entry in held:
            failure = WorkerFailed(
                f"decoding with model {self.model} failed ({type(error).__name__}); nothing of this "
                "segment was translated. Try again; if it repeats, the service's log has the cause"
            )
            failure.__cause__ = error
            entry.resolve(failure, now_s=now_s)
        if isinstance(error, Exception):
            self._observer.on_failure(self.model, num_segments=len(held), error=error)


def _end_if_lost(error: Exception) -> None:
    """Let the worker end with its device, so that it is replaced, or the process ends."""
    if isinstance(error, DeviceLost):
        raise error
