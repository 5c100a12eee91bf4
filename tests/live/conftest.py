import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from service_process import ROOT, WAIT_S, Service, Start


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start `python ARGUMENTS...` with JSON logs on a port of the system's choice."""
    services: list[Service] = []

    def begin(*arguments: str, stdin: int | None = None, **environment: str) -> Service:
        log = tmp_path / f"log{len(services)}"
        with log.open("w") as stderr:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=ROOT,
                stdin=stdin,
                stderr=stderr,
                text=True,
                env={**os.environ, "PYTHONPATH": str(ROOT), "DRAGOMAN_LOG_FORMAT": "json", **environment},
            )
        services.append(Service(process, log))
        return services[-1]

    yield begin
    for service in services:
        with contextlib.suppress(ProcessLookupError):
            service.process.kill()
        service.process.wait()


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=WAIT_S) as client:
        yield client
