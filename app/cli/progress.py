"""The progress bar of a file's translation, on standard error."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text


class _Rate(ProgressColumn):
    """Lines per second of this run."""

    def render(self, task: Task) -> Text:
        """Show the rate, once it is known."""
        return Text("" if task.speed is None else f"{task.speed:.1f} lines/s")


class LineProgress:
    """Shows how many lines are done, how fast, and how long the rest will take.

    Args:
        num_lines: all lines.
        num_done: lines done by earlier runs, which do not count for the rate.
    """

    def __init__(self, *, num_lines: int, num_done: int) -> None:
        """Prepare the bar."""
        self._progress = Progress(
            TextColumn("translating"),
            BarColumn(),
            MofNCompleteColumn(),
            _Rate(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task("translating", total=num_lines, completed=num_done)

    def __enter__(self) -> LineProgress:
        """Show it."""
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave its last state on the screen."""
        self._progress.stop()

    def advance(self) -> None:
        """One more line is done."""
        self._progress.advance(self._task)
