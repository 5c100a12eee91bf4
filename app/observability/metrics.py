"""Prometheus metrics of the runtime and of the web layer. Labels are bounded and carry no user data."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

from app.runtime.events import AdmissionEvent, StepEvent

_SECONDS = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_REQUEST_SECONDS = (*_SECONDS[3:], 30.0, 60.0)
_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 128, 256)
_RATIOS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """The service's metrics; a `RuntimeObserver`. Thread-safe, as the Prometheus client is.

    Args:
        registry: where the metrics live; one registry per service, never the process-wide default.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register every metric."""
        self._registry = registry
        model = ("model",)
        self._queue = Histogram(
            "dragoman_queue_seconds",
            "Seconds a segment waited for its row",
            model,
            buckets=_SECONDS,
            registry=registry,
        )
        self._encoder = Histogram(
            "dragoman_encoder_seconds",
            "Seconds of an encoder pass over newcomers",
            model,
            buckets=_SECONDS,
            registry=registry,
        )
        self._step = Histogram(
            "dragoman_step_seconds",
            "Seconds of a decoder step, token choice included",
            model,
            buckets=_SECONDS,
            registry=registry,
        )
        self._rows = Histogram(
            "dragoman_step_rows",
            "Segments that took a decoder step together",
            model,
            buckets=_ROWS,
            registry=registry,
        )
        self._padding = Histogram(
            "dragoman_step_padding_ratio",
            "Share of a step's source positions that are padding",
            model,
            buckets=_RATIOS,
            registry=registry,
        )
        self._encoder_padding = Histogram(
            "dragoman_encoder_padding_ratio",
            "Share of an encoder pass's source positions that are padding",
            model,
            buckets=_RATIOS,
            registry=registry,
        )
        self._source_tokens = Counter(
            "dragoman_source_tokens", "Source tokens encoded", model, registry=registry
        )
        self._target_tokens = Counter(
            "dragoman_target_tokens", "Target tokens decoded", model, registry=registry
        )
        self._segment_tokens = Histogram(
            "dragoman_segment_target_tokens",
            "Target tokens of a segment",
            model,
            buckets=_TOKENS,
            registry=registry,
        )
        self._finished = Counter(
            "dragoman_segments_finished",
            "Segments translated, by why decoding ended",
            ("model", "reason"),
            registry=registry,
        )
        self._cancelled = Counter(
            "dragoman_segments_cancelled",
            "Segments that left because their client did",
            model,
            registry=registry,
        )
        self._failed = Counter(
            "dragoman_segments_failed",
            "Segments answered with an error, by its class",
            ("model", "error"),
            registry=registry,
        )
        self._requests = Histogram(
            "dragoman_http_request_seconds",
            "Seconds of an HTTP request, by route template and status code",
            ("method", "route", "code"),
            buckets=_REQUEST_SECONDS,
            registry=registry,
        )
        self._in_flight = Gauge(
            "dragoman_http_requests_in_flight", "HTTP requests being answered", registry=registry
        )
        self._waiting = Gauge(
            "dragoman_waiting_tokens", "Source tokens accepted and not yet finished", registry=registry
        )
        self._running = Gauge(
            "dragoman_running_requests", "Translation requests in the engine", registry=registry
        )
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)

    def watch_engine(self, *, waiting_tokens: Callable[[], int], running_requests: Callable[[], int]) -> None:
        """Read the engine's gauges whenever the metrics are scraped."""
        self._waiting.set_function(waiting_tokens)
        self._running.set_function(running_requests)

    def on_admission(self, event: AdmissionEvent) -> None:
        """Newcomers were encoded."""
        queue = self._queue.labels(event.model)
        for seconds in event.queue_s:
            queue.observe(seconds)
        self._encoder.labels(event.model).observe(event.duration_s)
        self._source_tokens.labels(event.model).inc(event.num_source_tokens)
        if event.num_padded_tokens > 0:
            self._encoder_padding.labels(event.model).observe(
                1 - event.num_source_tokens / event.num_padded_tokens
            )

    def on_step(self, event: StepEvent) -> None:
        """Rows took a step."""
        self._step.labels(event.model).observe(event.duration_s)
        self._rows.labels(event.model).observe(event.num_rows)
        positions = event.num_rows * event.source_length
        if positions > 0:
            self._padding.labels(event.model).observe(1 - event.num_source_tokens / positions)

    def on_finished(self, model: str, *, num_target_tokens: int, finish_reason: str) -> None:
        """A segment finished."""
        self._target_tokens.labels(model).inc(num_target_tokens)
        self._segment_tokens.labels(model).observe(num_target_tokens)
        self._finished.labels(model, str(finish_reason)).inc()

    def on_cancelled(self, model: str, *, num_segments: int) -> None:
        """Cancelled segments left."""
        self._cancelled.labels(model).inc(num_segments)

    def on_failure(self, model: str, *, num_segments: int, error: Exception) -> None:
        """A graph call raised; only the error's class becomes a label."""
        self._failed.labels(model, type(error).__name__).inc(num_segments)

    def request_started(self) -> None:
        """An HTTP request arrived."""
        self._in_flight.inc()

    def request_finished(self, method: str, *, route: str, status: int, duration_s: float) -> None:
        """An HTTP request was answered.

        Args:
            method: HTTP method; unusual ones are counted as ``OTHER``, so that labels stay bounded.
            route: the route's template, never the path asked for.
            status: the answer's status code.
            duration_s: from the first byte to the last.
        """
        self._in_flight.dec()
        self._requests.labels(method_label(method), route, str(status)).observe(duration_s)

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


def method_label(method: str) -> str:
    """An HTTP method as metrics and logs show it; ``OTHER`` for one that a client may have made up."""
    return method if method in _METHODS else "OTHER"
