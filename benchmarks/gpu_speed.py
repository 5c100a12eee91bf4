"""How fast a device decodes: tokens a second by rows and beams, latency, and what shares that is."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from app.bundle import Manifest
from app.decoding.options import DecodingOptions
from benchmarks.driven_lane import DrivenLane
from benchmarks.gpu_peaks import Peaks
from benchmarks.local_engine import num_tokens
from benchmarks.multiply_adds import (
    decoder_multiply_adds,
    encoder_multiply_adds,
    has_self_attention,
    step_products,
)

_HALF_BYTES = 2


@dataclass(frozen=True)
class Rate:
    """Sentences decoded together.

    Attributes:
        num_sentences: decoded at the same time.
        beam_size: 1 is greedy.
        num_waves: how often so many were decoded.
        num_tokens: of the best hypotheses.
        wall_s: seconds for them, encoder included.
    """

    num_sentences: int
    beam_size: int
    num_waves: int
    num_tokens: int
    wall_s: float

    @property
    def tokens_per_s(self) -> float:
        """Target tokens a second."""
        return self.num_tokens / self.wall_s


@dataclass(frozen=True)
class Shares:
    """What a rate reaches of the device's measured peaks, counting the work that the text asks for.

    Attributes:
        bandwidth: of a step's weights and caches, read once, by the time of a step; logits are left out.
        compute: of two operations a multiply-add, encoder included.
    """

    bandwidth: float
    compute: float


@dataclass(frozen=True)
class Latency:
    """One sentence at a time.

    Attributes:
        num_sentences: measured.
        p50_ms: median milliseconds, from token ids to token ids.
        p95_ms: 95th percentile.
    """

    num_sentences: int
    p50_ms: float
    p95_ms: float


def rate_of(
    lane: DrivenLane,
    sources: Sequence[Sequence[int]],
    limits: Sequence[int],
    *,
    num_slots: int,
    beam_size: int,
    min_s: float,
) -> Rate:
    """Decode waves of `num_slots` sentences for `min_s` seconds, after one that does not count."""
    options = DecodingOptions(beam_size=beam_size)
    wave = [index % len(sources) for index in range(num_slots)]
    wave_sources, wave_limits = [sources[index] for index in wave], [limits[index] for index in wave]
    lane.translate(wave_sources, wave_limits, options)
    tokens = num_waves = 0
    started_at_s = time.perf_counter()
    while num_waves == 0 or time.perf_counter() - started_at_s < min_s:
        tokens += num_tokens(lane.translate(wave_sources, wave_limits, options))
        num_waves += 1
    wall_s = time.perf_counter() - started_at_s
    return Rate(num_slots, beam_size, num_waves, tokens, wall_s)


def latency_of(
    lane: DrivenLane, sources: Sequence[Sequence[int]], limits: Sequence[int], *, num_sentences: int
) -> Latency:
    """Translate sentences one after another; the first two do not count."""
    taken_ms: list[float] = []
    for index in range(num_sentences + 2):
        one = slice(index % len(sources), index % len(sources) + 1)
        started_at_s = time.perf_counter()
        lane.translate(sources[one], limits[one])
        taken_ms.append((time.perf_counter() - started_at_s) * 1e3)
    counted = sorted(taken_ms[2:])
    return Latency(
        num_sentences=num_sentences,
        p50_ms=statistics.median(counted),
        p95_ms=counted[min(len(counted) - 1, int(0.95 * len(counted)))],
    )


def shares_of(
    rate: Rate, manifest: Manifest, peaks: Peaks, *, source_length: int, padded_length: int
) -> Shares:
    """Compare a rate with the device's peaks.

    Args:
        rate: of sentences that all have as many source tokens, and that all decode as many.
        manifest: the model's.
        peaks: measured on the same device.
        source_length: source tokens.
        padded_length: positions of the cross-attention cache, all of which a step reads.
    """
    sizes = manifest.sizes
    num_sentences = rate.num_waves * rate.num_sentences
    length = rate.num_tokens // num_sentences
    rows = rate.num_sentences * rate.beam_size
    weights = sum(product.inputs * product.outputs * product.count for product in step_products(manifest))
    per_position = 2 * sizes.d_model * sizes.decoder_layers  # a key and a value in every layer
    caches = rate.num_sentences * padded_length * per_position
    if has_self_attention(manifest):
        caches += rows * length // 2 * per_position
    step_bytes = (weights + caches) * _HALF_BYTES
    multiply_adds = encoder_multiply_adds(sizes, [source_length]) + decoder_multiply_adds(
        manifest, source_length=source_length, num_steps=length, num_beams=rate.beam_size
    )
    return Shares(
        bandwidth=step_bytes * length * rate.num_waves / rate.wall_s / peaks.bytes_per_s,
        compute=2 * multiply_adds * num_sentences / rate.wall_s / peaks.flop_per_s,
    )
