"""Ctrl-C at a moment that suits: a run that is asked to stop finishes its step first."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Self


class Interruption:
    """While it is entered, the first SIGINT is noted and the second one raises KeyboardInterrupt.

    Python raises KeyboardInterrupt between any two instructions: in the middle of an update, some weights
    would be of the step before and some of the step after. Where SIGINT is ignored, as in a shell's
    background jobs, and in threads other than the main one, nothing changes.
    """

    def __init__(self) -> None:
        """Not asked yet."""
        self._was_asked = False
        self._is_installed = False

    @property
    def was_asked(self) -> bool:
        """Whether SIGINT came."""
        return self._was_asked

    def __enter__(self) -> Self:
        """Listen."""
        self._before = signal.getsignal(signal.SIGINT)
        if self._before not in (signal.SIG_IGN, None):
            try:
                signal.signal(signal.SIGINT, self._note)
                self._is_installed = True
            except ValueError:  # only the main thread may; SIGINT is its business then
                self._is_installed = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave SIGINT as it was."""
        if self._is_installed:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self._was_asked:
            raise KeyboardInterrupt
        self._was_asked = True
