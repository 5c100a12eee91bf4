"""How long a sentence takes against its length, and which parts grow with n and with n^2."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from model.figures.measurement import median_times_s
from model.figures.style import COLOURS, WIDTH_IN, house_style
from model.transformer import Transformer

TRANSLATION_LENGTHS = (4, 8, 16, 32, 48, 64, 96, 128)
ENCODER_LENGTHS = (4, 8, 16, 32, 64, 128, 192, 256, 384, 512)


@dataclass(frozen=True)
class QuadraticFit:
    """t(n) = constant + linear n + quadratic n^2, none of the three negative.

    Attributes:
        constant: seconds.
        linear: seconds a token.
        quadratic: seconds a squared token.
        residual: root mean square of (fitted - measured) / measured, no unit.
    """

    constant: float
    linear: float
    quadratic: float
    residual: float

    def parts(self, length: float) -> tuple[float, float, float]:
        """The three summands at a length, in seconds."""
        return self.constant, self.linear * length, self.quadratic * length**2


def fit_quadratic(lengths: Sequence[int], times_s: Sequence[float]) -> QuadraticFit:
    """Fit by least squares of the relative error, so that short sentences count as much as long ones.

    A part of the time cannot be negative. With three parts the exact non-negative solution is found by trying
    every choice of the parts that are not zero.

    Args:
        lengths: n of each measurement.
        times_s: the seconds it took.

    Raises:
        ValueError: fewer than 3 different lengths, or a time is not positive.
    """
    if len(set(lengths)) < 3 or min(times_s) <= 0:
        raise ValueError(
            f"{len(set(lengths))} lengths, shortest time {min(times_s)} s;"
            " a fit needs 3 lengths and times above 0"
        )
    n = np.asarray(lengths, dtype=np.float64)
    # Each row divided by its time: the right side is 1, the error is relative.
    terms = np.stack([np.ones_like(n), n, n**2], axis=1) / np.asarray(times_s)[:, None]  # [N, 3]
    best = (float("inf"), np.zeros(3))
    for kept in itertools.chain.from_iterable(itertools.combinations(range(3), size) for size in (1, 2, 3)):
        columns = terms[:, kept]  # [N, kept]
        norms = np.linalg.norm(columns, axis=0)
        solution = np.linalg.lstsq(columns / norms, np.ones(len(n)), rcond=None)[0] / norms
        if (solution < 0).any():
            continue
        coefficients = np.zeros(3)
        coefficients[list(kept)] = solution
        residual = float(np.sqrt(np.mean((terms @ coefficients - 1) ** 2)))
        if residual < best[0]:
            best = (residual, coefficients)
    residual, (constant, linear, quadratic) = best
    return QuadraticFit(float(constant), float(linear), float(quadratic), residual)


@torch.inference_mode()
def translate_exactly(model: Transformer, source_ids: Tensor, *, num_steps: int) -> Tensor:
    """Greedy decoding with caches that takes exactly so many steps, whatever the end token says.

    Args:
        model: in eval mode.
        source_ids: i64 [1, S].
        num_steps: T.

    Returns:
        The chosen tokens, i64 [1, T].
    """
    source_mask = torch.ones_like(source_ids, dtype=torch.bool)  # [1, S]
    cross = model.cross_keys_values(model.encode(source_ids, source_mask))  # L x [1, H, S, D]
    state = model.initial_state(1)
    chosen: list[Tensor] = []
    for _ in range(num_steps):
        logits, state = model.step(chosen[-1] if chosen else None, state, cross, source_mask)  # [1, V]
        chosen.append(logits.argmax(dim=1))  # [1]
    return torch.stack(chosen, dim=1)  # [1, T]


@torch.inference_mode()
def _encode(model: Transformer, source_ids: Tensor) -> None:
    model.encode(source_ids, torch.ones_like(source_ids, dtype=torch.bool))


@dataclass(frozen=True)
class TimesByLength:
    """Measured seconds of one kind of work.

    Attributes:
        title: what was done.
        lengths: n.
        times_s: median CPU seconds at each length.
    """

    title: str
    lengths: tuple[int, ...]
    times_s: tuple[float, ...]


def measure_translation(
    model: Transformer,
    *,
    repeats: int,
    translation_lengths: Sequence[int] = TRANSLATION_LENGTHS,
    encoder_lengths: Sequence[int] = ENCODER_LENGTHS,
) -> tuple[TimesByLength, TimesByLength]:
    """Measure translation (as many steps as source tokens) and the encoder alone, one sentence at a time.

    Sources are random tokens: the time does not depend on which.

    Args:
        model: in eval mode, on the CPU.
        repeats: times each length is measured; the median counts.
        translation_lengths: n of the translations.
        encoder_lengths: n of the encoder alone.

    Returns:
        The translation's times and the encoder's.
    """
    generator = torch.Generator().manual_seed(0)
    longest = max(*translation_lengths, *encoder_lengths)
    ids = torch.randint(model.config.vocabulary_size, (1, longest), generator=generator)  # [1, longest]
    tasks: dict[tuple[str, int], Callable[[], object]] = {}
    for n in translation_lengths:
        tasks["translation", n] = functools.partial(translate_exactly, model, ids[:, :n], num_steps=n)
    for n in encoder_lengths:
        tasks["encoder", n] = functools.partial(_encode, model, ids[:, :n])
    times_s = median_times_s(tasks, repeats=repeats, title="translations")
    return (
        TimesByLength(
            "translation: n tokens to n tokens, cached greedy",
            tuple(translation_lengths),
            tuple(times_s["translation", n] for n in translation_lengths),
        ),
        TimesByLength(
            "encoder alone", tuple(encoder_lengths), tuple(times_s["encoder", n] for n in encoder_lengths)
        ),
    )


@house_style()
def draw_translation_time(measured: Sequence[TimesByLength]) -> Figure:
    """A panel for each kind of work: measured points over the fitted parts, stacked.

    Args:
        measured: of `measure_translation`.
    """
    figure = Figure(figsize=(WIDTH_IN, 3.9), layout="constrained")
    axes = figure.subplots(1, len(measured), squeeze=False)[0]
    for axis, times in zip(axes, measured, strict=True):
        fit = fit_quadratic(times.lengths, times.times_s)
        n = np.linspace(0, max(times.lengths), 200)
        parts = [np.full_like(n, fit.constant), fit.linear * n, fit.quadratic * n**2]
        per_token = f"{fit.linear * 1e3:.3g} ms · n"
        per_pair = f"{fit.quadratic * 1e6:.3g} µs · n²"
        axis.stackplot(
            n,
            [part * 1e3 for part in parts],
            colors=("#BBBBBB", COLOURS[5], COLOURS[4]),
            labels=(f"{fit.constant * 1e3:.3g} ms", per_token, per_pair),
        )
        axis.plot(times.lengths, [t * 1e3 for t in times.times_s], "o", color=COLOURS[6], label="measured")
        axis.set(xlim=(0, None), ylim=(0, None), xlabel="sentence length n (tokens)", ylabel="CPU time (ms)")
        axis.set_title(f"{times.title}\nresidual of the fit {fit.residual:.1%}")
        axis.legend(loc="upper left")
    return figure
