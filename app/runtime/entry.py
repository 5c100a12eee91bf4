"""One segment on its way through the queue, and what comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from app.decoding.greedy import GreedySearch
from app.decoding.guided import GuidedBeamSearch
from app.decoding.hypothesis import Hypothesis
from app.decoding.search import Search
from app.errors import DragomanError
from app.runtime.request import Priority
from app.runtime.runner import Int32Array, SearchKind


@dataclass(frozen=True)
class Outcome:
    """The one answer an entry gets: hypotheses or a named error.

    Attributes:
        result: the finished hypotheses, best first, at least one; or why there is none.
        queue_s: seconds from submission to the encoder.
        decode_s: seconds from the encoder to the last step.
        encode_s: seconds of the encoder pass, a part of `decode_s`; 0 where there was none.
    """

    result: tuple[Hypothesis, ...] | DragomanError
    queue_s: float
    decode_s: float
    encode_s: float = 0.0


class Entry:
    """A segment to be translated.

    Created by the engine on the event loop; afterwards only the worker thread touches it, except
    `cancel`, which may be called from any thread at any time.
    """

    def __init__(
        self,
        source_ids: Sequence[int],
        search: Search,
        *,
        max_target_tokens: int,
        submitted_at_s: float,
        deliver: Callable[[Outcome], None],
        candidates: Int32Array | None = None,
        request: int = 0,
        priority: Priority = Priority.INTERACTIVE,
        deadline_s: float | None = None,
    ) -> None:
        """Describe one segment.

        Args:
            source_ids: token ids with the final end-of-sentence.
            search: fresh search state; consumed.
            max_target_tokens: most steps the search will take.
            submitted_at_s: monotonic seconds.
            deliver: called exactly once, from the worker thread; must not raise.
            candidates: sorted ids the output is limited to, or None.
            request: number of the request it belongs to; requests take turns.
            priority: whether it goes before or after others.
            deadline_s: monotonic seconds after which it must not run any more, or None.
        """
        self.source_ids = source_ids
        self.search = search
        self.max_target_tokens = max_target_tokens
        self.candidates = candidates
        self.request = request
        self.priority = priority
        self.deadline_s = deadline_s
        self.submitted_at_s = submitted_at_s
        self.admitted_at_s: float | None = None
        self.encoded_at_s: float | None = None
        self._deliver = deliver
        self._cancelled = False
        self._on_cancel: Callable[[Entry], None] = _nobody_watches
        self._resolved = False

    @property
    def num_source_tokens(self) -> int:
        """Source length, end-of-sentence included: the unit of every budget."""
        return len(self.source_ids)

    @property
    def search_kind(self) -> SearchKind:
        """Which row groups can run it."""
        if isinstance(self.search, GreedySearch):
            return SearchKind.GREEDY
        return SearchKind.GUIDED if isinstance(self.search, GuidedBeamSearch) else SearchKind.BEAMS

    @property
    def cancelled(self) -> bool:
        """Whether the caller no longer wants the answer."""
        return self._cancelled

    def cancel(self) -> None:
        """Ask for the entry to leave; its rows go at the next step. Idempotent, any thread."""
        self._cancelled = True
        self._on_cancel(self)

    def watch_cancellation(self, on_cancel: Callable[[Entry], None]) -> None:
        """Call `on_cancel` when the entry is cancelled, from the cancelling thread, or now if it was."""
        self._on_cancel = on_cancel
        if self._cancelled:
            on_cancel(self)

    def resolve(self, result: tuple[Hypothesis, ...] | DragomanError, *, now_s: float) -> None:
        """Deliver the answer; later calls do nothing, so an entry is answered exactly once."""
        if self._resolved:
            return
        self._resolved = True
        admitted_at_s = now_s if self.admitted_at_s is None else self.admitted_at_s
        encoded_at_s = admitted_at_s if self.encoded_at_s is None else self.encoded_at_s
        self._deliver(
            Outcome(
                result,
                queue_s=admitted_at_s - self.submitted_at_s,
                decode_s=now_s - admitted_at_s,
                encode_s=encoded_at_s - admitted_at_s,
            )
        )


def _nobody_watches(_entry: Entry) -> None:
    """The entry is not queued yet."""
