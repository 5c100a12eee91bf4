from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, distributed

from model.training.checkpoint import checkpoints_of, load_checkpoint
from model.training.metrics import read_metrics
from model.training.processes import Processes, joined, left
from tests.model.training.conftest import TrainerMaker
from tests.model.training.one_of_the_processes import SIZES

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which two processes have trained."""
    folder = tmp_path_factory.mktemp("together")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, "-m", "tests.model.training.one_of_the_processes", str(folder)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def weights_of(folder: Path, name: str) -> list[dict[str, Tensor]]:
    """Of each process."""
    return [load_file(folder / f"{name}-rank-{rank}.safetensors") for rank in (0, 1)]


def are_equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_what_the_first_process_shares_all_have(together: Path) -> None:
    for of_process in weights_of(together, "shared"):
        assert torch.equal(of_process["own"], torch.ones(3))


def test_two_processes_end_with_the_weights_of_one(
    make_trainer: TrainerMaker, tmp_path: Path, together: Path
) -> None:
    alone = TrainerMaker(tmp_path, make_trainer.config, dropout=0.0)("alone", **SIZES)
    alone.run()
    first, second = weights_of(together, "whole-12")
    assert are_equal(first, second)
    checkpoint = load_checkpoint(checkpoints_of(together / "whole" / "checkpoints")[-1])
    assert are_equal(first, checkpoint.weights)
    torch.testing.assert_close(first, dict(alone._model.state_dict()), rtol=1e-4, atol=1e-5)
    assert checkpoint.state.num_tokens == alone.state.num_tokens
    assert checkpoint.state.position == alone.state.position

    mine, theirs = (
        read_metrics(tmp_path / "alone/metrics.jsonl"),
        read_metrics(together / "whole/metrics.jsonl"),
    )
    assert [row["step"] for row in theirs] == list(range(1, 13))
    for one, two in zip(mine, theirs, strict=True):
        assert two["target_tokens"] == one["target_tokens"]
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert two["gradient_norm"] == pytest.approx(one["gradient_norm"], rel=1e-3)


def test_two_processes_of_which_one_is_interrupted_stop_together_and_go_on_exactly(together: Path) -> None:
    first, second = weights_of(together, "parts-7")
    assert are_equal(first, second)
    whole, _ = weights_of(together, "whole-12")
    assert not are_equal(first, whole)
    for resumed in weights_of(together, "parts-12"):
        assert are_equal(resumed, whole)
    found = checkpoints_of(together / "parts" / "checkpoints")
    assert [path.name for path in found] == ["step-00000005", "step-00000010", "step-00000012"]


@pytest.mark.skipif(sys.platform != "linux", reason="threads are listed in /proc")
def test_no_thread_of_the_group_outlives_it(together: Path) -> None:
    # One that frees a tensor while the interpreter ends would abort a process whose work is done.
    for rank in (0, 1):
        names = (together / f"threads-rank-{rank}.txt").read_text().splitlines()
        assert names
        assert not [name for name in names if "gloo" in name]


def test_one_process_asks_nobody() -> None:
    alone = Processes()
    gradient = torch.ones(3)
    assert alone.summed([gradient], 7) == 7
    assert gradient.tolist() == [1.0] * 3
    assert alone.totals({"a": 1.5}) == {"a": 1.5}
    assert alone.agreed(True)
    assert not alone.agreed(False)
    alone.wait()


@pytest.mark.parametrize(
    ("device", "backend", "chosen"), [("cuda", "cpu:gloo,cuda:nccl", [1]), ("cpu", "gloo", [])]
)
def test_each_process_has_a_device_of_its_own_and_patience(
    monkeypatch: pytest.MonkeyPatch, device: str, backend: str, chosen: list[int]
) -> None:
    calls: list[tuple[str, timedelta]] = []
    devices: list[int] = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(
        distributed, "init_process_group", lambda name, timeout: calls.append((name, timeout))
    )
    monkeypatch.setattr(distributed, "get_rank", lambda: 1)
    assert joined(torch.device(device)) == Processes(1, 2)
    assert devices == chosen
    ((name, timeout),) = calls
    assert name == backend
    assert timeout > timedelta(days=1)


def test_a_process_that_nobody_launched_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert joined(torch.device("cpu")) == Processes()
    left()  # leaves nothing, and says nothing
