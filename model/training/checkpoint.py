"""Checkpoints of a run: weights and moments as safetensors, the rest as JSON; each whole or not there."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from app.errors import CheckpointError
from model.data.batches import StreamPosition

_WEIGHTS = "model.safetensors"
_MOMENTS = "optimizer.safetensors"
_STATE = "state.json"
_NAME = re.compile(r"step-(\d{8})")


@dataclass(frozen=True)
class RunState:
    """Where a run stands, besides weights and moments.

    Attributes:
        step: updates made.
        position: of the batches.
        num_tokens: target tokens trained on.
        time_s: seconds trained, pauses and evaluations left out.
        fingerprint: of what must not change between stop and resume: sources, seed, sizes of batches.
        evaluations: step and value of each evaluation on the dev set, more being better.
        judged_by: what those values are: loss or bleu; "" before the first.
    """

    step: int
    position: StreamPosition
    num_tokens: int = 0
    time_s: float = 0.0
    fingerprint: str = ""
    evaluations: tuple[tuple[int, float], ...] = ()
    judged_by: str = ""

    def best_steps(self, count: int) -> list[int]:
        """The steps of the best evaluations, the best first; of equals the later, trained longer."""
        ranked = sorted(self.evaluations, key=lambda evaluation: (-evaluation[1], -evaluation[0]))
        return [step for step, _ in ranked[:count]]

    def evaluations_since_best(self) -> int:
        """How many evaluations came after the best one; to equal it is no improvement."""
        if not self.evaluations:
            return 0
        best = max(value for _, value in self.evaluations)
        first = min(step for step, value in self.evaluations if value == best)
        return sum(step > first for step, _ in self.evaluations)


@dataclass(frozen=True)
class TrainingCheckpoint:
    """One checkpoint, read back."""

    weights: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]
    state: RunState


def save_checkpoint(
    folder: Path, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor], state: RunState
) -> Path:
    """Write ``folder/step-N``; what was there under that name is replaced.

    Raises:
        CheckpointError: it cannot be written, as on a full disk; the older checkpoints stay.
    """
    destination = folder / f"step-{state.step:08d}"
    partial = folder / f"{destination.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, partial / _WEIGHTS)
        save_file({name: tensor.contiguous() for name, tensor in moments.items()}, partial / _MOMENTS)
    except SafetensorError as error:  # also what it makes of the system's own errors
        raise CheckpointError(
            f"{destination} cannot be written ({error}); make room and go on with the same command from the "
            "checkpoint before"
        ) from error
    (partial / _STATE).write_text(json.dumps(asdict(state), indent=2) + "\n", encoding="utf-8")
    for path in (*partial.iterdir(), partial):
        _flush(path)
    if destination.exists():
        _remove(destination)
    partial.rename(destination)
    _flush(folder)
    return destination


def load_checkpoint(path: Path) -> TrainingCheckpoint:
    """Read what `save_checkpoint` wrote.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    try:
        fields = json.loads((path / _STATE).read_bytes())
        evaluations = tuple((int(step), float(value)) for step, value in fields["evaluations"])
        position = StreamPosition.from_json(fields["position"])
        state = RunState(**{**fields, "position": position, "evaluations": evaluations})
        return TrainingCheckpoint(load_file(path / _WEIGHTS), load_file(path / _MOMENTS), state)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} is no whole checkpoint ({type(error).__name__}: {error}); remove it, and the run "
            "goes on from the one before"
        ) from error


def checkpoints_of(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir() and _NAME.fullmatch(path.name))


def step_of(path: Path) -> int:
    """The step that a checkpoint was made at."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path.name} is no checkpoint's name")
    return int(match[1])


def remove_all_but(folder: Path, keep: Sequence[int]) -> None:
    """Remove the checkpoints of other steps, and what broken writes left."""
    for path in checkpoints_of(folder):
        if step_of(path) not in keep:
            _remove(path)
    for path in folder.glob("step-*.partial"):
        shutil.rmtree(path)


def averaged_weights(paths: Sequence[Path]) -> dict[str, Tensor]:
    """The mean of several checkpoints' weights (Vaswani et al. 2017, section 6.1), summed in float64.

    Raises:
        CheckpointError: one cannot be read, or they are of different models.
    """
    if not paths:
        raise CheckpointError("there are 0 checkpoints to average; at least 1 is needed")
    sums: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    for path in paths:
        weights = load_checkpoint(path).weights
        if sums and {name: tensor.shape for name, tensor in weights.items()} != {
            name: tensor.shape for name, tensor in sums.items()
        }:
            raise CheckpointError(f"{path} is of another model than {paths[0]}; average those of one run")
        for name, tensor in weights.items():
            dtypes[name] = tensor.dtype
            sums[name] = sums[name] + tensor.double() if name in sums else tensor.double()
    return {name: (total / len(paths)).to(dtypes[name]) for name, total in sums.items()}


def _remove(path: Path) -> None:
    """Remove a checkpoint such that at no moment a part of it has its name."""
    going = path.with_name(f"{path.name}.old.partial")
    shutil.rmtree(going, ignore_errors=True)
    path.rename(going)
    shutil.rmtree(going)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
