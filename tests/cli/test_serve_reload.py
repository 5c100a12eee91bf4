"""What `dragoman serve` makes of SIGHUP before there is anything to load anew."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from app.bundle import Bundle
from app.cli import serve as serve_module
from app.errors import BundleCorrupt


def test_sighup_while_the_bundles_load_does_not_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def hung_up(directory: Path) -> tuple[Bundle, ...]:
        os.kill(os.getpid(), signal.SIGHUP)
        raise BundleCorrupt("the loading went on")

    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM)}

    def too_late(*_: object) -> None:
        raise AssertionError("SIGHUP came through")

    signal.signal(signal.SIGHUP, too_late)  # its default action would end the test run itself
    monkeypatch.setattr(serve_module, "discover", hung_up)
    try:
        with pytest.raises(BundleCorrupt, match="the loading went on"):
            serve_module.serve({"log_level": "error", "port": 0})
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
