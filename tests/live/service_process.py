import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 120.0


class Service:
    """A server process, its address and its log."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self._log = log

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._log.read_text().splitlines() if line.endswith("}")]

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Poll until `condition`, failing after `WAIT_S` or when the process is gone."""
        deadline_s = time.monotonic() + WAIT_S
        while not condition():
            assert self.process.poll() is None, f"the process ended: {self._log.read_text()}"
            assert time.monotonic() < deadline_s, f"waited {WAIT_S} s for {what}: {self._log.read_text()}"
            time.sleep(0.01)

    @property
    def url(self) -> str:
        """Its address, as its log states it."""

        def addresses() -> list[str]:
            return [line["url"] for line in self.lines if line["event"] == "listening"]

        self.wait_until(lambda: bool(addresses()), "the server to listen")
        return addresses()[0]

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def exit_code(self) -> int:
        return self.process.wait(timeout=WAIT_S)

    def log_text(self) -> str:
        return self._log.read_text()


Start = Callable[..., Service]
