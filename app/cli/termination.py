"""SIGTERM ends a command as Ctrl-C does, so that what it keeps and cleans up then is kept and cleaned up."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """While it is entered, SIGTERM does what Ctrl-C does at that moment.

    Its own default ends the process at once: temporary folders stay, finished lines are lost. Nothing changes
    where SIGTERM has another handler already, and in threads other than the main one, which may not set any.
    A command with a handler of its own, as `serve` and `train`, sets it afterwards, and that one holds.
    """
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    try:
        signal.signal(signal.SIGTERM, _as_ctrl_c)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _as_ctrl_c(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  # signal's signature
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a script's background jobs
        raise KeyboardInterrupt
    # Whoever listens for Ctrl-C, as asyncio does, is to hear it.
    signal.raise_signal(signal.SIGINT)
