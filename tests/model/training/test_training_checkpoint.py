from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from app.errors import CheckpointError
from model.data.batches import StreamPosition
from model.training import checkpoint
from model.training.checkpoint import (
    RunState,
    averaged_weights,
    checkpoints_of,
    load_checkpoint,
    remove_all_but,
    save_checkpoint,
)
from tests.model.training.conftest import TrainerMaker


def state_at(step: int, **changes: object) -> RunState:
    return RunState(step, StreamPosition(3, 4, (50, 60)), **changes)  # type: ignore[arg-type]


def weights_at(step: int) -> dict[str, Tensor]:
    return {"a": torch.full((2, 3), float(step)), "b": torch.arange(4.0) * step}


def save_at(folder: Path, step: int) -> Path:
    return save_checkpoint(folder, weights_at(step), {"a:exp_avg": torch.ones(2) * step}, state_at(step))


def test_a_checkpoint_comes_back_as_it_was_written(tmp_path: Path) -> None:
    state = state_at(
        7, num_tokens=99, time_s=1.5, fingerprint="abc", evaluations=((3, -1.25), (7, -0.1 - 0.2))
    )
    moments = {"a:step": torch.tensor(7.0), "a:exp_avg": torch.randn(2, 3).t()}
    path = save_checkpoint(tmp_path, weights_at(7), moments, state)
    loaded = load_checkpoint(path)
    assert loaded.state == state
    for mine, theirs in ((loaded.weights, weights_at(7)), (loaded.moments, moments)):
        assert {name: tensor.tolist() for name, tensor in mine.items()} == {
            name: tensor.tolist() for name, tensor in theirs.items()
        }
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000007"]


@pytest.mark.parametrize(
    ("failing", "survives"),
    [("save_file", 0), ("save_file", 1), ("json", 0), ("_flush", 0), ("_flush", 1), ("_flush", 3)],
)
def test_a_write_that_fails_at_any_moment_leaves_the_checkpoints_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, survives: int
) -> None:
    save_at(tmp_path, 1)
    save_at(tmp_path, 2)
    calls = 0
    target = (checkpoint.json, "dumps") if failing == "json" else (checkpoint, failing)
    real = getattr(*target)

    def breaking(*args: object, **options: object) -> object:
        nonlocal calls
        calls += 1
        if calls > survives:
            raise OSError("no space left on device")
        return real(*args, **options)

    monkeypatch.setattr(*target, breaking)
    for step in (2, 3):  # over an old one, and as a new one
        calls = 0
        with pytest.raises(OSError, match="no space"):
            save_at(tmp_path, step)
    monkeypatch.undo()
    assert [path.name for path in checkpoints_of(tmp_path)] == ["step-00000001", "step-00000002"]
    assert load_checkpoint(checkpoints_of(tmp_path)[-1]).weights["b"].tolist() == weights_at(2)["b"].tolist()
    save_at(tmp_path, 3)  # what the failure left is in nobody's way
    remove_all_but(tmp_path, [3])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_a_removal_that_fails_leaves_no_part_under_a_checkpoints_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        save_at(tmp_path, step)

    def half(path: Path, **_: object) -> None:
        if path.exists():
            (path / "state.json").unlink()
            raise OSError("interrupted")

    monkeypatch.setattr(checkpoint.shutil, "rmtree", half)
    with pytest.raises(OSError, match="interrupted"):
        remove_all_but(tmp_path, [3])
    with pytest.raises(OSError, match="interrupted"):
        save_at(tmp_path, 3)
    monkeypatch.undo()
    for path in checkpoints_of(tmp_path):
        load_checkpoint(path)
    remove_all_but(tmp_path, [2])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


@pytest.mark.parametrize("name", ["state.json", "model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("keep", [None, 0, 9, -1])
def test_a_checkpoint_that_lacks_anything_is_refused_by_name(
    tmp_path: Path, name: str, keep: int | None
) -> None:
    path = save_at(tmp_path, 5)
    damaged = path / name
    if keep is None:
        damaged.unlink()
    else:
        # The last character of the JSON is a line break; the brace before it must go too.
        damaged.write_bytes(damaged.read_bytes()[: keep if keep >= 0 else keep - 1])
    with pytest.raises(CheckpointError, match=r"step-00000005 is no whole checkpoint.*remove it"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    "change",
    [
        {"position": None},
        {"position": {"chunk": "a", "batch": 1, "drawn": []}},
        {"evaluations": [[1]]},
        {"evaluations": None},
        {"unknown": 1},
    ],
)
def test_a_state_that_makes_no_sense_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    path = save_at(tmp_path, 5)
    state = path / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | change))
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        load_checkpoint(path)


def test_the_average_is_the_mean(tmp_path: Path) -> None:
    paths = [save_at(tmp_path, step) for step in (1, 2, 6)]
    mean = averaged_weights(paths)
    assert {name: tensor.tolist() for name, tensor in mean.items()} == {
        name: tensor.tolist() for name, tensor in weights_at(3).items()
    }
    assert {tensor.dtype for tensor in mean.values()} == {torch.float32}
    assert averaged_weights(paths[:1])["b"].tolist() == weights_at(1)["b"].tolist()


def test_checkpoints_of_different_models_are_not_averaged(tmp_path: Path) -> None:
    path, other = save_at(tmp_path, 1), save_at(tmp_path, 2)
    for odd in ({"a": torch.ones(2, 3)}, {"a": torch.ones(3, 2), "b": torch.ones(4)}):
        save_file(odd, other / "model.safetensors")
        with pytest.raises(CheckpointError, match="another model"):
            averaged_weights([path, other])
    with pytest.raises(CheckpointError, match="0 checkpoints"):
        averaged_weights([])


def test_the_best_evaluations_come_first_and_of_equals_the_later() -> None:
    state = state_at(50, evaluations=((10, -3.0), (20, -1.0), (30, -2.0), (40, -1.0), (50, -4.0)))
    assert state.best_steps(3) == [40, 20, 30]
    assert state.evaluations_since_best() == 3
    assert state_at(1).best_steps(2) == []
    assert state_at(1).evaluations_since_best() == 0


@pytest.mark.parametrize(("keep", "average", "steps"), [(1, 1, [12]), (2, 1, [10, 12]), (1, 3, [8, 10, 12])])
def test_a_run_keeps_its_newest_checkpoints_and_averages_them(
    make_trainer: TrainerMaker, tmp_path: Path, keep: int, average: int, steps: list[int]
) -> None:
    trainer = make_trainer("run", checkpoint_every_steps=2, keep_checkpoints=keep, average=average)
    trainer.run()
    found = checkpoints_of(tmp_path / "run" / "checkpoints")
    assert [path.name for path in found] == [f"step-{step:08d}" for step in steps]
    expected = averaged_weights(found[-average:])
    result = trainer.result()
    assert all(torch.equal(result[name], expected[name]) for name in expected)


def test_a_run_that_stops_before_its_first_step_goes_on_from_there(
    make_trainer: TrainerMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_trainer("whole").run()
    first = make_trainer("parts")
    monkeypatch.setattr("model.training.interruption.Interruption.was_asked", True)
    with pytest.raises(KeyboardInterrupt):
        first.run()
    monkeypatch.undo()
    assert [path.name for path in checkpoints_of(tmp_path / "parts" / "checkpoints")] == ["step-00000000"]
    second = make_trainer("parts")
    second.run()
    whole = make_trainer("whole").result()
    assert all(torch.equal(whole[name], tensor) for name, tensor in second.result().items())
