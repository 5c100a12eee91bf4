"""Static activation scales for a checkpoint that has none: what its layers see on real text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from exporters.checkpoint import Checkpoint
from exporters.torch_reference import to_module
from model.greedy import greedy
from model.transformer import Transformer

_INT8_MAX = 127
_BATCH = 16
_SAMPLES_PER_BATCH = 20_000
_CLIPS = np.linspace(0.4, 1.0, 31)
"""Candidates for the clipping range, as shares of the largest value seen."""


def calibrated(
    checkpoint: Checkpoint,
    sources: Sequence[Sequence[int]],
    *,
    max_ratio: float = 2.0,
    progress: Callable[[str], None] = lambda _: None,
) -> Checkpoint:
    """The checkpoint with an activation scale for every linear layer.

    The PyTorch model translates the sources greedily; each layer's scale is the one that quantises
    its sampled inputs with the least squared error, clipping the tail where that pays. Layers that
    share an input get the same scale, since they see the same values.

    Args:
        checkpoint: float or int8 weights.
        sources: a few hundred sentences as token ids, end-of-sentence included.
        max_ratio: decoder steps per source token.
        progress: told how many sentences are done.
    """
    module = to_module(checkpoint)
    samples: dict[str, list[npt.NDArray[np.float32]]] = {}
    largest: dict[str, float] = {}

    def record(name: str, values: Tensor) -> None:
        flat = values.detach().reshape(-1).numpy()
        largest[name] = max(largest.get(name, 0.0), float(np.abs(flat).max()))
        # An odd stride visits every feature; the same one for all layers that see this input.
        samples.setdefault(name, []).append(flat[:: len(flat) // _SAMPLES_PER_BATCH | 1].copy())

    handles = [
        _watch(layer, name, record)
        for name, layer in module.named_modules()
        if isinstance(layer, torch.nn.Linear)
    ]
    handles.append(_watch_projection(module, record))
    try:
        order = sorted(range(len(sources)), key=lambda index: len(sources[index]))
        for start in range(0, len(order), _BATCH):
            progress(f"calibrating: {start} of {len(order)} sentences")
            _translate(module, [sources[index] for index in order[start : start + _BATCH]], max_ratio)
    finally:
        for remove in handles:
            remove()
    scales = {
        f"{name}.weight": _best_scale(np.concatenate(values), largest[name])
        for name, values in samples.items()
    }
    return dataclasses.replace(checkpoint, activation_scales=scales)


def _best_scale(values: npt.NDArray[np.float32], largest: float) -> float:
    """The quantisation step with the least mean squared error over the samples."""
    best_error, best_scale = np.inf, 1.0
    for clip in _CLIPS * max(largest, 1e-6):
        scale = float(clip) / _INT8_MAX
        error = float(
            np.square(np.clip(np.rint(values / scale), -_INT8_MAX, _INT8_MAX) * scale - values).mean()
        )
        if error < best_error:
            best_error, best_scale = error, scale
    return best_scale


def _watch(layer: torch.nn.Linear, name: str, record: Callable[[str, Tensor], None]) -> Callable[[], None]:
    return layer.register_forward_pre_hook(lambda _, inputs: record(name, inputs[0])).remove


def _watch_projection(module: Transformer, record: Callable[[str, Tensor], None]) -> Callable[[], None]:
    project = module.project

    def watched(hidden: Tensor) -> Tensor:
        record("embedding", hidden)
        return project(hidden)

    module.project = watched  # type: ignore[method-assign]

    def restore() -> None:
        module.project = project  # type: ignore[method-assign]

    return restore


def _translate(module: Transformer, sources: Sequence[Sequence[int]], max_ratio: float) -> None:
    length = max(map(len, sources))
    source_ids = torch.full((len(sources), length), module.config.eos_id)
    source_mask = torch.zeros((len(sources), length), dtype=torch.bool)
    for row, ids in enumerate(sources):
        source_ids[row, : len(ids)] = torch.tensor(ids)
        source_mask[row, : len(ids)] = True
    greedy(module, source_ids, source_mask, max_steps=int(max_ratio * length))
