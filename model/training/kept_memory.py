"""What a training step frees stays with the process for the next one."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Of `mallopt`, glibc's malloc.h."""
_NEVER, _NONE = -1, 0


def keep_freed_memory() -> None:
    """Have the C library keep what is freed instead of giving it back to the system at once.

    Every step makes the same tensors of 10 to 100 MB and frees them. glibc would map each anew and give it
    back, and the system would clear its pages every time: a sixth of a step of distillation. Other C
    libraries have no such call, and nothing happens. For the whole process, best before anything large is
    made; what a process once needed it keeps to its end.
    """
    if sys.platform != "linux":
        return
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_MMAP_MAX, _NONE)
        set_option(_M_TRIM_THRESHOLD, _NEVER)
