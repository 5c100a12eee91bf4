"""What a run tells while it goes: a progress bar, metrics.jsonl, and TensorBoard's files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

from app.errors import CheckpointError

METRICS_NAME = "metrics.jsonl"
_SHOWN = ("loss", "dev_loss", "dev_bleu", "tokens_per_s")


class RunMetrics:
    """The written and the shown side of one run's numbers.

    Every row of metrics.jsonl is an object with ``step``, ``time_s`` (seconds trained) and the numbers of
    that moment. A run that goes on from a checkpoint drops the rows of steps after it, which it makes again.
    """

    def __init__(
        self, folder: Path, *, max_steps: int, first_step: int, tensorboard: bool, is_silent: bool = False
    ) -> None:
        """Open the files.

        Args:
            folder: of the run.
            max_steps: the length of the bar.
            first_step: the step before the first to come.
            tensorboard: whether TensorBoard's files are written too.
            is_silent: write and show nothing: another process does.

        Raises:
            CheckpointError: the metrics.jsonl that is there is damaged.
        """
        self._is_silent = is_silent
        if is_silent:
            return
        self._path = folder / METRICS_NAME
        rows = read_metrics(self._path) if self._path.exists() else []
        kept = [row for row in rows if row["step"] <= first_step]
        partial = self._path.with_name(f"{METRICS_NAME}.partial")
        partial.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        partial.replace(self._path)
        self._file = self._path.open("a", encoding="utf-8")
        self._board = (
            SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1) if tensorboard else None
        )
        self._console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[numbers]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("steps", total=max_steps, completed=first_step, numbers="")

    def __enter__(self) -> Self:
        """Show the bar."""
        if not self._is_silent:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the files."""
        if self._is_silent:
            return
        self._progress.stop()
        self._file.close()
        if self._board is not None:
            self._board.close()

    def advance(self, step: int) -> None:
        """A step was made."""
        if self._is_silent:
            return
        self._progress.update(self._task, completed=step)

    def write(self, step: int, time_s: float, numbers: Mapping[str, float]) -> None:
        """Record the numbers of a moment."""
        if self._is_silent:
            return
        row = {"step": step, "time_s": round(time_s, 1)} | {
            name: float(f"{value:.6g}") for name, value in numbers.items()
        }
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in numbers.items():
                self._board.add_scalar(name, value, step)
        shown = "  ".join(f"{name} {numbers[name]:.4g}" for name in _SHOWN if name in numbers)
        self._progress.update(self._task, completed=step, numbers=shown)
        if not self._console.is_terminal:
            self._console.print(f"step {step}  {time_s:.0f} s  {shown}", highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """A sentence above the bar."""
        if self._is_silent:
            return
        self._console.print(text, highlight=False, soft_wrap=True)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of a metrics.jsonl; a last line that a crash cut short is left out.

    Raises:
        CheckpointError: another line is damaged.
    """
    rows: list[dict[str, float]] = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if not isinstance(row.get("step"), int):
                raise ValueError("no step")
            rows.append(row)
        except (ValueError, AttributeError) as error:
            if number < len(lines):
                raise CheckpointError(
                    f"{path}, line {number} is no row of metrics; remove that line, or the file"
                ) from error
    return rows
