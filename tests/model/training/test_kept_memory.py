from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LARGE_BLOCKS = """
import resource
from model.training.kept_memory import keep_freed_memory
{first}
def made():
    return len(b"x" * 64_000_000)  # 15,625 pages of 4 KB
made()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    made()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(first: str) -> int:
    code = LARGE_BLOCKS.format(first=first)
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return int(ran.stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="only glibc gives it back")
def test_large_blocks_come_from_memory_that_is_there() -> None:
    # Huge pages, where the system gives them unasked, would make it few faults either way.
    if (without := page_faults("")) < 5000:
        pytest.skip(f"the system hands out large blocks with {without} page faults")
    assert page_faults("keep_freed_memory()") < 100
