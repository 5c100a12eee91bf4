"""Trace ids on log lines and answers, and requests by pair: whatever the tracer."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from prometheus_client import CollectorRegistry
from told_engine import ToldEngine

from app.api import ApiOptions, create_app
from app.errors import SettingsError, WorkerFailed
from app.observability import Metrics, configure_logging
from app.observability.trace_context import parse_traceparent
from app.observability.tracer_choice import open_tracer
from app.observability.tracing import PlainTracer

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SECRET = "a secret sentence"


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def engine() -> ToldEngine:
    return ToldEngine()


@pytest.fixture
async def client(engine: ToldEngine, registry: CollectorRegistry) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(engine, ApiOptions(), metrics=Metrics(registry))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service") as client:
        yield client


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    stream = io.StringIO()
    configure_logging("json", "info", stream=stream)
    yield stream
    root.handlers[:] = before
    root.setLevel(level)


async def translate(
    client: httpx.AsyncClient, *, target: str = "pt", headers: dict[str, str] | None = None
) -> httpx.Response:
    body = {"texts": [SECRET, SECRET], "source": "en", "target": target}
    return await client.post("/v1/translate", json=body, headers=headers)


async def test_a_callers_trace_goes_on_in_the_log_and_in_the_answer(
    client: httpx.AsyncClient, log: io.StringIO
) -> None:
    response = await translate(client, headers={"traceparent": f"00-{TRACE}-{SPAN}-01"})
    answered = parse_traceparent(response.headers["traceresponse"])
    assert answered is not None
    assert answered.trace_id == TRACE
    assert answered.span_id != SPAN
    [line] = [json.loads(line) for line in log.getvalue().splitlines() if '"request"' in line]
    assert (line["trace_id"], line["span_id"]) == (TRACE, answered.span_id)
    assert line["request_id"] == response.headers["x-request-id"]


@pytest.mark.parametrize(
    "headers", [{}, {"traceparent": "nonsense"}, {"traceparent": f"00-{TRACE}-{SPAN}-0x"}]
)
async def test_every_other_request_begins_a_trace_of_its_own(
    client: httpx.AsyncClient, headers: dict[str, str]
) -> None:
    contexts = [
        parse_traceparent((await translate(client, headers=headers)).headers["traceresponse"])
        for _ in range(2)
    ]
    assert None not in contexts
    assert len({context.trace_id for context in contexts if context is not None} | {TRACE}) == 3


async def test_lines_about_failures_carry_the_trace_too(
    client: httpx.AsyncClient, engine: ToldEngine, log: io.StringIO
) -> None:
    engine.fault = RuntimeError(SECRET)
    response = await translate(client, headers={"traceparent": f"00-{TRACE}-{SPAN}-00"})
    assert response.status_code == 500
    lines = [json.loads(line) for line in log.getvalue().splitlines() if "dragoman.http" in line]
    assert {line["event"] for line in lines} == {"request_failed", "request"}
    assert {line["trace_id"] for line in lines} == {TRACE}
    assert SECRET not in log.getvalue()


async def test_requests_are_counted_by_the_pair_they_asked_for(
    client: httpx.AsyncClient, registry: CollectorRegistry
) -> None:
    assert (await translate(client)).status_code == 200
    assert (await translate(client, target="xx")).status_code == 422
    assert (
        await client.post("/translate", data={"q": SECRET, "source": "en", "target": "pt"})
    ).status_code == 200
    await client.get("/livez")
    await client.get(f"/{SECRET}")

    def count(route: str, pair: str, code: str) -> float | None:
        return registry.get_sample_value(
            "dragoman_requests_total", {"route": route, "pair": pair, "code": code}
        )

    assert count("/v1/translate", "en-pt", "200") == 1
    assert count("/v1/translate", "none", "422") == 1
    assert count("/translate", "en-pt", "200") == 1
    assert count("/livez", "none", "200") == 1
    assert count("unmatched", "none", "404") == 1
    exposition = (await client.get("/metrics")).text
    assert "xx" not in exposition
    assert "secret" not in exposition


async def test_what_the_engine_refuses_is_counted_by_error_code(
    client: httpx.AsyncClient, engine: ToldEngine, registry: CollectorRegistry
) -> None:
    engine.fault = WorkerFailed("try again")
    assert (await translate(client)).status_code == 503
    engine.fault = RuntimeError(SECRET)
    assert (await translate(client)).status_code == 500
    for code in ("worker_failed", "internal"):
        labels = {"pair": "en-pt", "error": code}
        assert registry.get_sample_value("dragoman_request_errors_total", labels) == 1


async def test_warnings_of_translations_are_counted_by_code(
    client: httpx.AsyncClient, registry: CollectorRegistry
) -> None:
    await translate(client)
    labels = {"model": "told", "warning": "segment_wrapped"}
    assert registry.get_sample_value("dragoman_translation_warnings_total", labels) == 2


def test_a_tracer_that_is_off_needs_no_library() -> None:
    assert isinstance(open_tracer(enabled=False, version="1"), PlainTracer)
    program = (
        "import sys, app.observability.tracer_choice as t; t.open_tracer(enabled=False, version='1');"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_tracing_without_its_library_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "app.observability.opentelemetry_tracer", raising=False)
    # None in this table makes an import fail as if the package were not there.
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(SettingsError, match=r"dragoman\[otel\]"):
        open_tracer(enabled=True, version="1")
