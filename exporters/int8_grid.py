"""Float matrices that already lie on an int8 grid keep it.

A model that was fine-tuned from a bundle has parts that training left alone, such as its teacher's encoder.
Their weights are float32 products of the teacher's integers and scales. Rounded anew to another scale they
would lose a little; recognised, they come out as they went in.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from exporters.checkpoint import Float32Array, Int8Array, QuantizedWeight
from exporters.quantization import quantize

_INT8_MAX = 127
_NUM_SAMPLED = 32
_NEAR = 1e-3
"""How far a sampled ``weight / scale`` of a row on a grid may be from an integer; float32 errs by 1e-4."""
_ULPS = (0, 1, -1, 2, -2)
"""``max / steps`` may miss the scale that the products were made with by two rounding errors."""


def quantize_on_grid(weight: Float32Array) -> QuantizedWeight:
    """Round a matrix [out, in] to int8, without any loss where it already is on a grid.

    A row is on a grid if ``scale * int8`` gives each of its floats exactly. Rows that are not are rounded as
    `exporters.quantization.quantize` does it.

    Args:
        weight: float32 [out, in].

    Returns:
        With one scale for all, [], if the whole matrix is on one grid, as importers bring it; else [out].

    Raises:
        CheckpointError: a weight is not a finite number.
    """
    if not np.isfinite(weight).all():
        return quantize(weight)  # which says what is wrong
    whole = _rows_on_grid(weight.reshape(1, -1))
    if whole.found[0]:
        return QuantizedWeight(whole.values.reshape(weight.shape), whole.scales[0].reshape(()))
    rows = _rows_on_grid(weight)
    if not rows.found.all():
        rounded = quantize(weight[~rows.found])
        rows.values[~rows.found], rows.scales[~rows.found] = rounded.values, rounded.scale
    return QuantizedWeight(rows.values, rows.scales)


@dataclass(frozen=True)
class _GridRows:
    """Rows [out, in] as ``values * scales``; both mean something only where `found`, bool [out]."""

    values: Int8Array
    scales: Float32Array
    found: npt.NDArray[np.bool_]


def _rows_on_grid(rows: Float32Array) -> _GridRows:
    largest = np.abs(rows).max(axis=1)
    result = _GridRows(
        values=np.zeros(rows.shape, np.int8), scales=np.ones(len(rows), np.float32), found=largest == 0
    )
    sampled = rows[:, :: max(1, rows.shape[1] // _NUM_SAMPLED)]
    # The largest weight of a row is at most 127 steps. Coarse grids first: a finer one may not be exact.
    for steps in range(1, _INT8_MAX + 1):
        (pending,) = np.nonzero(~result.found)
        scales = largest[pending] / np.float32(steps)
        usable = scales >= np.finfo(np.float32).tiny
        pending, scales = pending[usable], scales[usable]
        if not len(pending):
            break
        ratios = sampled[pending] / scales[:, None]
        near = (np.abs(ratios - np.rint(ratios)) < _NEAR).all(axis=1)
        _take_exact(rows, pending[near], scales[near], result)
    return result


def _take_exact(
    rows: Float32Array, candidates: npt.NDArray[np.intp], scales: Float32Array, result: _GridRows
) -> None:
    """Note those candidates that a scale next to theirs reproduces in every bit."""
    for ulps in _ULPS:
        if not len(candidates):
            return
        tried = scales
        for _ in range(abs(ulps)):
            tried = np.nextafter(tried, np.float32(np.inf if ulps > 0 else 0))
        chosen = rows[candidates]
        values = np.clip(np.rint(chosen / tried[:, None]), -_INT8_MAX, _INT8_MAX)
        exact = (values * tried[:, None] == chosen).all(axis=1)
        taken = candidates[exact]
        result.values[taken], result.scales[taken] = values[exact].astype(np.int8), tried[exact]
        result.found[taken] = True
        candidates, scales = candidates[~exact], scales[~exact]
