"""A real server process to be measured: started, watched, stopped."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import TracebackType

import httpx
import psutil

_START_LIMIT_S = 60.0


class MeasuredServer:
    """`dragoman serve` on a free loopback port, for the length of a with-block.

    Attributes:
        url: its base URL.
        startup_s: seconds from starting the process to the first right answer.
    """

    def __init__(self, arguments: Sequence[str] = ()) -> None:
        """Name additional arguments of `dragoman serve`."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.startup_s = 0.0
        self._command = [sys.executable, "-m", "app", "serve", "--port", str(port), *arguments]

    def __enter__(self) -> MeasuredServer:
        """Start the process and wait for its first translation."""
        started_at_s = time.monotonic()
        self._process = subprocess.Popen(
            self._command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=_environment(),
        )
        with httpx.Client(base_url=self.url) as client:
            while True:
                try:
                    answer = client.post(
                        "/translate", json={"q": "Thank you.", "source": "en", "target": "pt"}
                    )
                    answer.raise_for_status()
                    break
                except httpx.HTTPError as error:
                    if self._process.poll() is not None or time.monotonic() - started_at_s > _START_LIMIT_S:
                        self._process.kill()
                        raise RuntimeError(f"the server did not start: {' '.join(self._command)}") from error
                    time.sleep(0.01)
        self.startup_s = time.monotonic() - started_at_s
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop it as an operator would."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(timeout=60)

    def rss_mb(self) -> float:
        """Resident memory of the process, in 10^6 bytes."""
        return float(psutil.Process(self._process.pid).memory_info().rss) / 1e6

    def cpu_s(self) -> float:
        """CPU seconds the process has used."""
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)


def _environment() -> dict[str, str]:
    """This process's, with no cache of translations and with one of compiled Python: neither is measured."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "DRAGOMAN_MAX_CACHE_BYTES": "0"}
