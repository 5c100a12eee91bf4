"""One figure of why attention divides by sqrt(D): variance, saturation and gradient against the head size."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from torch import Tensor

from model.figures.style import COLOURS, MARKERS, WIDTH_IN, house_style


@dataclass(frozen=True)
class Saturation:
    """What the softmax over dot products of one head size looks like, averaged over random queries.

    Attributes:
        head_size: D, the length of queries and keys.
        score_variance: variance of the scores.
        largest_weight: mean of the largest attention weight; 1 is one-hot.
        gradient_norm: mean Frobenius norm of the softmax's Jacobian.
    """

    head_size: int
    score_variance: float
    largest_weight: float
    gradient_norm: float


def jacobian_norm(weights: Tensor) -> Tensor:
    """Frobenius norm of the Jacobian diag(a) - a a^T of softmax, from its outputs.

    Its square is sum a_i^2 - 2 sum a_i^3 + (sum a_i^2)^2.

    Args:
        weights: softmax outputs [..., S].

    Returns:
        [...].
    """
    squares, cubes = weights.square().sum(-1), weights.pow(3).sum(-1)  # [...]
    norms: Tensor = (squares - 2 * cubes + squares.square()).clamp_min(0).sqrt()  # [...]
    return norms


def measure_saturation(
    head_size: int, *, scaled: bool, num_keys: int = 32, num_queries: int = 500
) -> Saturation:
    """Draw queries and keys with mean 0 and variance 1, as section 3.2.1 of the paper supposes, and look.

    Args:
        head_size: D.
        scaled: whether the scores are divided by sqrt(D).
        num_keys: S, keys that compete for one query.
        num_queries: over how many the results are averaged.
    """
    generator = torch.Generator().manual_seed(head_size)
    queries = torch.randn(num_queries, 1, head_size, generator=generator)  # [N, 1, D]
    keys = torch.randn(num_queries, head_size, num_keys, generator=generator)  # [N, D, S]
    scores = (queries @ keys)[:, 0].double()  # [N, S]
    if scaled:
        scores = scores / math.sqrt(head_size)
    weights = scores.softmax(dim=1)  # [N, S]
    return Saturation(
        head_size=head_size,
        score_variance=float(scores.var()),
        largest_weight=float(weights.amax(1).mean()),
        gradient_norm=float(jacobian_norm(weights).mean()),
    )


@house_style()
def draw_scaling(*, max_head_size: int = 1024) -> Figure:
    """Three panels against the head size, with and without the division.

    Args:
        max_head_size: the head sizes are the powers of 2 up to this one.
    """
    sizes = [2**exponent for exponent in range(int(math.log2(max_head_size)) + 1)]
    figure = Figure(figsize=(WIDTH_IN, 3.1), layout="constrained")
    variance, largest, gradient = figure.subplots(1, 3)
    for scaled, colour, marker in zip((False, True), (COLOURS[1], COLOURS[0]), MARKERS, strict=False):
        rows = [measure_saturation(size, scaled=scaled) for size in sizes]
        label = "q·k / √D" if scaled else "q·k"
        for axis, values in (
            (variance, [row.score_variance for row in rows]),
            (largest, [row.largest_weight for row in rows]),
            (gradient, [row.gradient_norm for row in rows]),
        ):
            axis.plot(sizes, values, color=colour, marker=marker, label=label)
    variance.set(title="variance of the scores", yscale="log", ylabel="variance (no unit)")
    largest.set(title="largest of 32 weights", ylim=(0, 1.02), ylabel="mean weight (1 = one-hot)")
    gradient.set(title="gradient through the softmax", ylim=(0, None), ylabel="norm of the Jacobian")
    for axis in (variance, largest, gradient):
        axis.set_xscale("log", base=2)
        axis.set_xlabel("head size D")
    variance.legend()
    return figure
