"""Prometheus metrics of the runtime and of the web layer. Labels are bounded and carry no user data.

The families themselves are registered in `app.observability.families`; docs/metrics.md explains each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from app.observability.families import DecodingFamilies, RequestFamilies, StateFamilies
from app.runtime.events import AdmissionEvent, StepEvent
from app.runtime.request import PairInfo

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
NO_PAIR = "none"
"""The pair of a request that has none, or was refused before its pair was known."""


@dataclass(frozen=True)
class DeviceMemory:
    """A GPU's memory at the moment of a scrape.

    Attributes:
        device: its name, ``cuda:0``.
        used_bytes: in use, by whichever process.
        total_bytes: what it has.
        held_bytes: what this service holds there for weights and row slots.
    """

    device: str
    used_bytes: int
    total_bytes: int
    held_bytes: int


class Metrics:
    """The service's metrics; a `RuntimeObserver` and a `CacheObserver`. Thread-safe, as the client is.

    Args:
        registry: where the metrics live; one registry per service, never the process-wide default.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register every metric."""
        self._registry = registry
        self._decoding = DecodingFamilies(registry)
        self._requests = RequestFamilies(registry)
        self._state = StateFamilies(registry)
        self._heartbeat_ages: Callable[[], Sequence[float]] = tuple
        self._pairs: Callable[[], Iterable[PairInfo]] = tuple
        self._variant = ""
        self._devices: tuple[str, ...] = ()
        self._device_memory: Callable[[], Iterable[DeviceMemory]] = tuple
        self._num_lines_dropped: Callable[[], int] = int
        self._num_lines_dropped_before = 0

    def watch_engine(self, *, waiting_tokens: Callable[[], int], running_requests: Callable[[], int]) -> None:
        """Read the engine's gauges whenever the metrics are scraped."""
        self._state.waiting.set_function(waiting_tokens)
        self._state.running.set_function(running_requests)

    def watch_state(
        self,
        *,
        draining: Callable[[], bool],
        healthy: Callable[[], bool],
        pairs: Callable[[], Iterable[PairInfo]],
    ) -> None:
        """Read whether the service is well and what it serves whenever the metrics are scraped."""
        self._state.draining.set_function(draining)
        self._state.healthy.set_function(healthy)
        self._pairs = pairs

    def watch_workers(
        self, *, heartbeat_ages_s: Callable[[], Sequence[float]], started: Callable[[], bool]
    ) -> None:
        """Read each worker's heartbeat age, and whether all have translated, when metrics are scraped."""
        self._heartbeat_ages = heartbeat_ages_s
        self._state.started.set_function(started)

    def watch_log(self, *, num_lines_dropped: Callable[[], int]) -> None:
        """Read how many lines the log has lost whenever the metrics are scraped."""
        self._num_lines_dropped = num_lines_dropped

    def watch_devices(
        self, *, variant: str, devices: Sequence[str], memory: Callable[[], Iterable[DeviceMemory]]
    ) -> None:
        """State where the models run, and read the memory of GPUs whenever the metrics are scraped."""
        self._variant, self._devices, self._device_memory = variant, tuple(devices), memory

    def set_limits(self, *, max_waiting_tokens: int) -> None:
        """State the limits that gauges are judged against."""
        self._state.max_waiting.set(max_waiting_tokens)

    def on_admission(self, event: AdmissionEvent) -> None:
        """Newcomers were encoded."""
        queue = self._decoding.queue.labels(event.model)
        for seconds in event.queue_s:
            queue.observe(seconds)
        self._decoding.encoder.labels(event.model).observe(event.duration_s)
        self._decoding.source_tokens.labels(event.model).inc(event.num_source_tokens)
        if event.num_padded_tokens > 0:
            self._decoding.encoder_padding.labels(event.model).observe(
                1 - event.num_source_tokens / event.num_padded_tokens
            )

    def on_step(self, event: StepEvent) -> None:
        """Rows took a step."""
        self._decoding.step.labels(event.model).observe(event.duration_s)
        self._decoding.rows.labels(event.model).observe(event.num_rows)
        positions = event.num_rows * event.source_length
        if positions > 0:
            self._decoding.padding.labels(event.model).observe(1 - event.num_source_tokens / positions)

    def on_finished(self, model: str, *, num_target_tokens: int, finish_reason: str) -> None:
        """A segment finished."""
        self._decoding.target_tokens.labels(model).inc(num_target_tokens)
        self._decoding.segment_tokens.labels(model).observe(num_target_tokens)
        self._decoding.finished.labels(model, str(finish_reason)).inc()

    def on_cancelled(self, model: str, *, num_segments: int) -> None:
        """Cancelled segments left."""
        self._decoding.cancelled.labels(model).inc(num_segments)

    def on_expired(self, model: str, *, num_segments: int) -> None:
        """Segments left because their deadline passed."""
        self._decoding.expired.labels(model).inc(num_segments)

    def on_failure(self, model: str, *, num_segments: int, error: Exception) -> None:
        """A graph call raised; only the error's class becomes a label."""
        self._decoding.failed.labels(model, type(error).__name__).inc(num_segments)

    def on_cache_lookup(self, model: str, result: str) -> None:
        """A segment was looked up in the translation cache: ``hit``, ``miss`` or ``joined``.

        Raises:
            KeyError: there is no such result.
        """
        family = {
            "hit": self._state.cache_hits,
            "miss": self._state.cache_misses,
            "joined": self._state.cache_joined,
        }[result]
        family.labels(model).inc()

    def on_cache_size(self, *, num_bytes: int, num_entries: int) -> None:
        """The translation cache holds so much from now on."""
        self._state.cache_bytes.set(num_bytes)
        self._state.cache_entries.set(num_entries)

    def on_reload(self, outcome: str) -> None:
        """The bundles were to be loaded anew, and that ended: changed, unchanged, failed or refused."""
        self._state.reloads.labels(outcome).inc()

    def request_started(self) -> None:
        """An HTTP request arrived."""
        self._requests.in_flight.inc()

    def request_finished(self, method: str, *, route: str, status: int, duration_s: float) -> None:
        """An HTTP request was answered.

        Args:
            method: HTTP method; unusual ones are counted as ``OTHER``, so that labels stay bounded.
            route: the route's template, never the path asked for.
            status: the answer's status code.
            duration_s: from the first byte to the last.
        """
        self._requests.in_flight.dec()
        self._requests.http_seconds.labels(method_label(method), route, str(status)).observe(duration_s)

    def pair_answered(self, pair: str, *, route: str, status: int) -> None:
        """An HTTP request was answered.

        Args:
            pair: ``en-pt`` for a served pair, else `NO_PAIR`; never a language a client made up.
            route: the route's template.
            status: the answer's status code.
        """
        self._requests.requests.labels(route, pair, str(status)).inc()

    def request_failed(self, pair: str, *, error_code: str) -> None:
        """The engine raised instead of translating.

        Args:
            pair: as in `pair_answered`.
            error_code: the stable code of a `DragomanError`, or ``internal``.
        """
        self._requests.errors.labels(pair, error_code).inc()

    def first_row(self, pair: str, *, seconds: float) -> None:
        """A request's first segment got its row so long after the request came."""
        self._requests.first_row.labels(pair).observe(seconds)

    def warned(self, model: str, warning: str) -> None:
        """A translation carries a warning of this code."""
        self._requests.warnings.labels(model, warning).inc()

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        # Anew each time, so that a model or a worker that is gone does not stay behind.
        self._state.heartbeat_age.clear()
        for worker, age_s in enumerate(self._heartbeat_ages()):
            self._state.heartbeat_age.labels(str(worker)).set(age_s)
        self._state.model_loaded.clear()
        for pair in self._pairs():
            self._state.model_loaded.labels(pair.model, f"{pair.source}-{pair.target}").set(1)
        self._state.model_device.clear()
        for model in {pair.model for pair in self._pairs()}:
            for device in self._devices:
                self._state.model_device.labels(model, self._variant, device).set(1)
        gauges = (self._state.gpu_memory_used, self._state.gpu_memory_total, self._state.gpu_memory_held)
        for gauge in gauges:
            gauge.clear()
        for memory in self._device_memory():
            values = (memory.used_bytes, memory.total_bytes, memory.held_bytes)
            for gauge, value in zip(gauges, values, strict=True):
                gauge.labels(memory.device).set(value)
        before, self._num_lines_dropped_before = self._num_lines_dropped_before, self._num_lines_dropped()
        self._state.log_lines_dropped.inc(self._num_lines_dropped_before - before)
        return generate_latest(self._registry)


def method_label(method: str) -> str:
    """An HTTP method as metrics and logs show it; ``OTHER`` for one that a client may have made up."""
    return method if method in _METHODS else "OTHER"
