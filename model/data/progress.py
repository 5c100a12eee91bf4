"""The progress bar of reading files, on standard error and silent where that is no terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from model.data.text_files import OnRead


@contextmanager
def reading_progress(
    label: str, paths: Iterable[Path], *, console: Console | None = None
) -> Iterator[OnRead]:
    """Shows how much of files is read, how many lines a second, and how long the rest will take.

    Args:
        label: what is being done.
        paths: the files; their sizes are the whole.
        console: where to show it; None is standard error.

    Yields:
        What readers of `text_files.lines_of` are to tell of their progress.
    """
    console = Console(stderr=True) if console is None else console
    num_bytes = sum(path.stat().st_size for path in paths if path.is_file())
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[num_lines]:,} lines, {task.fields[rate]:,.0f}/s"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    ) as progress:
        task_id = progress.add_task(label, total=num_bytes, num_lines=0, rate=0.0)
        task = progress.tasks[0]

        def on_read(num_more_bytes: int, num_more_lines: int) -> None:
            num_lines = task.fields["num_lines"] + num_more_lines
            progress.update(
                task_id,
                advance=num_more_bytes,
                num_lines=num_lines,
                rate=num_lines / max(task.elapsed or 0, 1e-3),
            )

        yield on_read
