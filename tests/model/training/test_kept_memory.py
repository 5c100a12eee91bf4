from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from model.training import cli

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


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library has no such options")
def test_large_blocks_come_from_memory_that_is_there() -> None:
    # Huge pages, where the system gives them unasked, would make it few faults either way.
    if (without := page_faults("")) < 5000:
        pytest.skip(f"the system hands out large blocks with {without} page faults")
    assert page_faults("keep_freed_memory()") < 100


def test_a_run_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    def trained(*_: object, **__: object) -> Path:
        happened.append("trained")
        return tmp_path

    monkeypatch.setattr(cli, "keep_freed_memory", lambda: happened.append("kept"))
    monkeypatch.setattr(cli, "run_training", trained)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    (tmp_path / "pairs.tsv").write_text("a\tb\n", encoding="utf-8")
    (tmp_path / "run.toml").write_text(
        """source = "en"
target = "pt"
output = "run"
[[data.source]]
name = "pairs"
path = "pairs.tsv"
[vocabulary]
size = 64
[model]
""",
        encoding="utf-8",
    )
    cli.train(tmp_path / "run.toml")
    assert happened == ["kept", "trained"]
