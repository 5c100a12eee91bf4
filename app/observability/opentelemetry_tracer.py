"""Spans for OpenTelemetry. Imported only where tracing is on; needs the extra ``otel``.

A provider of our own and never the process-wide one, so that no library finds it and adds its own spans:
the web framework's would carry query strings and error messages, and both may hold a text.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import (
    Span,
    SpanKind,
    StatusCode,
    format_span_id,
    format_trace_id,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from app.observability.trace_context import TraceContext
from app.observability.tracing import PlainTracer, RequestTrace, TranslationFacts

_SCOPE = "dragoman"
_SERVER_ERROR = 500
_NANOSECONDS = 1_000_000_000
_HEADERS = ("traceparent", "tracestate")
_CLOSE_S = 3.0
"""Seconds granted to the last spans; where nobody listens the SDK would try for longer."""


class OpenTelemetryTracer:
    """Records a span for every request, and below it one for each stage of its translation."""

    def __init__(self, provider: TracerProvider, *, version: str) -> None:
        """Record with `provider`, which this object owns."""
        self._provider = provider
        self._tracer = provider.get_tracer(_SCOPE, version)
        self._propagator = TraceContextTextMapPropagator()
        self._plain = PlainTracer()

    @classmethod
    def to_collector(cls, *, version: str) -> OpenTelemetryTracer:
        """Send spans by OTLP over HTTP, in batches from a thread of the SDK's."""
        named = Resource.create({"service.name": _SCOPE, "service.version": version})
        # The environment has the last word: OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES.
        resource = named.merge(OTELResourceDetector().detect())
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        return cls(provider, version=version)

    def begin(self, method: str, *, headers: Mapping[str, str]) -> RequestTrace:
        """Start the request's span, below the caller's if it sent one."""
        carrier = {name: headers[name] for name in _HEADERS if name in headers}
        caller = self._propagator.extract(carrier, context=Context())
        span = self._tracer.start_span(method, context=caller, kind=SpanKind.SERVER)
        if not span.get_span_context().is_valid:
            # The SDK is switched off by its own variable: the log still wants ids.
            return self._plain.begin(method, headers=headers)
        return _SpanTrace(self, span, method)

    @property
    def resource(self) -> Mapping[str, object]:
        """What every span says of this service."""
        return self._provider.resource.attributes

    def close(self) -> None:
        """Send what is left, for some seconds at most."""
        closing = threading.Thread(target=self._provider.shutdown, name="dragoman-tracing", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)

    def record(self, parent: Span, facts: TranslationFacts) -> None:
        """Make the spans of one translation from its timestamps."""
        tracer = self._tracer
        whole = tracer.start_span(
            "translate", context=set_span_in_context(parent, Context()), start_time=facts.started_at_ns
        )
        whole.set_attribute("dragoman.pair", facts.pair)
        if facts.model:
            whole.set_attribute("dragoman.model", facts.model)
        for name, count in (facts.counts or {}).items():
            whole.set_attribute(f"dragoman.{name}", count)
        if facts.error_code:
            whole.set_attribute("error.type", facts.error_code)
            whole.set_status(StatusCode.ERROR)
        below = set_span_in_context(whole, Context())
        for stage in facts.stages:
            begin_ns, end_ns = (
                facts.started_at_ns + round(offset_s * _NANOSECONDS)
                for offset_s in (stage.start_s, stage.end_s)
            )
            tracer.start_span(stage.name, context=below, start_time=begin_ns).end(end_ns)
        whole.end(facts.ended_at_ns)


class _SpanTrace:
    """A request whose span is open."""

    def __init__(self, tracer: OpenTelemetryTracer, span: Span, method: str) -> None:
        self._tracer = tracer
        self._span = span
        self._method = method
        ids = span.get_span_context()
        self.context = TraceContext(
            format_trace_id(ids.trace_id), format_span_id(ids.span_id), sampled=ids.trace_flags.sampled
        )

    def translated(self, facts: TranslationFacts) -> None:
        """Record the translation below the request."""
        if not self._span.is_recording():
            return
        self._tracer.record(self._span, facts)
        self._span.set_attribute("dragoman.pair", facts.pair)
        if facts.error_code:
            self._span.set_attribute("error.type", facts.error_code)

    def finish(self, *, route: str, status: int) -> None:
        """End the request's span."""
        self._span.update_name(f"{self._method} {route}")
        self._span.set_attributes(
            {"http.request.method": self._method, "http.route": route, "http.response.status_code": status}
        )
        if status >= _SERVER_ERROR:
            self._span.set_status(StatusCode.ERROR)
        self._span.end()
