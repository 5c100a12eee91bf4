"""Spans of OpenTelemetry, recorded in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from prometheus_client import CollectorRegistry
from told_engine import ToldEngine

from app.api import ApiOptions, create_app
from app.errors import WorkerFailed
from app.observability import Metrics
from app.observability.trace_context import parse_traceparent

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed")

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, Sampler
from opentelemetry.trace import SpanKind, StatusCode

from app.observability.opentelemetry_tracer import OpenTelemetryTracer

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SECRET = "a secret sentence"


def tracer_into(exporter: InMemorySpanExporter, sampler: Sampler | None = None) -> OpenTelemetryTracer:
    provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return OpenTelemetryTracer(provider, version="1")


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def engine() -> ToldEngine:
    return ToldEngine()


@pytest.fixture
def tracer(exporter: InMemorySpanExporter) -> Iterator[OpenTelemetryTracer]:
    tracer = tracer_into(exporter)
    yield tracer
    tracer.close()


@pytest.fixture
async def client(engine: ToldEngine, tracer: OpenTelemetryTracer) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(engine, ApiOptions(), metrics=Metrics(CollectorRegistry()), tracer=tracer)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service") as client:
        yield client


async def translate(client: httpx.AsyncClient, headers: dict[str, str] | None = None) -> httpx.Response:
    body = {"texts": [SECRET, SECRET], "source": "en", "target": "pt"}
    return await client.post("/v1/translate", json=body, headers=headers)


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    spans = exporter.get_finished_spans()
    named = {span.name: span for span in spans}
    assert len(named) == len(spans)
    return named


def parent_id(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def own_id(span: ReadableSpan) -> int:
    assert span.context is not None
    return span.context.span_id


async def test_a_request_becomes_spans_below_its_callers(
    client: httpx.AsyncClient, exporter: InMemorySpanExporter
) -> None:
    response = await translate(client, {"traceparent": f"00-{TRACE}-{SPAN}-01"})
    spans = by_name(exporter)
    request, whole = spans["POST /v1/translate"], spans["translate"]
    assert {f"{span.context.trace_id:032x}" for span in spans.values() if span.context} == {TRACE}
    assert parent_id(request) == int(SPAN, 16)
    assert request.kind is SpanKind.SERVER
    assert parent_id(whole) == own_id(request)
    assert parse_traceparent(response.headers["traceresponse"]) is not None
    assert response.headers["traceresponse"].split("-")[2] == f"{own_id(request):016x}"
    assert dict(request.attributes or {}) == {
        "http.request.method": "POST",
        "http.route": "/v1/translate",
        "http.response.status_code": 200,
        "dragoman.pair": "en-pt",
    }
    assert dict(whole.attributes or {}) == {
        "dragoman.pair": "en-pt",
        "dragoman.model": "told",
        "dragoman.num_texts": 2,
        "dragoman.num_segments": 2,
        "dragoman.num_source_tokens": 6,
        "dragoman.num_target_tokens": 8,
    }


async def test_stages_lie_where_the_engines_timestamps_say(
    client: httpx.AsyncClient, exporter: InMemorySpanExporter
) -> None:
    await translate(client)
    spans = by_name(exporter)
    whole = spans["translate"]
    offsets = {}
    for name in spans.keys() - {"translate", "POST /v1/translate"}:
        stage = spans[name]
        assert parent_id(stage) == own_id(whole)
        assert None not in (stage.start_time, stage.end_time, whole.start_time)
        offsets[name] = [(moment - whole.start_time) / 1e9 for moment in (stage.start_time, stage.end_time)]
    assert offsets == {
        "prepare": [0.0, 0.0625],
        "queue": [0.0625, 0.1875],
        "encode": [0.125, 0.25],
        "decode": [0.25, 0.5],
        "detokenise": [0.5, 0.75],
    }


async def test_no_text_and_no_message_is_in_any_span(
    client: httpx.AsyncClient, engine: ToldEngine, exporter: InMemorySpanExporter
) -> None:
    await translate(client)
    engine.fault = WorkerFailed(SECRET)
    assert (await translate(client)).status_code == 503
    engine.fault = RuntimeError(SECRET)
    assert (await translate(client)).status_code == 500
    await client.get(f"/{SECRET}?q={SECRET}")
    spans = exporter.get_finished_spans()
    assert len(spans) == 7 + 2 + 2 + 1
    assert "secret" not in " ".join(span.to_json() for span in spans)


async def test_a_failure_is_named_by_its_code(
    client: httpx.AsyncClient, engine: ToldEngine, exporter: InMemorySpanExporter
) -> None:
    engine.fault = WorkerFailed("try again")
    await translate(client)
    spans = by_name(exporter)
    assert set(spans) == {"translate", "POST /v1/translate"}
    for span in spans.values():
        assert span.status.status_code is StatusCode.ERROR
        assert (span.attributes or {})["error.type"] == "worker_failed"


async def test_a_request_that_is_not_sampled_still_has_ids(
    engine: ToldEngine, exporter: InMemorySpanExporter
) -> None:
    tracer = tracer_into(exporter, ParentBased(ALWAYS_OFF))
    app = create_app(engine, ApiOptions(), metrics=Metrics(CollectorRegistry()), tracer=tracer)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service") as client:
        response = await translate(client)
        context = parse_traceparent(response.headers["traceresponse"])
        assert context is not None
        assert not context.sampled
        assert exporter.get_finished_spans() == ()
        await translate(client, {"traceparent": f"00-{TRACE}-{SPAN}-01"})
        assert len(exporter.get_finished_spans()) == 7
    tracer.close()


async def test_the_sdks_own_switch_leaves_ids_in_place(
    engine: ToldEngine, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    tracer = tracer_into(exporter)
    app = create_app(engine, ApiOptions(), metrics=Metrics(CollectorRegistry()), tracer=tracer)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service") as client:
        response = await translate(client)
    assert parse_traceparent(response.headers["traceresponse"]) is not None
    assert exporter.get_finished_spans() == ()


def test_the_process_wide_provider_is_left_alone(tracer: OpenTelemetryTracer) -> None:
    """The web framework would use it, and its spans carry query strings and messages."""
    assert tracer is not None
    assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


def test_the_service_is_named_unless_the_environment_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, expected in ((None, "dragoman"), ("translations", "translations")):
        if given is not None:
            monkeypatch.setenv("OTEL_SERVICE_NAME", given)
        tracer = OpenTelemetryTracer.to_collector(version="7")
        assert tracer.resource["service.name"] == expected
        assert tracer.resource["service.version"] == "7"
        tracer.close()
