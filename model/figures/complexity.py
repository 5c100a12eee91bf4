"""Table 1 of Vaswani et al. 2017, measured: time and memory of four kinds of layer against n and d."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from model.figures.layer_types import LAYER_TYPES, LayerType, make_layer
from model.figures.measurement import median_times_s
from model.figures.style import COLOURS, MARKERS, WIDTH_IN, house_style

FIXED_LENGTH = 256
FIXED_WIDTH = 256
LENGTHS = (32, 64, 128, 256, 512, 1024, 2048)
WIDTHS = (32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class LayerCost:
    """One point of the table.

    Attributes:
        layer_type: which layer.
        length: n, positions of the one sequence.
        width: d.
        time_s: median CPU seconds of a forward pass without gradients.
        memory_bytes: what a forward pass keeps for the backward pass, parameters left out.
    """

    layer_type: LayerType
    length: int
    width: int
    time_s: float
    memory_bytes: int


def saved_bytes(function: Callable[[], Tensor], *, parameters: Sequence[Tensor] = ()) -> int:
    """Count the bytes that a computation keeps for its backward pass, each storage once.

    Args:
        function: computes with gradients.
        parameters: tensors whose storage is not counted.

    Returns:
        Bytes.
    """
    not_counted = {tensor.untyped_storage().data_ptr() for tensor in parameters}
    sizes: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in not_counted:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        output = function()
        # While the output lives, so does all that was saved: no address is used twice.
        total = sum(sizes.values())
        del output
    return total


@contextmanager
def _fixed_draws() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def measure_costs(
    points: Sequence[tuple[int, int]], *, repeats: int, layer_types: Sequence[LayerType] = LAYER_TYPES
) -> list[LayerCost]:
    """Measure every layer type at every (n, d), one sequence at a time on one thread.

    Args:
        points: lengths and widths.
        repeats: times each is measured; the median counts.
        layer_types: which layers.

    Returns:
        A cost for each layer type and point.
    """
    layers: dict[tuple[LayerType, int, int], tuple[nn.Module, Tensor]] = {}
    with _fixed_draws():
        for layer_type in layer_types:
            for length, width in points:
                layers[layer_type, length, width] = (
                    make_layer(layer_type, width),
                    torch.randn(1, length, width),
                )
    tasks = {key: functools.partial(_forward, layer, inputs) for key, (layer, inputs) in layers.items()}
    times_s = median_times_s(tasks, repeats=repeats, title="layers")
    return [
        LayerCost(
            layer_type,
            length,
            width,
            times_s[layer_type, length, width],
            saved_bytes(functools.partial(layer, inputs), parameters=list(layer.parameters())),
        )
        for (layer_type, length, width), (layer, inputs) in layers.items()
    ]


@torch.inference_mode()
def _forward(layer: nn.Module, inputs: Tensor) -> None:
    layer(inputs)


def exponent(sizes: Sequence[int], costs: Sequence[float]) -> float:
    """The p of cost ~ size^p between the last two points, where what does not grow weighs least."""
    return math.log(costs[-1] / costs[-2]) / math.log(sizes[-1] / sizes[-2])


@house_style()
def draw_complexity(costs: Sequence[LayerCost]) -> Figure:
    """Four panels: time and memory, against the length at one width and against the width at one length.

    Args:
        costs: of `measure_costs`, several lengths at `FIXED_WIDTH` and several widths at `FIXED_LENGTH`.
    """
    figure = Figure(figsize=(WIDTH_IN, 6.6), layout="constrained")
    panels = figure.subplots(2, 2, sharey="row")
    by_length = [cost for cost in costs if cost.width == FIXED_WIDTH]
    by_width = [cost for cost in costs if cost.length == FIXED_LENGTH]
    for row, (unit, label) in enumerate(
        ((1e3, "CPU time of a forward pass (ms)"), (2**-20, "kept for backward (MiB)"))
    ):
        for layer_type, colour, marker in zip(LAYER_TYPES, COLOURS, MARKERS, strict=False):
            for column, (letter, sweep) in enumerate((("n", by_length), ("d", by_width))):
                line = [cost for cost in sweep if cost.layer_type == layer_type]
                sizes = [cost.length if letter == "n" else cost.width for cost in line]
                values = [(cost.time_s if row == 0 else cost.memory_bytes) * unit for cost in line]
                power = f"{layer_type}: ∝ {letter}^{exponent(sizes, values):.1f}"
                panels[row][column].plot(sizes, values, color=colour, marker=marker, label=power)
        panels[row][0].set(xlabel=f"length n (tokens), d = {FIXED_WIDTH}", ylabel=label)
        panels[row][1].set(xlabel=f"width d (features), n = {FIXED_LENGTH}")
        for axis in panels[row]:
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.legend(fontsize=7.5)
    figure.suptitle(
        "One layer, one sequence, one thread; exponents from the two largest sizes", fontsize=10.0
    )
    return figure
