"""Weights that came from integers go back to them without loss; others are rounded as always."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from app.bundle import default_directory, open_bundle
from app.errors import CheckpointError
from exporters.bundle_checkpoint import read_checkpoint
from exporters.checkpoint import QuantizedWeight
from exporters.int8_grid import quantize_on_grid
from exporters.quantization import quantize

Float32Array = npt.NDArray[np.float32]
shapes = st.tuples(st.integers(1, 5), st.integers(1, 40))
integers = arrays.arrays(np.int8, shapes, elements=st.integers(-127, 127))
scales = st.floats(2.0**-20, 2.0**10, width=32)


@given(integers, scales)
@settings(deadline=None)
def test_a_matrix_of_one_grid_loses_nothing_and_keeps_one_scale(
    values: npt.NDArray[np.int8], scale: float
) -> None:
    original = QuantizedWeight(values, np.array(scale, np.float32))
    back = quantize_on_grid(original.to_float())
    assert np.array_equal(back.to_float(), original.to_float())
    assert back.scale.ndim == 0


@given(integers, st.data())
@settings(deadline=None)
def test_rows_of_grids_of_their_own_lose_nothing(values: npt.NDArray[np.int8], data: st.DataObject) -> None:
    row_scales = data.draw(arrays.arrays(np.float32, len(values), elements=scales))
    original = QuantizedWeight(values, row_scales)
    assert np.array_equal(quantize_on_grid(original.to_float()).to_float(), original.to_float())


@given(arrays.arrays(np.float32, shapes, elements=st.floats(-2, 2, width=32)))
@settings(deadline=None)
def test_what_quantize_made_of_a_matrix_is_not_changed_again(weight: Float32Array) -> None:
    once = quantize(weight).to_float()
    assert np.array_equal(quantize_on_grid(once).to_float(), once)


def random_matrix(num_out: int = 30, num_in: int = 64) -> Float32Array:
    return np.random.default_rng(1).normal(0, 0.1, (num_out, num_in)).astype(np.float32)


def test_integers_that_use_the_whole_range_come_back_bit_for_bit() -> None:
    values = np.random.default_rng(2).integers(-127, 128, (30, 64)).astype(np.int8)
    original = QuantizedWeight(values, np.array(0.0123, np.float32))
    back = quantize_on_grid(original.to_float())
    assert np.array_equal(back.values, values)
    assert back.scale == original.scale


def test_a_float_matrix_is_rounded_as_always() -> None:
    weight = random_matrix()
    ours, expected = quantize_on_grid(weight), quantize(weight)
    assert np.array_equal(ours.values, expected.values)
    assert np.array_equal(ours.scale, expected.scale)


def test_only_the_rows_that_training_moved_are_rounded() -> None:
    values = np.random.default_rng(2).integers(-127, 128, (30, 64)).astype(np.int8)
    weight = QuantizedWeight(values, np.array(0.0123, np.float32)).to_float()
    weight[7:9] += random_matrix(2)
    back = quantize_on_grid(weight)
    kept = [row for row in range(30) if row not in (7, 8)]
    assert np.array_equal(back.values[kept], values[kept])
    assert np.array_equal(back.values[7:9], quantize(weight[7:9]).values)
    assert np.array_equal(back.to_float()[kept], weight[kept])


def test_one_weight_moved_by_its_last_bit_is_off_the_grid() -> None:
    values = np.random.default_rng(2).integers(-127, 128, (4, 64)).astype(np.int8)
    weight = QuantizedWeight(values, np.array(0.0123, np.float32)).to_float()
    weight[2, 5] = np.nextafter(weight[2, 5], np.float32(9))
    back = quantize_on_grid(weight)
    expected = quantize(weight[2:3])
    assert np.array_equal(back.values[2:3], expected.values)
    assert back.scale[2] == expected.scale[0]


def test_rows_of_zeros_and_of_numbers_below_the_normal_range_pass() -> None:
    weight = np.zeros((3, 8), np.float32)
    weight[1] = np.float32(1e-42)
    weight[2] = random_matrix(1, 8)
    assert np.array_equal(quantize_on_grid(weight).to_float()[0], weight[0])


def test_weights_that_are_not_finite_are_refused() -> None:
    weight = random_matrix()
    weight[3, 3] = np.nan
    with pytest.raises(CheckpointError, match="1 weights that are not finite"):
        quantize_on_grid(weight)


@pytest.mark.parametrize("name", ["en-pt", "pt-en"])
def test_the_shipped_integers_come_back_from_their_floats(name: str) -> None:
    checkpoint = read_checkpoint(open_bundle(default_directory() / name, verify=False))
    matrices = {
        key: weight for key, weight in checkpoint.weights.items() if isinstance(weight, QuantizedWeight)
    }
    for key, weight in matrices.items():
        back = quantize_on_grid(weight.to_float())
        assert np.array_equal(back.values, weight.values), key
        assert np.array_equal(back.scale, weight.scale), key
    assert len(matrices) > 50
