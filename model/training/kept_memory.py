"""What a training step frees stays with the process for the next one."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Of `mallopt`, glibc's malloc.h."""
_NEVER, _NONE = -1, 0


def keep_freed_memory() -> None:
    """Have the C library keep what is freed instead of giving it back to the system at once.

    Every step makes and frees the same tensors, some of more than 32 MB. glibc maps such ones anew each time,
    and gives the end of its heap back; the system then clears every page again: a sixth of a step of
    distillation. Where the C library has no such options, nothing happens. It holds for the main thread,
    PyTorch's backward pass on a CPU included; what the process once needed it keeps to its end.
    """
    if sys.platform != "linux":
        return
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_MMAP_MAX, _NONE)
        set_option(_M_TRIM_THRESHOLD, _NEVER)
