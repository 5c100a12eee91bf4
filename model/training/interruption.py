"""Ctrl-C and SIGTERM at a moment that suits: a run that is asked to stop finishes its step first."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """While it is entered, the first SIGINT or SIGTERM is noted and the second one raises KeyboardInterrupt.

    Python raises KeyboardInterrupt between any two instructions: in the middle of an update, some weights
    would be of the step before and some of the step after. Where a signal is ignored, as SIGINT is in a
    shell's background jobs, and in threads other than the main one, nothing changes.
    """

    def __init__(self) -> None:
        """Not asked yet."""
        self._was_asked = False
        self._before: dict[signal.Signals, Any] = {}

    @property
    def was_asked(self) -> bool:
        """Whether a signal came."""
        return self._was_asked

    def __enter__(self) -> Self:
        """Listen."""
        for number in _SIGNALS:
            before = signal.getsignal(number)
            if before in (signal.SIG_IGN, None):
                continue
            try:
                signal.signal(number, self._note)
            except ValueError:  # only the main thread may; signals are its business then
                break
            self._before[number] = before
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the signals as they were."""
        for number, before in self._before.items():
            signal.signal(number, before)

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self._was_asked:
            raise KeyboardInterrupt
        self._was_asked = True
