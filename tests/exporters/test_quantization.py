"""Int8 weights are safe under the kernel of CPUs without VNNI, and lose little by it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from exporters.quantization import quantize, reduced, reduction_divisors

Int8Array = npt.NDArray[np.int8]

shapes = st.tuples(st.integers(1, 6), st.integers(1, 9))
anything = shapes.flatmap(lambda shape: arrays.arrays(np.int8, shape))


def saturating_product(x: npt.NDArray[np.uint8], weight: Int8Array) -> npt.NDArray[np.int64]:
    """``x @ weight.T`` as VPMADDUBSW computes it: sums of two neighbouring products are held in 16 bits."""
    if weight.shape[1] % 2:
        x, weight = np.pad(x, ((0, 0), (0, 1))), np.pad(weight, ((0, 0), (0, 1)))
    products = x[:, None, :].astype(np.int64) * weight[None].astype(np.int64)
    pairs = products.reshape(*products.shape[:2], -1, 2).sum(axis=3)
    return np.clip(pairs, -(2**15), 2**15 - 1).sum(axis=2)


def worst_inputs(weight: Int8Array) -> npt.NDArray[np.uint8]:
    """For each row the inputs that make its sums largest and smallest, and all at once."""
    ends = [np.where(weight > 0, 255, 0), np.where(weight < 0, 255, 0), np.full_like(weight, 255, np.int64)]
    return np.concatenate(ends).astype(np.uint8)


def safe(values: Int8Array) -> Int8Array:
    divisors = reduction_divisors(values)
    return values if divisors is None else reduced(values, divisors)


def test_two_large_neighbours_do_saturate_unless_they_are_reduced() -> None:
    weight = np.array([[127, 127]], dtype=np.int8)
    x = np.array([[255, 255]], dtype=np.uint8)
    assert saturating_product(x, weight)[0, 0] == 2**15 - 1
    assert saturating_product(x, safe(weight))[0, 0] == 255 * 128


@given(anything)
def test_reduced_weights_never_saturate(values: Int8Array) -> None:
    weight = safe(values)
    x = worst_inputs(weight)
    assert np.array_equal(saturating_product(x, weight), x.astype(np.int64) @ weight.T.astype(np.int64))


@given(anything)
def test_a_row_that_cannot_saturate_is_left_alone_and_no_row_is_more_than_halved(values: Int8Array) -> None:
    divisors = reduction_divisors(values)
    x = worst_inputs(values)
    is_safe = (saturating_product(x, values) == x.astype(np.int64) @ values.T.astype(np.int64)).all(axis=0)
    if divisors is None:
        assert is_safe.all()
        return
    assert divisors.min() >= 128
    assert divisors.max() <= 258
    assert (divisors[~is_safe] > 128).all()
    # 32767 / 255 is a little above 128: a pair of 129 with one product cut short is reduced as well.
    sums = np.abs(values.astype(np.int64)).sum(axis=1)
    assert (divisors[sums <= 128] == 128).all()


@given(
    shapes.flatmap(lambda shape: arrays.arrays(np.float32, shape, elements=st.floats(-1e3, 1e3, width=32)))
)
def test_float_weights_become_int8_that_never_saturates_within_half_a_step(
    weight: npt.NDArray[np.float32],
) -> None:
    packed = quantize(weight)
    x = worst_inputs(packed.values)
    exact = x.astype(np.int64) @ packed.values.T.astype(np.int64)
    assert np.array_equal(saturating_product(x, packed.values), exact)
    error = np.abs(packed.to_float() - weight).max(axis=1, initial=0)
    assert (error <= 0.501 * packed.scale).all()
    assert reduction_divisors(packed.values) is None
