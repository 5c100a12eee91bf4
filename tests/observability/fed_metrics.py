"""Metrics of a service that has seen a bit of everything, for tests that need every series to exist."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from app.observability import NO_PAIR, Metrics
from app.observability.metrics import DeviceMemory
from app.runtime.events import AdmissionEvent, StepEvent
from app.runtime.request import PairInfo

MODEL = "dragoman-en-pt"


def fed_metrics() -> Metrics:
    """Metrics after one of each event."""
    metrics = Metrics(CollectorRegistry())
    metrics.set_limits(max_waiting_tokens=131_072)
    metrics.watch_engine(waiting_tokens=lambda: 640, running_requests=lambda: 3)
    metrics.watch_state(
        draining=lambda: False,
        healthy=lambda: True,
        pairs=lambda: (PairInfo("en", "pt", MODEL), PairInfo("pt", "en", "dragoman-pt-en")),
    )
    metrics.watch_workers(heartbeat_ages_s=lambda: (0.0, 0.002), started=lambda: True)
    metrics.watch_devices(
        variant="cuda-fp16",
        devices=["cuda:0"],
        memory=lambda: [DeviceMemory("cuda:0", used_bytes=3 << 30, total_bytes=80 << 30, held_bytes=2 << 30)],
    )
    feed(metrics)
    return metrics


def feed(metrics: Metrics) -> None:
    """One of each event."""
    metrics.request_started()
    metrics.on_admission(
        AdmissionEvent(MODEL, (0.001, 0.003), num_source_tokens=30, num_padded_tokens=64, duration_s=0.004)
    )
    metrics.on_step(StepEvent(MODEL, num_rows=2, source_length=32, num_source_tokens=30, duration_s=0.0015))
    metrics.on_finished(MODEL, num_target_tokens=18, finish_reason="eos")
    metrics.on_finished(MODEL, num_target_tokens=90, finish_reason="length")
    metrics.on_cancelled(MODEL, num_segments=1)
    metrics.on_expired(MODEL, num_segments=1)
    metrics.on_failure(MODEL, num_segments=1, error=ValueError("secret"))
    for result in ("hit", "miss", "joined"):
        metrics.on_cache_lookup(MODEL, result)
    metrics.on_cache_size(num_bytes=4096, num_entries=2)
    metrics.on_reload("failed")
    metrics.first_row("en-pt", seconds=0.002)
    metrics.warned(MODEL, "segment_wrapped")
    metrics.warned(MODEL, "target_truncated")
    for pair, status, seconds in (("en-pt", 200, 0.03), (NO_PAIR, 422, 0.001), ("en-pt", 503, 0.2)):
        metrics.request_started()
        metrics.request_finished("POST", route="/v1/translate", status=status, duration_s=seconds)
        metrics.pair_answered(pair, route="/v1/translate", status=status)
    metrics.request_failed("en-pt", error_code="worker_failed")
    metrics.request_failed("en-pt", error_code="deadline_exceeded")
    metrics.request_failed("en-pt", error_code="queue_full")
