"""Several processes of one command on this machine, each with its rank in the environment."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from types import FrameType

_POLL_S = 0.2
_STOP_S = 10.0
"""How long the others may take to end once one has failed; they made no step since."""


def run_processes(count: int, command: Sequence[str]) -> int:
    """Run a command in `count` processes, which find each other by torch's environment variables.

    Ctrl-C reaches all of them, since they share the terminal's process group, and SIGTERM is passed on; each
    then ends by itself. When
    one ends with an error the others are asked to stop, since they would wait for it for ever.

    Returns:
        The exit code of the first that did not end with 0, or 0.
    """
    shared = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    children = [
        subprocess.Popen(
            command,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(count)
    ]

    def pass_on(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        for child in children:
            child.send_signal(number)

    previous = signal.signal(signal.SIGINT, signal.SIG_IGN), signal.signal(signal.SIGTERM, pass_on)
    try:
        while any(child.poll() is None for child in children):
            if any(child.returncode for child in children):
                _stop(children)
                break
            time.sleep(_POLL_S)
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), previous, strict=True):
            signal.signal(number, handler)
    return next((_exit_code(child) for child in children if child.returncode), 0)


def _stop(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Give those that still run time to end, then none."""
    for child in children:
        if child.poll() is None:
            child.send_signal(signal.SIGINT)
    # A process that waits for one that is gone never ends its step.
    deadline_s = time.monotonic() + _STOP_S
    while any(child.poll() is None for child in children):
        if time.monotonic() > deadline_s:
            for child in children:
                child.kill()
        time.sleep(_POLL_S)


def _exit_code(child: subprocess.Popen[bytes]) -> int:
    """As shells count: 128 and the signal for a child that a signal ended."""
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
