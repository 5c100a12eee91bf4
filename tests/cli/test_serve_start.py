import os
import signal
from pathlib import Path

import pytest

from app.bundle import Bundle
from app.cli import serve as serve_module


def test_sigterm_while_the_bundles_load_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stopped_by_the_operator(directory: Path) -> tuple[Bundle, ...]:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("loading went on after SIGTERM")

    monkeypatch.setattr(serve_module, "discover", stopped_by_the_operator)
    before = signal.getsignal(signal.SIGTERM)
    # Without a handler the signal would end the test run itself.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with pytest.raises(SystemExit) as ended:
            serve_module.serve({"log_level": "error"})
        assert ended.value.code == 0
    finally:
        signal.signal(signal.SIGTERM, before)
