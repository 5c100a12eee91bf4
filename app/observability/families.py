"""Every metric family of the service, registered. docs/metrics.md explains each one.

Labels are bounded and say nothing of a user: bundle ids, routes of ours, status codes, pairs that are served.
"""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)

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
_REQUEST_SECONDS = (*_SECONDS[3:], 30.0, 60.0)
_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 128, 256)
_RATIOS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_MODEL = ("model",)


class DecodingFamilies:
    """What the worker threads do, by bundle id."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register in `registry`."""
        self.queue = Histogram(
            "dragoman_queue_seconds",
            "Seconds a segment waited for its row",
            _MODEL,
            buckets=_SECONDS,
            registry=registry,
        )
        self.encoder = Histogram(
            "dragoman_encoder_seconds",
            "Seconds of an encoder pass over newcomers",
            _MODEL,
            buckets=_SECONDS,
            registry=registry,
        )
        self.step = Histogram(
            "dragoman_step_seconds",
            "Seconds of a decoder step, token choice included",
            _MODEL,
            buckets=_SECONDS,
            registry=registry,
        )
        self.rows = Histogram(
            "dragoman_step_rows",
            "Rows that took a decoder step together: segments times beams",
            _MODEL,
            buckets=_ROWS,
            registry=registry,
        )
        self.padding = Histogram(
            "dragoman_step_padding_ratio",
            "Share of a step's source positions that are padding",
            _MODEL,
            buckets=_RATIOS,
            registry=registry,
        )
        self.encoder_padding = Histogram(
            "dragoman_encoder_padding_ratio",
            "Share of an encoder pass's source positions that are padding",
            _MODEL,
            buckets=_RATIOS,
            registry=registry,
        )
        self.source_tokens = Counter(
            "dragoman_source_tokens", "Source tokens encoded", _MODEL, registry=registry
        )
        self.target_tokens = Counter(
            "dragoman_target_tokens", "Target tokens decoded", _MODEL, registry=registry
        )
        self.segment_tokens = Histogram(
            "dragoman_segment_target_tokens",
            "Target tokens of a segment",
            _MODEL,
            buckets=_TOKENS,
            registry=registry,
        )
        self.finished = Counter(
            "dragoman_segments_finished",
            "Segments translated, by why decoding ended",
            ("model", "reason"),
            registry=registry,
        )
        self.cancelled = Counter(
            "dragoman_segments_cancelled",
            "Segments that left because their client did",
            _MODEL,
            registry=registry,
        )
        self.expired = Counter(
            "dragoman_segments_expired",
            "Segments that left because their request's deadline passed",
            _MODEL,
            registry=registry,
        )
        self.failed = Counter(
            "dragoman_segments_failed",
            "Segments answered with an error, by its class",
            ("model", "error"),
            registry=registry,
        )


class RequestFamilies:
    """What clients ask for and get."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register in `registry`."""
        self.http_seconds = Histogram(
            "dragoman_http_request_seconds",
            "Seconds of an HTTP request, by route template and status code",
            ("method", "route", "code"),
            buckets=_REQUEST_SECONDS,
            registry=registry,
        )
        self.in_flight = Gauge(
            "dragoman_http_requests_in_flight", "HTTP requests being answered", registry=registry
        )
        self.requests = Counter(
            "dragoman_requests",
            "HTTP requests answered, by route template, language pair and status code",
            ("route", "pair", "code"),
            registry=registry,
        )
        self.errors = Counter(
            "dragoman_request_errors",
            "Translation requests that the engine did not translate, by error code",
            ("pair", "error"),
            registry=registry,
        )
        self.first_row = Histogram(
            "dragoman_first_row_seconds",
            "Seconds from a request's arrival at the engine to when the first of its segments got a row",
            ("pair",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.warnings = Counter(
            "dragoman_translation_warnings",
            "Warnings that translations carried: wrapped, cut off, unknown characters and so on",
            ("model", "warning"),
            registry=registry,
        )


class StateFamilies:
    """What the service is like at the moment of a scrape."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register in `registry`."""
        self.waiting = Gauge(
            "dragoman_waiting_tokens", "Source tokens accepted and not yet finished", registry=registry
        )
        self.max_waiting = Gauge(
            "dragoman_max_waiting_tokens", "Waiting tokens beyond which requests get 429", registry=registry
        )
        self.running = Gauge(
            "dragoman_running_requests", "Translation requests in the engine", registry=registry
        )
        self.draining = Gauge(
            "dragoman_draining", "1 while the service refuses new work because it stops", registry=registry
        )
        self.healthy = Gauge(
            "dragoman_healthy", "1 while every worker lives and gave a recent sign of life", registry=registry
        )
        self.started = Gauge(
            "dragoman_started",
            "1 once every worker has shown that it can translate with every model",
            registry=registry,
        )
        self.heartbeat_age = Gauge(
            "dragoman_worker_heartbeat_age_seconds",
            "Seconds since a busy worker's loop last turned; 0 while it is idle",
            ("worker",),
            registry=registry,
        )
        self.model_loaded = Gauge(
            "dragoman_model_loaded",
            "1 for each language pair that is served, by bundle id",
            ("model", "pair"),
            registry=registry,
        )
        self.cache_hits = Counter(
            "dragoman_cache_hits", "Segments answered from the translation cache", _MODEL, registry=registry
        )
        self.cache_misses = Counter(
            "dragoman_cache_misses",
            "Segments looked up in the translation cache and not found",
            _MODEL,
            registry=registry,
        )
        self.cache_joined = Counter(
            "dragoman_cache_joined",
            "Segments that shared the decoding of an equal one under way",
            _MODEL,
            registry=registry,
        )
        self.cache_bytes = Gauge(
            "dragoman_cache_bytes", "Bytes held by the translation cache", registry=registry
        )
        self.cache_entries = Gauge(
            "dragoman_cache_entries", "Segments in the translation cache", registry=registry
        )
        self.reloads = Counter(
            "dragoman_reloads",
            "Times that the bundles were to be loaded anew, by how that ended",
            ("outcome",),
            registry=registry,
        )
        for outcome in ("changed", "unchanged", "failed", "refused"):
            self.reloads.labels(outcome)  # else its series would begin at 1, and no alert see the first one
        self.log_lines_dropped = Counter(
            "dragoman_log_lines_dropped",
            "Lines of the log that were not written, since whoever reads it is too slow or its disk is full",
            registry=registry,
        )
        self.model_device = Gauge(
            "dragoman_model_device",
            "1 for each device that a model runs on, by bundle id and variant",
            ("model", "variant", "device"),
            registry=registry,
        )
        self.gpu_memory_used = Gauge(
            "dragoman_gpu_memory_used_bytes",
            "Memory of a GPU in use, by anybody",
            ("device",),
            registry=registry,
        )
        self.gpu_memory_total = Gauge(
            "dragoman_gpu_memory_total_bytes", "Memory that a GPU has", ("device",), registry=registry
        )
        self.gpu_memory_held = Gauge(
            "dragoman_gpu_memory_held_bytes",
            "Memory of a GPU that this service holds for weights and row slots",
            ("device",),
            registry=registry,
        )
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
