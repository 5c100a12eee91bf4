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
    """Shows how many lines are translated, how fast, how long the rest will take, and how many are written.

    Lines are translated many at a time and written in their order, so one long line holds back the
    writing of those after it. An interrupted run goes on after the last line that is written.

    Args:
        num_lines: all lines.
        num_done: lines done by earlier runs, which do not count for the rate.
        console: where to show it; None is standard error.
    """

    def __init__(self, *, num_lines: int, num_done: int, console: Console | None = None) -> None:
        """Prepare the bar."""
        self._progress = Progress(
            TextColumn("translating"),
            BarColumn(),
            MofNCompleteColumn(),
            _Rate(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[num_written]} written"),
            console=Console(stderr=True) if console is None else console,
        )
        self._num_written = num_done
        self._task = self._progress.add_task(
            "translating", total=num_lines, completed=num_done, num_written=num_done
        )

    def __enter__(self) -> LineProgress:
        """Show it."""
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave its last state on the screen."""
        self._progress.stop()

    def line_translated(self) -> None:
        """One more line is translated."""
        self._progress.advance(self._task)

    def line_written(self) -> None:
        """One more line is written."""
        self._num_written += 1
        self._progress.update(self._task, num_written=self._num_written)
