"""Memory: what is freed goes back, and what is not written is not taken."""

import ctypes
import sys
from pathlib import Path

import numpy as np
import pytest

from app.runtime.freed_memory import return_freed_memory
from app.runtime.onnx_buffers import _untouched_zeros

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
MIB = 1024 * 1024


def resident_bytes() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in line)
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only glibc keeps it")
def test_what_was_freed_goes_back_to_the_system() -> None:
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    library.free.argtypes = [ctypes.c_void_p]
    blocks = [library.malloc(ctypes.c_size_t(100_000)) for _ in range(800)]  # too small to be mapped
    for block in blocks:
        ctypes.memset(ctypes.c_void_p(block), 1, 100_000)
    for block in blocks[:-1]:  # the last one keeps the heap's end where it is
        library.free(block)
    before = resident_bytes()
    return_freed_memory()
    assert before - resident_bytes() > 50 * MIB
    library.free(blocks[-1])


def test_the_caches_of_a_group_are_zero_and_cost_only_what_is_written() -> None:
    before = resident_bytes()
    array = _untouched_zeros((64, MIB))
    assert resident_bytes() - before < 16 * MIB
    assert array.dtype == np.float32
    assert array.flags.writeable
    assert array.flags.c_contiguous
    array[3, :8] = 1.0
    assert array[3].sum() == 8
    assert not array[4].any()
