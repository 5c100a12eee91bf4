from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from model.training import launcher


def python(code: str) -> list[str]:
    return [sys.executable, "-c", f"import os, sys, time, pathlib\nrank = int(os.environ['RANK'])\n{code}"]


def test_each_process_has_its_rank_and_all_have_one_meeting_place(tmp_path: Path) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    told = f"' '.join(os.environ[name] for name in {names})"
    code = f"(pathlib.Path({str(tmp_path)!r}) / str(rank)).write_text({told})"
    assert launcher.run_processes(3, python(code)) == 0
    found = [(tmp_path / str(rank)).read_text().split() for rank in range(3)]
    assert [each[:5] for each in found] == [[str(r), str(r), "3", "3", "127.0.0.1"] for r in range(3)]
    assert len({each[5] for each in found}) == 1


def test_when_one_fails_the_others_do_not_wait_for_ever_and_its_exit_code_is_told() -> None:
    began_s = time.monotonic()
    assert launcher.run_processes(2, python("if rank == 0: sys.exit(3)\ntime.sleep(300)")) == 3
    assert time.monotonic() - began_s < 120


def test_a_process_that_is_deaf_to_the_signal_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_STOP_S", 0.5)
    deaf = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    assert launcher.run_processes(2, python(f"{deaf}if rank == 0: sys.exit(4)\ntime.sleep(300)")) == 4
