from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.latency import BUCKET_BORDERS, Sample, by_bucket, percentile, poisson_arrivals


def test_percentiles_take_the_nearest_rank():
    values = [float(value) for value in range(100, 0, -1)]
    assert percentile(values, 50) == 50.0
    assert percentile(values, 99) == 99.0
    assert percentile(values, 100) == 100.0
    assert percentile([3.0], 99) == 3.0


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.1, 100))
def test_a_percentile_is_the_least_value_that_covers_its_share(values, percent):
    found = percentile(values, percent)
    assert found in values
    needed = percent / 100 * len(values)
    assert sum(value <= found for value in values) >= math.floor(needed)
    assert sum(value < found for value in values) < math.ceil(needed) or found == min(values)


def test_a_percentile_of_nothing_is_refused():
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_arrivals_have_the_rate_they_were_asked_for_and_stay_within_the_duration():
    times = poisson_arrivals(50.0, 100.0, seed=1)
    assert times == sorted(times)
    assert times[0] > 0
    assert times[-1] < 100.0
    assert len(times) == pytest.approx(5000, abs=4 * math.sqrt(5000))


def test_gaps_between_arrivals_vary_as_a_poisson_process_has_it():
    gaps = np.diff(poisson_arrivals(10.0, 500.0, seed=2))
    # Exponential gaps have a standard deviation equal to their mean; evenly spaced ones would have none.
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)


def test_the_same_seed_gives_the_same_arrivals():
    assert poisson_arrivals(5.0, 10.0, seed=3) == poisson_arrivals(5.0, 10.0, seed=3)
    assert poisson_arrivals(5.0, 10.0, seed=3) != poisson_arrivals(5.0, 10.0, seed=4)


@pytest.mark.parametrize(("rate", "duration"), [(0.0, 1.0), (1.0, 0.0)])
def test_a_process_without_rate_or_duration_is_refused(rate, duration):
    with pytest.raises(ValueError, match="above 0"):
        poisson_arrivals(rate, duration, seed=0)


def test_sentences_are_compared_within_their_bucket_and_with_themselves():
    short = [Sample(16, loaded_s=0.4, unloaded_s=0.1) for _ in range(98)]
    slow = [Sample(8, loaded_s=0.9, unloaded_s=0.1) for _ in range(2)]
    long = [Sample(17, loaded_s=1.0, unloaded_s=0.5)]
    first, second, everything = by_bucket([*short, *slow, *long])
    assert (first.bucket, first.num_sentences) == ("1 to 16", 100)
    assert first.loaded_p50_s == 0.4
    assert first.loaded_p99_s == 0.9
    assert first.p99_ratio == pytest.approx(9.0)
    assert (second.bucket, second.num_sentences) == ("17 to 32", 1)
    assert second.slowdown_p99 == 2.0
    assert (everything.bucket, everything.num_sentences) == ("all", 101)


def test_a_slow_short_sentence_does_not_hide_behind_long_ones():
    samples = [Sample(16, loaded_s=1.0, unloaded_s=0.1), Sample(10, loaded_s=1.0, unloaded_s=1.0)]
    bucket = by_bucket(samples)[0]
    assert bucket.p99_ratio == 1.0
    assert bucket.slowdown_p99 == 10.0


@given(st.lists(st.integers(1, BUCKET_BORDERS[-1]), min_size=1))
def test_every_sentence_is_in_exactly_one_bucket(lengths):
    *buckets, everything = by_bucket([Sample(length, 1.0, 1.0) for length in lengths])
    assert sum(bucket.num_sentences for bucket in buckets) == everything.num_sentences == len(lengths)
