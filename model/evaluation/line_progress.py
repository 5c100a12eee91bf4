"""A progress bar over lines, with rate and time left, on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
    """Lines per second."""

    def render(self, task: Task) -> Text:
        """Show the rate, once it is known."""
        return Text("" if task.speed is None else f"{task.speed:.1f} lines/s")


@contextmanager
def line_progress(
    what: str, *, num_lines: int, console: Console | None = None
) -> Iterator[Callable[[], None]]:
    """Show a bar on a terminal, nothing elsewhere; yields what to call after each line."""
    console = Console(stderr=True) if console is None else console
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task(what, total=num_lines)
        yield lambda: progress.advance(task)
