"""Float matrices to int8, symmetric, one scale per output row, exact under every CPU's kernel.

Without VNNI a CPU multiplies uint8 activations by int8 weights with VPMADDUBSW, which adds two neighbouring
products in 16 bits and saturates. Two neighbours of one sign whose magnitudes add up to at most 128 cannot:
255 * 128 < 2**15. Weights rarely break that by much, so that instead of halving their range (which is always
safe) a row is scaled by what its own worst pair needs, 1.3 on the average.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from app.errors import CheckpointError
from exporters.checkpoint import Checkpoint, Float32Array, Int8Array, QuantizedWeight

Int16Array = npt.NDArray[np.int16]

_INT8_MAX = 127
MAX_PAIR_SUM = 128
"""Largest sum of two neighbours of one sign that cannot saturate."""


def pair_sums(weight: npt.NDArray[np.generic]) -> Float32Array:
    """The largest sum of two neighbours of one sign, and of a single weight, by row of a matrix [out, in].

    Neighbours are the inputs 2i and 2i + 1, as the kernel pairs them.
    """
    magnitudes = np.pad(weight.astype(np.float32), ((0, 0), (0, weight.shape[1] % 2)))
    pairs = magnitudes.reshape(len(magnitudes), -1, 2)
    positive, negative = np.maximum(pairs, 0).sum(axis=2), np.maximum(-pairs, 0).sum(axis=2)
    largest: Float32Array = np.maximum(positive, negative).max(axis=1)
    return largest


def reduction_divisors(values: Int8Array) -> Int16Array | None:
    """D by row of int8 [out, in]: ``round(values * 128 / D)`` has no pair that saturates.

    Returns:
        int16 [out], the least such D of each row, 128 (no change) to 258; None when no row needs any.
    """
    sums = pair_sums(values)
    if (sums <= MAX_PAIR_SUM).all():
        return None
    divisors = np.maximum(sums, MAX_PAIR_SUM).astype(np.int16)
    # Rounding may add a half to each of a pair; a few more always make room for that.
    while (unsafe := pair_sums(reduced(values, divisors)) > MAX_PAIR_SUM).any():
        divisors[unsafe] += 1
    return divisors


def reduced(values: Int8Array, divisors: Int16Array) -> Int8Array:
    """``round(values * 128 / D)`` of int8 [out, in] in float32, as the graphs do it when they are loaded."""
    exact = values.astype(np.float32) * np.float32(MAX_PAIR_SUM) / divisors[:, None].astype(np.float32)
    return np.rint(exact).astype(np.int8)


def quantize(weight: Float32Array) -> QuantizedWeight:
    """Round a matrix [out, in] to ``scale[out] * int8``.

    The scale is ``max|row| / 127``, or larger where two neighbours would saturate. A row of zeros gets scale
    1, so that nothing is divided by zero.

    Raises:
        CheckpointError: a weight is not a finite number.
    """
    if not np.isfinite(weight).all():
        raise CheckpointError(
            f"a matrix {list(weight.shape)} holds {np.count_nonzero(~np.isfinite(weight))} weights that are "
            "not finite numbers: training diverged or the file is damaged; export an earlier checkpoint"
        )
    scale = np.maximum(np.abs(weight).max(axis=1) / _INT8_MAX, pair_sums(weight) / MAX_PAIR_SUM)
    scale[scale == 0] = 1.0
    unsafe = pair_sums(np.rint(weight / scale[:, None])) > MAX_PAIR_SUM
    # Rounding may add a half to each of a pair: one less makes room for that.
    scale = np.where(unsafe, scale * MAX_PAIR_SUM / (MAX_PAIR_SUM - 1), scale).astype(np.float32)
    values = np.clip(np.rint(weight / scale[:, None]), -_INT8_MAX, _INT8_MAX).astype(np.int8)
    return QuantizedWeight(values, scale)


def quantized(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with every matrix in int8; those that were already are left as they are.

    Every variant of a bundle and the reference it is verified against compute with these weights,
    so the difference between them is the arithmetic alone.
    """
    weights = {
        name: quantize(weight) if isinstance(weight, np.ndarray) and weight.ndim == 2 else weight
        for name, weight in checkpoint.weights.items()
    }
    return dataclasses.replace(checkpoint, weights=weights)
