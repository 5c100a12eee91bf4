"""What loading a bundle frees goes back to the system."""

from __future__ import annotations

import ctypes
import sys


def return_freed_memory() -> None:
    """Have the C library give back the pages it keeps for later; takes 10 to 30 ms after a bundle was loaded.

    onnxruntime folds weights while it loads a graph, with many times their size in between; glibc would
    keep 100 MB of that. Other C libraries have no such call, and nothing happens.
    """
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
