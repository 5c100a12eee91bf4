"""Float matrices to int8, symmetric, one scale per output row."""

from __future__ import annotations

import dataclasses

import numpy as np

from app.errors import CheckpointError
from exporters.checkpoint import Checkpoint, Float32Array, QuantizedWeight

_INT8_MAX = 127


def quantize(weight: Float32Array) -> QuantizedWeight:
    """Round a matrix [out, in] to ``scale[out] * int8``, with ``scale = max|row| / 127``.

    A row of zeros gets scale 1, so that nothing is divided by zero.

    Raises:
        CheckpointError: a weight is not a finite number.
    """
    if not np.isfinite(weight).all():
        raise CheckpointError(
            f"a matrix {list(weight.shape)} holds {np.count_nonzero(~np.isfinite(weight))} weights that are "
            "not finite numbers: training diverged or the file is damaged; export an earlier checkpoint"
        )
    scale = np.abs(weight).max(axis=1) / _INT8_MAX
    scale[scale == 0] = 1.0
    values = np.clip(np.rint(weight / scale[:, None]), -_INT8_MAX, _INT8_MAX).astype(np.int8)
    return QuantizedWeight(values, scale.astype(np.float32))


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
