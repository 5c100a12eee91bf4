from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch

from app.errors import CheckpointError
from model.training.checkpoint import checkpoints_of, load_checkpoint
from model.training.metrics import read_metrics
from model.training.trainer import Trainer
from tests.model.training.conftest import TrainerMaker


def signal_during_update(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, *, step: int, times: int = 1
) -> None:
    """Ctrl-C while the step-th update changes the weights."""
    adamw = trainer._optimization._adamw
    change = adamw.step

    def interrupted() -> object:
        if trainer.state.step + 1 == step:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        return change()

    monkeypatch.setattr(adamw, "step", interrupted)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_checkpoint(checkpoints_of(folder / "checkpoints")[-1]).weights)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("stop_at", [1, 7])
def test_a_run_that_was_interrupted_ends_bit_for_bit_like_one_that_was_not(
    make_trainer: TrainerMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int, accumulate: int
) -> None:
    make_trainer("whole", accumulate=accumulate).run()

    first = make_trainer("parts", accumulate=accumulate)
    signal_during_update(first, monkeypatch, step=stop_at)
    with pytest.raises(KeyboardInterrupt):
        first.run()
    second = make_trainer("parts", accumulate=accumulate)
    assert second.state.step == stop_at
    second.run()

    whole, parts = weights_of(tmp_path / "whole"), weights_of(tmp_path / "parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    rows = {run: read_metrics(tmp_path / run / "metrics.jsonl") for run in ("whole", "parts")}
    assert [row["step"] for row in rows["whole"]] == [row["step"] for row in rows["parts"]] == [3, 6, 9, 12]
    # The row after the stop is a mean over fewer steps; those before and after it are the same.
    untouched = [number for number, row in enumerate(rows["whole"]) if row["step"] not in (3, 9)]
    assert [rows["whole"][number]["loss"] for number in untouched] == [
        rows["parts"][number]["loss"] for number in untouched
    ]


def test_a_second_interruption_ends_a_run_at_once_and_leaves_its_checkpoints(
    make_trainer: TrainerMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer("run")
    signal_during_update(trainer, monkeypatch, step=7, times=2)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    assert signal.getsignal(signal.SIGINT) is before
    assert [path.name for path in checkpoints_of(tmp_path / "run" / "checkpoints")] == ["step-00000005"]


def test_an_ignored_signal_stays_ignored(make_trainer: TrainerMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer("run")
    signal_during_update(trainer, monkeypatch, step=7, times=2)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        trainer.run()
    finally:
        signal.signal(signal.SIGINT, before)
    assert trainer.state.step == 12


def test_a_finished_run_that_is_started_again_changes_nothing(
    make_trainer: TrainerMaker, tmp_path: Path
) -> None:
    make_trainer("run").run()
    files = sorted(path for path in (tmp_path / "run").rglob("*") if path.is_file())
    before = [path.read_bytes() for path in files]
    make_trainer("run").run()
    assert [path.read_bytes() for path in files] == before


def test_a_run_that_was_killed_goes_on_from_its_newest_whole_checkpoint(
    make_trainer: TrainerMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_trainer("whole").run()
    first = make_trainer("parts")
    update = first._update

    def dying() -> object:
        if first.state.step == 8:
            raise SystemExit  # no chance to write anything
        return update()

    monkeypatch.setattr(first, "_update", dying)
    with pytest.raises(SystemExit):
        first.run()
    (tmp_path / "parts" / "checkpoints" / "step-00000008.partial").mkdir()
    second = make_trainer("parts")
    assert second.state.step == 5
    second.run()
    whole, parts = weights_of(tmp_path / "whole"), weights_of(tmp_path / "parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert not list((tmp_path / "parts" / "checkpoints").glob("*.partial"))


def test_a_run_does_not_go_on_with_other_data(make_trainer: TrainerMaker, tmp_path: Path) -> None:
    make_trainer("run").run()
    state = tmp_path / "run" / "checkpoints" / "step-00000012" / "state.json"
    fields = json.loads(state.read_text())
    state.write_text(json.dumps(fields | {"fingerprint": "another"}))
    with pytest.raises(CheckpointError, match="other data"):
        make_trainer("run")


def test_a_run_does_not_go_on_with_other_parameters_frozen(make_trainer: TrainerMaker) -> None:
    make_trainer("run").run()
    with pytest.raises(CheckpointError, match="frozen"):
        make_trainer("run", learning_rate_scales={"encoder.*": 0.0})


def test_a_damaged_checkpoint_is_named(make_trainer: TrainerMaker, tmp_path: Path) -> None:
    make_trainer("run").run()
    weights = tmp_path / "run" / "checkpoints" / "step-00000012" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match="step-00000012 is no whole checkpoint"):
        make_trainer("run")


def test_the_averaged_result_of_an_interrupted_run_is_that_of_one_that_was_not(
    make_trainer: TrainerMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = {"checkpoint_every_steps": 4, "average": 3, "keep_checkpoints": 1}
    whole = make_trainer("whole", **choices)
    whole.run()

    for stop_at in (0, 6, 11):
        part = make_trainer("parts", **choices)
        monkeypatch.setattr(
            "model.training.interruption.Interruption.was_asked",
            property(lambda _, part=part, stop_at=stop_at: part.state.step >= stop_at),
        )
        with pytest.raises(KeyboardInterrupt):
            part.run()
        monkeypatch.undo()
    last = make_trainer("parts", **choices)
    last.run()
    expected, found = whole.result(), last.result()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    steps = [path.name for path in checkpoints_of(tmp_path / "parts" / "checkpoints")]
    assert steps == ["step-00000004", "step-00000008", "step-00000012"]
