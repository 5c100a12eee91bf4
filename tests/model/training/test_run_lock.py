from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from app.errors import InvalidOption
from model.training.interruption import Interruption
from model.training.run_lock import sole_run


def test_two_runs_do_not_write_into_one_folder(tmp_path: Path) -> None:
    with (
        sole_run(tmp_path),
        pytest.raises(InvalidOption, match="another run writes into"),
        sole_run(tmp_path),
    ):
        pass
    with sole_run(tmp_path):
        pass


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted_and_the_second_ends_the_run_at_once(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Interruption() as interruption:
        assert not interruption.was_asked
        os.kill(os.getpid(), number)
        assert interruption.was_asked
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) == before


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interruption() as interruption:
            os.kill(os.getpid(), signal.SIGINT)
            assert not interruption.was_asked
    finally:
        signal.signal(signal.SIGINT, before)
