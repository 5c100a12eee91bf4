"""Whether SIGHUP means what it first meant: the terminal is gone."""

from __future__ import annotations

import errno
import termios

_STANDARD_INPUT = 0


def has_hung_up(descriptor: int = _STANDARD_INPUT) -> bool:
    """Whether a descriptor is of a terminal that was closed; not so files, pipes and open terminals."""
    try:
        termios.tcgetattr(descriptor)
    except termios.error as error:
        return bool(error.args[0] == errno.EIO)
    return False
