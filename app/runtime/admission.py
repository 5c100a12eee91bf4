"""How much work may be in the house: counted in source tokens, refused before it costs anything."""

from __future__ import annotations

import time
from collections.abc import Callable

from app.errors import QueueFull, RequestTooLarge
from app.runtime.request import Priority
from app.runtime.scheduler import BULK_TURN

_HALF_LIFE_S = 10.0
_FIRST_GUESS_TOKENS_PER_S = 1000.0
_MIN_RETRY_AFTER_S = 1.0
_MAX_RETRY_AFTER_S = 60.0
"""The rate of a queue that hardly moves says little about the next minute."""


class Admission:
    """A budget of tokens accepted but not yet finished, and the measured rate they are finished at.

    Used on the event loop only.
    """

    def __init__(
        self,
        max_waiting_tokens: int,
        *,
        num_seated_tokens: int = 0,
        max_bulk_share: float = 0.75,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start empty.

        Args:
            max_waiting_tokens: the budget.
            num_seated_tokens: about so many tokens are decoded side by side without anybody waiting. With
                less in the house the rate is what was asked for and not what could be done, so it is
                measured above this only, or above a quarter of the budget if that is less.
            max_bulk_share: share of the budget that bulk may hold.
            clock: monotonic seconds.
        """
        self._max_tokens = {
            Priority.INTERACTIVE: max_waiting_tokens,
            Priority.BULK: int(max_waiting_tokens * max_bulk_share),
        }
        self._num_seated_tokens = num_seated_tokens
        self._min_busy_tokens = max(1, min(num_seated_tokens, max_waiting_tokens // 4))
        self._clock = clock
        self._num_tokens = dict.fromkeys(Priority, 0)
        self._num_requests = dict.fromkeys(Priority, 0)
        # Decayed sums over the busy time: their quotient is the recent rate.
        self._finished_tokens = 0.0
        self._busy_s = 0.0
        self._measured_at_s = clock()

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens admitted and not finished."""
        return sum(self._num_tokens.values())

    @property
    def tokens_per_s(self) -> float:
        """Tokens finished per busy second, over the last few half-lives; a guess before any."""
        return self._finished_tokens / self._busy_s if self._is_measured else _FIRST_GUESS_TOKENS_PER_S

    @property
    def _is_measured(self) -> bool:
        return self._busy_s >= 0.5 and self._finished_tokens >= 1

    def take(self, num_tokens: int, *, priority: Priority, timeout_s: float | None) -> None:
        """Admit a request of about this many tokens.

        Args:
            num_tokens: source tokens times beams.
            priority: whether it may use the whole budget or bulk's share.
            timeout_s: seconds after which its answer is of no use, or None.

        Raises:
            RequestTooLarge: it exceeds the whole budget, so waiting would never help.
            QueueFull: it does not fit now, or would not be done in time; says when it may.
        """
        self.check_size(num_tokens, priority=priority)
        self.check_room(num_tokens, priority=priority)
        wait_s = self.estimated_wait_s(num_tokens, priority=priority)
        if timeout_s is not None and wait_s is not None and wait_s > timeout_s:
            raise QueueFull(
                f"the work ahead of this request takes about {wait_s:.1f} s and the request allows "
                f"{timeout_s:g} s; try again after the time in Retry-After, or allow more",
                retry_after_s=_bounded(wait_s - timeout_s),
            )
        self.grow(num_tokens, priority=priority)
        self._num_requests[priority] += 1

    def leave(self, priority: Priority) -> None:
        """A request that was taken is gone."""
        self._num_requests[priority] -= 1

    def estimated_wait_s(self, num_tokens: int, *, priority: Priority) -> float | None:
        """Seconds until all of a newcomer's segments run, at the measured rate; None before any.

        Requests take turns, so each that waits goes before the newcomer with no more than the newcomer's
        own size; of the other priority goes what `Scheduler` grants it.
        """
        if not self._is_measured:
            return None
        before = min(self._num_tokens[priority], self._num_requests[priority] * num_tokens) + num_tokens
        if priority is Priority.INTERACTIVE:
            before += min(self._num_tokens[Priority.BULK], before // (BULK_TURN - 1))
        else:
            before += min(self._num_tokens[Priority.INTERACTIVE], before * (BULK_TURN - 1))
        return max(0.0, (before - self._num_seated_tokens) / self.tokens_per_s)

    def check_room(self, num_tokens: int, *, priority: Priority) -> None:
        """Refuse what does not fit now.

        Raises:
            QueueFull: says when it may.
        """
        bulk = self._num_tokens[Priority.BULK] + num_tokens if priority is Priority.BULK else 0
        excess = max(
            self.num_waiting_tokens + num_tokens - self._max_tokens[Priority.INTERACTIVE],
            bulk - self._max_tokens[Priority.BULK],
        )
        if excess > 0 and num_tokens > 0:
            raise QueueFull(
                f"{self.num_waiting_tokens} tokens are waiting and the limit {_for(priority)}is "
                f"{self._max_tokens[priority]}; this request needs about {num_tokens} more. Try again after "
                "the time in Retry-After",
                retry_after_s=_bounded(excess / self.tokens_per_s),
            )

    def grow(self, num_tokens: int, *, priority: Priority) -> None:
        """Admit this many tokens more, or give some back when negative.

        Raises:
            QueueFull: they do not fit now; says when they may.
        """
        self.check_room(num_tokens, priority=priority)
        self._count(num_tokens, priority)

    def check_size(self, num_tokens: int, *, priority: Priority) -> None:
        """Refuse what can never be admitted.

        Raises:
            RequestTooLarge: naming the size and the limit.
        """
        if num_tokens > self._max_tokens[priority]:
            raise RequestTooLarge(
                f"the request has about {num_tokens} tokens (source tokens times beams) and this service "
                f"holds at most {self._max_tokens[priority]} {_for(priority)}at a time; send it in smaller "
                "parts or with fewer beams"
            )

    def finish(self, num_tokens: int, *, priority: Priority) -> None:
        """Take tokens out that were translated."""
        was_busy = self._is_busy
        self._count(-num_tokens, priority)
        if was_busy:
            self._finished_tokens += num_tokens

    def drop(self, num_tokens: int, *, priority: Priority) -> None:
        """Take tokens out that will not be translated (failed or cancelled)."""
        self._count(-num_tokens, priority)

    @property
    def _is_busy(self) -> bool:
        return self.num_waiting_tokens >= self._min_busy_tokens

    def _count(self, num_tokens: int, priority: Priority) -> None:
        now_s = self._clock()
        if self._is_busy:
            elapsed_s = now_s - self._measured_at_s
            decay = 0.5 ** (elapsed_s / _HALF_LIFE_S)
            self._finished_tokens *= decay
            self._busy_s = self._busy_s * decay + elapsed_s
        self._measured_at_s = now_s
        self._num_tokens[priority] += num_tokens


class Ticket:
    """What one request holds of the budget, given back segment by segment."""

    def __init__(
        self,
        admission: Admission,
        num_tokens: int,
        *,
        priority: Priority = Priority.INTERACTIVE,
        timeout_s: float | None = None,
    ) -> None:
        """Take the estimate; raises as `Admission.take` does."""
        admission.take(num_tokens, priority=priority, timeout_s=timeout_s)
        self._admission = admission
        self._num_tokens = num_tokens
        self._priority = priority
        self._closed = False

    def correct(self, num_tokens: int) -> None:
        """Replace the estimate by the exact count.

        Raises:
            RequestTooLarge: the exact count exceeds the whole budget.
            QueueFull: it does not fit beside what is waiting; the estimate was too low.
        """
        self._admission.check_size(num_tokens, priority=self._priority)
        self._admission.grow(num_tokens - self._num_tokens, priority=self._priority)
        self._num_tokens = num_tokens

    def finish(self, num_tokens: int) -> None:
        """A segment was translated; later than `close` it counts no more."""
        num_tokens = min(num_tokens, self._num_tokens)
        self._num_tokens -= num_tokens
        self._admission.finish(num_tokens, priority=self._priority)

    def drop(self, num_tokens: int) -> None:
        """A segment needs no work, so it says nothing about how fast work is done."""
        num_tokens = min(num_tokens, self._num_tokens)
        self._num_tokens -= num_tokens
        self._admission.drop(num_tokens, priority=self._priority)

    def close(self) -> None:
        """Give back what is left; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._admission.drop(self._num_tokens, priority=self._priority)
        self._admission.leave(self._priority)
        self._num_tokens = 0


def _bounded(retry_after_s: float) -> float:
    return min(max(_MIN_RETRY_AFTER_S, retry_after_s), _MAX_RETRY_AFTER_S)


def _for(priority: Priority) -> str:
    return "for bulk " if priority is Priority.BULK else ""
