from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.errors import CheckpointError
from model.training.metrics import RunMetrics, read_metrics
from tests.model.training.conftest import TrainerMaker


def opened(folder: Path, first_step: int, **changes: bool) -> RunMetrics:
    return RunMetrics(folder, max_steps=100, first_step=first_step, **({"tensorboard": False} | changes))


def write_rows(folder: Path, *steps: int) -> Path:
    with opened(folder, steps[0] - 1) as metrics:
        for step in steps:
            metrics.write(step, step * 0.25, {"loss": 1 / step})
    return folder / "metrics.jsonl"


def test_rows_hold_the_numbers_of_their_step(tmp_path: Path) -> None:
    path = write_rows(tmp_path, 1, 3)
    assert read_metrics(path) == [
        {"step": 1, "time_s": 0.2, "loss": 1.0},
        {"step": 3, "time_s": 0.8, "loss": 0.333333},
    ]


def test_rows_of_steps_that_are_made_again_are_dropped(tmp_path: Path) -> None:
    path = write_rows(tmp_path, 1, 3, 5, 7)
    with opened(tmp_path, 5) as metrics:
        metrics.write(6, 9.0, {"loss": 0.5})
    assert [row["step"] for row in read_metrics(path)] == [1, 3, 5, 6]


def test_a_last_line_that_was_cut_is_dropped_and_the_others_stay(tmp_path: Path) -> None:
    path = write_rows(tmp_path, 1, 3, 5)
    whole = path.read_text()
    last = whole.splitlines()[-1]
    for kept in range(1, len(last)):
        path.write_text(whole[: len(whole) - 1 - kept])
        assert [row["step"] for row in read_metrics(path)] == [1, 3]
    with opened(tmp_path, 4) as metrics:
        metrics.write(5, 1.0, {})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 3, 5]


def test_another_damaged_line_is_named(tmp_path: Path) -> None:
    path = write_rows(tmp_path, 1, 3, 5)
    path.write_text(path.read_text().replace('{"step": 3', '{"step: 3'))
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl, line 2"):
        opened(tmp_path, 5)


def test_a_process_that_is_to_be_silent_writes_and_says_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened(tmp_path, 0, is_silent=True, tensorboard=True) as metrics:
        metrics.advance(1)
        metrics.write(1, 1.0, {"loss": 1.0})
        metrics.say("hello")
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")


def test_what_is_shown_goes_to_the_error_stream(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with opened(tmp_path, 0) as metrics:
        metrics.write(20, 2.0, {"loss": 1.25})
        metrics.say("a sentence")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == ["step 20  2 s  loss 1.25", "a sentence"]


def test_a_run_writes_its_numbers_for_tensorboard_too(make_trainer: TrainerMaker, tmp_path: Path) -> None:
    make_trainer("run", max_steps=2, log_every_steps=1, tensorboard=True).run()
    (events,) = (tmp_path / "run" / "tensorboard").iterdir()
    assert b"cross_entropy" in events.read_bytes()
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert {
        "loss",
        "cross_entropy",
        "gradient_norm",
        "learning_rate",
        "target_tokens",
        "tokens_per_s",
    } <= set(rows[0])
