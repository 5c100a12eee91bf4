"""When sentences arrive, and what is made of how long their answers took."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BUCKET_BORDERS = (0, 16, 32, 64, 128)
"""Source tokens: a bucket takes lengths above one border up to the next."""


@dataclass(frozen=True)
class Sample:
    """One answered sentence.

    Attributes:
        source_length: tokens, end-of-sentence included.
        loaded_s: seconds from its arrival to its answer among the others.
        unloaded_s: seconds the same sentence takes when nothing else runs.
    """

    source_length: int
    loaded_s: float
    unloaded_s: float


@dataclass(frozen=True)
class BucketLatency:
    """Latency of one range of source lengths.

    Attributes:
        bucket: the range, as text.
        num_sentences: answered.
        loaded_p50_s: median under load.
        loaded_p99_s: 99th percentile under load.
        unloaded_p50_s: median of the same sentences alone.
        unloaded_p99_s: 99th percentile of the same sentences alone.
        p99_ratio: `loaded_p99_s` by `unloaded_p99_s`.
        slowdown_p99: 99th percentile of each sentence's own loaded by unloaded time; stricter, since a
            short sentence is compared with itself and not with the longest of its bucket.
    """

    bucket: str
    num_sentences: int
    loaded_p50_s: float
    loaded_p99_s: float
    unloaded_p50_s: float
    unloaded_p99_s: float
    p99_ratio: float
    slowdown_p99: float


def poisson_arrivals(rate_per_s: float, duration_s: float, *, seed: int) -> list[float]:
    """Seconds from the start of each arrival of a Poisson process: exponential gaps, within the duration."""
    if rate_per_s <= 0 or duration_s <= 0:
        raise ValueError(
            f"the rate is {rate_per_s} per s and the duration {duration_s} s; both must be above 0"
        )
    draw = np.random.default_rng(seed)
    times: list[float] = []
    now_s = float(draw.exponential(1 / rate_per_s))
    while now_s < duration_s:
        times.append(now_s)
        now_s += float(draw.exponential(1 / rate_per_s))
    return times


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` % of the values do not exceed (nearest rank).

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("a percentile of no values does not exist")
    rank = max(1, math.ceil(percent / 100 * len(values)))
    return sorted(values)[rank - 1]


def by_bucket(samples: Sequence[Sample]) -> list[BucketLatency]:
    """Percentiles of every bucket that has samples, then of all together."""
    rows = [
        _summary(f"{low + 1} to {high}", chosen)
        for low, high in itertools.pairwise(BUCKET_BORDERS)
        if (chosen := [sample for sample in samples if low < sample.source_length <= high])
    ]
    return [*rows, _summary("all", samples)]


def _summary(bucket: str, samples: Sequence[Sample]) -> BucketLatency:
    loaded = [sample.loaded_s for sample in samples]
    unloaded = [sample.unloaded_s for sample in samples]
    loaded_p99_s, unloaded_p99_s = percentile(loaded, 99), percentile(unloaded, 99)
    return BucketLatency(
        bucket=bucket,
        num_sentences=len(samples),
        loaded_p50_s=percentile(loaded, 50),
        loaded_p99_s=loaded_p99_s,
        unloaded_p50_s=percentile(unloaded, 50),
        unloaded_p99_s=unloaded_p99_s,
        p99_ratio=loaded_p99_s / unloaded_p99_s,
        slowdown_p99=percentile([sample.loaded_s / sample.unloaded_s for sample in samples], 99),
    )
