"""Times that mean something on a busy machine: one thread, its CPU time, interleaved, the median."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Key = TypeVar("Key")


@contextmanager
def one_thread() -> Iterator[None]:
    """Let PyTorch compute on the calling thread alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def median_times_s(
    tasks: Mapping[Key, Callable[[], object]],
    *,
    repeats: int,
    clock: Callable[[], float] = time.thread_time,
    title: str = "measuring",
) -> dict[Key, float]:
    """Measure each task ``repeats`` times and take the median.

    The tasks take turns, so that a slow minute of the machine falls on all of them. Each time a task runs
    twice and the second run counts: the first one pays for what the task before left behind, such as memory
    that was given back. The clock is the CPU time of the calling thread: what other processes do while
    this one waits does not count. What a task hands to other threads would not count either, hence
    `one_thread`.

    Args:
        tasks: what to measure, by name.
        repeats: how many turns, at least 1.
        clock: seconds that only grow.
        title: beside the progress bar, which shows on a terminal only.

    Returns:
        Median seconds of each task.
    """
    samples: dict[Key, list[float]] = {key: [] for key in tasks}
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not Console(stderr=True).is_terminal,
    )
    with one_thread(), bar:
        shown = bar.add_task(title, total=repeats * len(tasks))
        for _ in range(repeats):
            for key, task in tasks.items():
                task()
                start = clock()
                task()
                samples[key].append(clock() - start)
                bar.advance(shown)
    return {key: statistics.median(times) for key, times in samples.items()}
