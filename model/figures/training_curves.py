"""Training curves from the metrics.jsonl of one or several runs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from matplotlib.figure import Figure

from app.errors import InvalidOption
from model.figures.style import COLOURS, WIDTH_IN, house_style

METRICS_NAME = "metrics.jsonl"
TimeAxis = Literal["step", "time_s"]

# Metrics that share a panel, and its label; every other number gets a panel of its own, under its name.
_PANELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("cross-entropy (nats a token)", ("loss", "dev_loss")),
    ("BLEU, development set", ("dev_bleu",)),
    ("chrF, development set", ("dev_chrf",)),
    ("learning rate", ("learning_rate",)),
    ("speed (tokens/s)", ("tokens_per_s",)),
)
_LINES = ("-", "--")
_PANEL_HEIGHT_IN = 2.6
_LARGEST = 1e100
"""Matplotlib's own arithmetic overflows not far above."""


@dataclass(frozen=True)
class Run:
    """The numbers of one training run.

    Attributes:
        name: for the legend.
        series: metric -> its (step, seconds since the start, value) triples, in the file's order.
    """

    name: str
    series: Mapping[str, Sequence[tuple[float, float, float]]]


def read_run(path: Path) -> Run:
    """Read a run's metrics, also while it is training: a last line without its newline is being written.

    Args:
        path: a run's folder or its metrics.jsonl: on each line a JSON object with "step" and "time_s" and any
            numbers. What is no number (texts, null, nested objects) is not drawn; NaN and
            infinities, as a run that went wrong leaves them, are gaps.

    Raises:
        InvalidOption: the file is missing or holds no metrics, or a line is no such object or holds a number
            that no axis can show.
    """
    file = path / METRICS_NAME if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOption(
            f"{file} cannot be read as UTF-8 text; name a training run's folder or its {METRICS_NAME}"
        ) from error
    series: dict[str, list[tuple[float, float, float]]] = {}
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            numbers = {
                name: float(value)
                for name, value in row.items()
                if isinstance(value, int | float) and not isinstance(value, bool)
            }
            step, time_s = numbers.pop("step"), numbers.pop("time_s")
        except (ValueError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise InvalidOption(
                f"{file}, line {number} is no JSON object with the numbers step and time_s; remove or mend it"
            ) from error
        for name, value in {"step": step, "time_s": time_s, **numbers}.items():
            is_gap = not math.isfinite(value) and name in numbers
            if not is_gap and not abs(value) <= _LARGEST:  # NaN too
                raise InvalidOption(
                    f"{file}, line {number}: {name} is {value}, which no axis can show "
                    f"(at most {_LARGEST:g}); remove the line"
                )
            if name in numbers:
                series.setdefault(name, []).append((step, time_s, math.nan if is_gap else value))
    if not series:
        raise InvalidOption(
            f"{file} holds no numbers beside step and time_s; wait for the run's first report"
        )
    name = file.parent.resolve().name if file.name == METRICS_NAME else file.stem
    return Run(name, series)


def panels_of(runs: Sequence[Run]) -> list[tuple[str, tuple[str, ...]]]:
    """The panels that some run has numbers for: label and metrics, the known ones first."""
    present = {metric for run in runs for metric in run.series}
    panels = []
    for label, metrics in _PANELS:
        if shown := tuple(metric for metric in metrics if metric in present):
            panels.append((label, shown))
            present -= set(shown)
    return panels + [(_as_text(metric), (metric,)) for metric in sorted(present)]


def _as_text(name: str) -> str:
    """A name that may hold anything, such that a figure shows it as it is and not as a formula."""
    text = name.encode("utf-8", "backslashreplace").decode("utf-8").replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text  # which Matplotlib keeps out of legends


@house_style()
def draw_curves(runs: Sequence[Run], *, against: TimeAxis = "step", metrics: Sequence[str] = ()) -> Figure:
    """One panel for each kind of number, one colour for each run.

    Args:
        runs: at least one.
        against: updates or hours on the x axis.
        metrics: draw these alone; empty draws all.

    Raises:
        InvalidOption: no run has one of ``metrics``.
    """
    panels = panels_of(runs)
    if metrics:
        known = sorted({metric for _, names in panels for metric in names})
        if missing := [metric for metric in metrics if metric not in known]:
            raise InvalidOption(f"no run has {', '.join(missing)}; the runs have {', '.join(known)}")
        chosen = [(label, tuple(name for name in names if name in metrics)) for label, names in panels]
        panels = [(label, names) for label, names in chosen if names]
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(WIDTH_IN, rows * _PANEL_HEIGHT_IN + 0.4), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis, (label, names) in zip(axes.flat, panels, strict=False):
        for run, colour in zip(runs, _cycled(len(runs)), strict=True):
            for metric, line in zip(names, _LINES, strict=False):
                if not (points := run.series.get(metric)):
                    continue
                x = [step if against == "step" else time_s / 3600 for step, time_s, _ in points]
                y = [value for _, _, value in points]
                shown = _as_text(f"{run.name}: {metric}" if len(names) > 1 else run.name)
                # A single point has no line, and few points are easier seen as such.
                marker = "o" if len(points) < 25 else None
                axis.plot(
                    x,
                    y,
                    color=colour,
                    linestyle=line,
                    marker=marker,
                    markersize=3,
                    linewidth=1.2,
                    label=shown,
                )
        axis.set(xlabel="step (updates)" if against == "step" else "time (hours)", ylabel=label)
        axis.legend()
    for axis in list(axes.flat)[len(panels) :]:
        axis.remove()
    return figure


def _cycled(count: int) -> list[str]:
    return [COLOURS[index % len(COLOURS)] for index in range(count)]
