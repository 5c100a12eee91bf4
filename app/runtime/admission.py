"""How much work may be in the house: counted in source tokens, refused before it costs anything."""

from __future__ import annotations

import time
from collections.abc import Callable

from app.errors import QueueFull, RequestTooLarge

_HALF_LIFE_S = 10.0
_FIRST_GUESS_TOKENS_PER_S = 1000.0
_MIN_RETRY_AFTER_S = 1.0
_MAX_RETRY_AFTER_S = 60.0
"""The rate of a queue that hardly moves says little about the next minute."""


class Admission:
    """A budget of tokens accepted but not yet finished, and the measured rate they are finished at.

    Used on the event loop only.
    """

    def __init__(self, max_waiting_tokens: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Start empty.

        Args:
            max_waiting_tokens: the budget.
            clock: monotonic seconds.
        """
        self._max_waiting_tokens = max_waiting_tokens
        self._clock = clock
        self._num_waiting_tokens = 0
        # Decayed sums over the time anything was waiting: their quotient is the recent rate.
        self._finished_tokens = 0.0
        self._busy_s = 0.0
        self._measured_at_s = clock()

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens admitted and not finished."""
        return self._num_waiting_tokens

    def take(self, num_tokens: int) -> None:
        """Admit a request of about this many tokens.

        Raises:
            RequestTooLarge: it exceeds the whole budget, so waiting would never help.
            QueueFull: it does not fit now; says when it may.
        """
        self.check_size(num_tokens)
        self.grow(num_tokens)

    def grow(self, num_tokens: int) -> None:
        """Admit this many tokens more, or give some back when negative.

        Raises:
            QueueFull: they do not fit now; says when they may.
        """
        excess = self._num_waiting_tokens + num_tokens - self._max_waiting_tokens
        if excess > 0 and num_tokens > 0:
            raise QueueFull(
                f"{self._num_waiting_tokens} tokens are waiting and the limit is {self._max_waiting_tokens}; "
                f"this request needs about {num_tokens} more. Try again after the time in Retry-After",
                retry_after_s=min(max(_MIN_RETRY_AFTER_S, excess / self.tokens_per_s), _MAX_RETRY_AFTER_S),
            )
        self._count(num_tokens)

    def check_size(self, num_tokens: int) -> None:
        """Refuse what can never be admitted.

        Raises:
            RequestTooLarge: naming the size and the limit.
        """
        if num_tokens > self._max_waiting_tokens:
            raise RequestTooLarge(
                f"the request has about {num_tokens} tokens (source tokens times beams) and this service "
                f"holds at most {self._max_waiting_tokens} at a time; send it in smaller parts or with fewer "
                "beams"
            )

    def finish(self, num_tokens: int) -> None:
        """Take tokens out that were translated."""
        self._count(-num_tokens)
        self._finished_tokens += num_tokens

    def drop(self, num_tokens: int) -> None:
        """Take tokens out that will not be translated (failed or cancelled)."""
        self._count(-num_tokens)

    @property
    def tokens_per_s(self) -> float:
        """Tokens finished per busy second, over the last few half-lives; a guess before any."""
        if self._busy_s < 0.5 or self._finished_tokens < 1:
            return _FIRST_GUESS_TOKENS_PER_S
        return self._finished_tokens / self._busy_s

    def _count(self, num_tokens: int) -> None:
        now_s = self._clock()
        if self._num_waiting_tokens > 0:
            elapsed_s = now_s - self._measured_at_s
            decay = 0.5 ** (elapsed_s / _HALF_LIFE_S)
            self._finished_tokens *= decay
            self._busy_s = self._busy_s * decay + elapsed_s
        self._measured_at_s = now_s
        self._num_waiting_tokens += num_tokens


class Ticket:
    """What one request holds of the budget, given back segment by segment."""

    def __init__(self, admission: Admission, num_tokens: int) -> None:
        """Take the estimate; raises as `Admission.take` does."""
        admission.take(num_tokens)
        self._admission = admission
        self._num_tokens = num_tokens

    def correct(self, num_tokens: int) -> None:
        """Replace the estimate by the exact count.

        Raises:
            RequestTooLarge: the exact count exceeds the whole budget.
            QueueFull: it does not fit beside what is waiting; the estimate was too low.
        """
        self._admission.check_size(num_tokens)
        self._admission.grow(num_tokens - self._num_tokens)
        self._num_tokens = num_tokens

    def finish(self, num_tokens: int) -> None:
        """A segment was translated; later than `close` it counts no more."""
        num_tokens = min(num_tokens, self._num_tokens)
        self._num_tokens -= num_tokens
        self._admission.finish(num_tokens)

    def close(self) -> None:
        """Give back what is left; idempotent."""
        self._admission.drop(self._num_tokens)
        self._num_tokens = 0
