from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from app.cli.termination import sigterm_as_ctrl_c

ROOT = Path(__file__).resolve().parents[2]
COMMAND = """
import signal, sys
import app.__main__ as program

@program.cli.command("wait")
def wait() -> None:
    try:
        print("waiting", flush=True)
        signal.pause()
    finally:
        print("cleaned up", flush=True)

{before}
program.main(["wait"])
"""


def ended(*, before: str) -> tuple[int, str]:
    """The exit status of a command that got SIGTERM while it waited, and what it said after that."""
    command = subprocess.Popen(
        [sys.executable, "-c", COMMAND.format(before=before)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert command.stdout is not None
    assert command.stdout.readline() == "waiting\n"
    command.terminate()
    said, _ = command.communicate(timeout=60)
    return command.returncode, said


@pytest.mark.parametrize("before", ["", "signal.signal(signal.SIGINT, signal.SIG_IGN)"])
def test_a_command_that_gets_sigterm_cleans_up_and_ends_as_by_ctrl_c(before: str) -> None:
    # SIGINT is ignored in the background jobs of a script.
    assert ended(before=before) == (130, "cleaned up\n")


def test_a_command_with_a_handler_of_its_own_keeps_it_and_none_stays_afterwards() -> None:
    got = []
    before = signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGTERM, lambda *_: got.append("its own"))
        with sigterm_as_ctrl_c():
            signal.raise_signal(signal.SIGTERM)
        assert got == ["its own"]
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with pytest.raises(KeyboardInterrupt), sigterm_as_ctrl_c():
            signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_thread_that_may_set_no_handler_runs_the_command_all_the_same() -> None:
    ran = []

    def command() -> None:
        with sigterm_as_ctrl_c():
            ran.append(os.getpid())

    thread = threading.Thread(target=command)
    thread.start()
    thread.join()
    assert ran
