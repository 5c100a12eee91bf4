from __future__ import annotations

import pytest

from benchmarks.breakdown import scaled
from benchmarks.gemm_peak import GemmRate, GemmRates, measure_gemm
from benchmarks.machine import has_vnni
from benchmarks.multiply_adds import MatrixProduct
from benchmarks.peak_share import nearest_row_count
from benchmarks.watched_model import CallTimes, seconds_by_operator

RATES = GemmRates(
    (
        GemmRate("uint8", 1, 4, 8, gflop_per_s=10.0),
        GemmRate("uint8", 1, 8, 4, gflop_per_s=30.0),
        GemmRate("uint8", 32, 4, 8, gflop_per_s=90.0),
        GemmRate("int8", 1, 4, 8, gflop_per_s=500.0),
    )
)


def test_the_peak_is_the_best_rate_of_the_kernel_in_use():
    assert RATES.best("uint8") == 90.0
    assert RATES.best("int8") == 500.0


def test_products_one_after_another_reach_the_harmonic_mean_of_their_rates():
    products = [MatrixProduct(4, 8, count=3), MatrixProduct(8, 4, count=3)]
    # Equal work at 10 and at 30: the time is 1/10 + 1/30 for 2.
    assert RATES.of_products(products, "uint8", 1) == pytest.approx(15.0)


def test_more_work_at_the_slow_shape_weighs_more():
    products = [MatrixProduct(4, 8, count=3), MatrixProduct(8, 4, count=1)]
    assert RATES.of_products(products, "uint8", 1) == pytest.approx(4 / (3 / 10 + 1 / 30))


def test_a_shape_that_was_not_measured_is_not_guessed():
    with pytest.raises(KeyError):
        RATES.of_products([MatrixProduct(8, 4, count=1)], "uint8", 32)


def test_every_shape_is_measured_with_every_row_count_and_both_kernels():
    measured = measure_gemm([(16, 32), (16, 32)], [1, 4], repeat_s=0.001)
    assert {(rate.weights, rate.num_rows, rate.inputs, rate.outputs) for rate in measured.rates} == {
        (weights, rows, 16, 32) for weights in ("int8", "uint8") for rows in (1, 4)
    }
    assert all(rate.gflop_per_s > 0 for rate in measured.rates)


def test_a_profile_counts_kernels_and_nothing_else():
    events = [
        {"cat": "Session", "name": "model_run", "dur": 900},
        {"cat": "Node", "name": "a_kernel_time", "dur": 2_000_000, "args": {"op_name": "MatMul"}},
        {"cat": "Node", "name": "a_fence_before", "dur": 7, "args": {"op_name": "MatMul"}},
        {"cat": "Node", "name": "b_kernel_time", "dur": 3_000_000, "args": {"op_name": "Add"}},
        {"cat": "Node", "name": "c_kernel_time", "dur": 4_000_000, "args": {"op_name": "MatMul"}},
    ]
    found = seconds_by_operator(events)
    assert found == {"MatMul": 6.0, "Add": 3.0}
    assert list(found) == ["MatMul", "Add"]


def test_profiled_times_are_scaled_in_proportion():
    assert scaled({"MatMul": 6.0, "Add": 3.0}, 3.0) == {"MatMul": 2.0, "Add": 1.0}
    assert scaled({}, 3.0) == {}


def test_call_times_add_up_by_graph_and_start_anew_when_cleared():
    times = CallTimes()
    times.add("step", 1.0)
    times.add("step", 2.0)
    times.add("encoder", 4.0)
    assert times.seconds == {"step": 3.0, "encoder": 4.0}
    assert times.calls == {"step": 2, "encoder": 1}
    times.clear()
    assert times.seconds == times.calls == {}


@pytest.mark.parametrize(
    ("flags", "expected"), [(["avx2", "fma"], False), (["avx512_vnni"], True), (["avx2", "avx_vnni"], True)]
)
def test_vnni_is_read_from_the_cpus_flags(flags, expected):
    assert has_vnni(flags) is expected


@pytest.mark.parametrize(
    ("rows", "nearest"), [(0.9, 1), (1.0, 1), (5.5, 4), (6.0, 8), (25.0, 32), (4000.0, 256)]
)
def test_products_are_compared_at_the_measured_row_count_nearest_by_ratio(rows, nearest):
    assert nearest_row_count(rows) == nearest
