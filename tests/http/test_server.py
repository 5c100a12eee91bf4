import asyncio
import io
import json
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.types import Message

from app.api import ApiOptions, create_app
from app.bundle import default_directory, discover
from app.errors import DragomanError, QueueFull
from app.observability import Metrics, configure_logging

GOOD: dict[str, Any] = {"texts": ["good morning"], "source": "en", "target": "pt"}
WAIT_S = 10


class Caller:
    """A raw ASGI client whose disconnect is under the test's control."""

    def __init__(self, application: FastAPI, path: str, body: bytes, headers: dict[str, str]) -> None:
        self.application = application
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        self.incoming: asyncio.Queue[Message] = asyncio.Queue()
        self.incoming.put_nowait({"type": "http.request", "body": body, "more_body": False})
        self.sent: list[Message] = []

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    def start(self) -> asyncio.Task[None]:
        return asyncio.create_task(self._run())

    async def _run(self) -> None:
        await self.application(self.scope, self.incoming.get, self.send)


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/translate", GOOD), ("/translate", {"q": "a", "source": "en", "target": "pt"})]
)
async def test_a_client_that_leaves_cancels_its_work(
    application: FastAPI, engine: FakeEngine, path: str, body: dict[str, object]
) -> None:
    engine.gate.clear()
    caller = Caller(application, path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    call = caller.start()
    async with asyncio.timeout(WAIT_S):
        await engine.entered.wait()
        assert not engine.cancelled.is_set()
        caller.incoming.put_nowait({"type": "http.disconnect"})
        await engine.cancelled.wait()
        await call
    assert engine.num_running_requests == 0
    assert caller.sent[0]["status"] == 499


async def test_a_request_cancelled_from_above_cancels_its_work(
    application: FastAPI, engine: FakeEngine
) -> None:
    engine.gate.clear()
    caller = Caller(
        application, "/v1/translate", json.dumps(GOOD).encode(), {"Content-Type": "application/json"}
    )
    call = caller.start()
    async with asyncio.timeout(WAIT_S):
        await engine.entered.wait()
        call.cancel()
        await engine.cancelled.wait()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_a_client_that_leaves_while_it_sends_is_no_fault(
    application: FastAPI, engine: FakeEngine
) -> None:
    caller = Caller(application, "/v1/translate", b"", {"Content-Type": "application/json"})
    caller.incoming.get_nowait()
    caller.incoming.put_nowait({"type": "http.request", "body": b'{"te', "more_body": True})
    caller.incoming.put_nowait({"type": "http.disconnect"})
    async with asyncio.timeout(WAIT_S):
        await caller.start()
    assert caller.sent[0]["status"] == 499
    assert engine.requests == []


async def test_a_request_waits_for_its_engine_and_is_answered(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.gate.clear()
    call = asyncio.create_task(client.post("/v1/translate", json=GOOD))
    async with asyncio.timeout(WAIT_S):
        await engine.entered.wait()
        engine.gate.set()
        assert (await call).status_code == 200
    assert not engine.cancelled.is_set()


@pytest.mark.parametrize("path", ["/v1/translate", "/translate"])
async def test_a_body_over_the_limit_is_refused_declared_or_chunked(
    client: httpx.AsyncClient, engine: FakeEngine, path: str
) -> None:
    body = json.dumps({**GOOD, "q": "x" * 4096}).encode()
    headers = {"Content-Type": "application/json"}

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 1000):
            yield body[start : start + 1000]

    for content in (body, chunks()):
        response = await client.post(path, content=content, headers=headers)
        assert response.status_code == 413
        assert "4096" in response.text
        assert isinstance(response.json()["error"], dict if path.startswith("/v1") else str)
        assert "x-request-id" in response.headers
    assert engine.requests == []


async def test_a_body_of_exactly_the_limit_is_read(client: httpx.AsyncClient) -> None:
    body = json.dumps(GOOD).encode().ljust(4096)
    response = await client.post("/v1/translate", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 200


@pytest.mark.parametrize("length", ["9" * 400, "99999"])
async def test_absurd_content_lengths_are_refused(application: FastAPI, length: str) -> None:
    caller = Caller(application, "/translate", b"{}", {"Content-Length": length})
    await caller.start()
    assert caller.sent[0]["status"] == 413


async def test_a_sane_request_id_is_kept_and_another_is_replaced(client: httpx.AsyncClient) -> None:
    response = await client.get("/livez", headers={"X-Request-ID": "order-7.a_b"})
    assert response.headers["x-request-id"] == "order-7.a_b"
    made = set()
    for bad in ("", "x" * 65, "a b", 'a"b', "é".encode()):
        response = await client.get("/livez", headers=[("X-Request-ID", bad)])
        made.add(response.headers["x-request-id"])
        assert len(response.headers["x-request-id"]) == 16
    assert len(made) == 5


async def test_an_unexpected_error_shows_its_id_and_logs_its_place_but_no_text(
    client: httpx.AsyncClient, engine: FakeEngine, json_logs: io.StringIO
) -> None:
    secret = "my secret diary"
    for path, body in (("/v1/translate", {**GOOD, "texts": [secret]}), ("/translate", {**GOOD, "q": secret})):
        engine.fault = ValueError(f"cannot translate {secret}")
        response = await client.post(path, json=body, headers={"X-Request-ID": "id-1"})
        assert response.status_code == 500
        assert "id-1" in response.text
        assert "secret" not in response.text
        log = json_logs.getvalue()
        assert "secret" not in log
        lines = [json.loads(line) for line in log.splitlines()]
        failed = next(line for line in lines if line["event"] == "request_failed")
        assert failed["request_id"] == "id-1"
        assert failed["traceback"][0] == "builtins.ValueError"
        assert any("in translate" in frame for frame in failed["traceback"])


async def test_one_access_line_per_request_without_query_or_text(
    client: httpx.AsyncClient, json_logs: io.StringIO
) -> None:
    await client.post("/translate?q=secret&source=en&target=pt")
    await client.get("/secret/path?q=secret")
    await client.get("/livez")
    log = json_logs.getvalue()
    assert "secret" not in log
    lines = [json.loads(line) for line in log.splitlines()]
    assert [(line["method"], line["route"], line["status"]) for line in lines] == [
        ("POST", "/translate", 200),
        ("GET", "unmatched", 404),
    ]
    assert lines[0]["response_bytes"] == len('{"translatedText":"SECRET"}')
    assert lines[0]["duration_ms"] >= 0
    assert lines[0]["request_id"]


@pytest.fixture
def json_logs() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    stream = io.StringIO()
    configure_logging("json", "info", stream=stream)
    logging.getLogger("httpx").setLevel("WARNING")
    yield stream
    root.handlers[:] = before
    root.setLevel(level)
    logging.getLogger("httpx").setLevel("NOTSET")


async def test_no_telemetry_leaves_the_service_whatever_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # The framework's own export would carry query strings; if it tried to start, it would log its failure.
    monkeypatch.setenv("FASTAPI_OTEL_AUTO_CONFIGURE", "true")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "not an address")
    application = create_app(FakeEngine(), ApiOptions(), metrics=Metrics(CollectorRegistry()))
    sent: list[Message] = []
    received = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])

    async def receive() -> Message:
        return next(received)

    async def send(message: Message) -> None:
        sent.append(message)

    await application({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, receive, send)
    assert [message["type"] for message in sent] == [
        "lifespan.startup.complete",
        "lifespan.shutdown.complete",
    ]
    assert [record.getMessage() for record in caplog.records] == []


async def test_metrics_count_by_route_template_and_code(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    await client.post("/v1/translate", json=GOOD)
    await client.post("/v1/translate", json={})
    await client.get("/secret-path")
    await client.request("BREW", "/translate")
    engine.num_running_requests = 3
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    text = response.text
    for labels in (
        'code="200",method="POST",route="/v1/translate"',
        'code="422",method="POST",route="/v1/translate"',
        'code="404",method="GET",route="unmatched"',
        'code="405",method="OTHER",route="/translate"',
    ):
        assert f"dragoman_http_request_seconds_count{{{labels}}} 1.0" in text
    assert "dragoman_http_requests_in_flight 1.0" in text
    assert "dragoman_waiting_tokens 21.0" in text
    assert "dragoman_running_requests 3.0" in text
    assert "secret" not in text
    assert "BREW" not in text


async def test_the_lifespan_starts_the_engine_and_stops_it_unless_drained() -> None:
    for drained in (False, True):
        engine = FakeEngine()
        application = create_app(engine, ApiOptions(drain_s=3), metrics=Metrics(CollectorRegistry()))
        async with application.router.lifespan_context(application):
            assert engine.was_started
            engine.draining = drained
        assert engine.stopped_with == ([] if drained else [3])


async def test_every_reference_of_the_openapi_document_resolves(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]

    def references(node: object) -> list[str]:
        if isinstance(node, dict):
            own = [node["$ref"]] if "$ref" in node else []
            return own + [found for value in node.values() for found in references(value)]
        return [found for value in node for found in references(value)] if isinstance(node, list) else []

    found = references(document)
    assert "#/components/schemas/TranslateBody" in found
    for reference in found:
        assert reference.rpartition("/")[2] in schemas
    native = document["paths"]["/v1/translate"]["post"]
    assert {"200", "400", "413", "415", "422", "429", "500", "503"} <= set(native["responses"])
    assert schemas["TranslateBody"]["example"]


async def test_the_docs_page_shows_every_path_and_loads_nothing(client: httpx.AsyncClient) -> None:
    page = (await client.get("/docs")).text
    for path in ("/v1/translate", "/v1/models", "/translate", "/languages", "/livez", "/readyz", "/metrics"):
        assert f"<code>{path}</code>" in page
    assert "max_target_ratio" in page
    for outside in ("http://", "https://", "<script", "src="):
        assert outside not in page


def every_error_class() -> set[type[DragomanError]]:
    found: set[type[DragomanError]] = set()
    waiting: list[type[DragomanError]] = [DragomanError]
    while waiting:
        error = waiting.pop()
        if error.__module__ in ("app.errors", "app.api.errors"):
            found.add(error)
        waiting += error.__subclasses__()
    return found


async def test_every_error_code_is_listed_with_its_statuses(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    listed = {code["code"]: code for code in document["x-error-codes"]}
    assert len(listed) == len(document["x-error-codes"])
    classes = {error.code: error for error in every_error_class()}
    assert set(listed) == {*classes, "not_found", "method_not_allowed"}
    page = (await client.get("/docs")).text
    for code, facts in listed.items():
        assert f"<tr><td><code>{code}</code><td>{facts['status']}<td>" in page
        assert facts["meaning"].endswith(".")


@pytest.mark.parametrize("error", sorted(every_error_class(), key=lambda error: error.code))
async def test_the_listed_statuses_are_those_of_the_answers(
    client: httpx.AsyncClient, engine: FakeEngine, error: type[DragomanError]
) -> None:
    document = (await client.get("/openapi.json")).json()
    (facts,) = [code for code in document["x-error-codes"] if code["code"] == error.code]
    engine.fault = (
        error("reason", retry_after_s=3) if issubclass(error, QueueFull) else error("reason")  # type: ignore[call-arg]
    )
    answer = await client.post("/v1/translate", json=GOOD)
    assert (answer.status_code, answer.json()["error"]["code"]) == (facts["status"], error.code)
    assert answer.json()["error"]["retryable"] is facts["retryable"]
    assert ("retry-after" in answer.headers) is facts["retryable"]
    answer = await client.post("/translate", json={"q": "a", "source": "en", "target": "pt"})
    assert answer.status_code == facts["libretranslate_status"]


async def test_the_docs_page_shows_both_error_bodies_and_the_codes_of_each_answer(
    client: httpx.AsyncClient,
) -> None:
    page = (await client.get("/docs")).text
    assert "error.retryable" in page
    assert "unsupported_pair&quot;" in page
    assert "{\n  &quot;error&quot;: &quot;xx is not supported" in page
    native, _, libretranslate = page.partition("<code>/translate</code>")
    assert "<code>invalid_option, invalid_request, unsupported_pair</code>" in native
    assert "<code>queue_full, quota_exceeded, rate_limited</code>" in native
    assert "<b>400</b> A field is missing or wrong" in libretranslate
    assert "invalid_request" in libretranslate.partition("<b>413</b>")[0]


async def test_the_examples_name_a_model_as_the_shipped_ones_are_named(client: httpx.AsyncClient) -> None:
    ids = {bundle.manifest.id for bundle in discover(default_directory())}
    assert "dragoman-en-pt" in ids
    assert "&quot;model&quot;: &quot;dragoman-en-pt&quot;" in (await client.get("/docs")).text


async def test_the_root_leads_to_the_docs(client: httpx.AsyncClient) -> None:
    answer = await client.get("/")
    assert answer.status_code == 307
    assert str(answer.next_request and answer.next_request.url) == "http://service/docs"


async def test_no_real_route_is_counted_as_unmatched(application: FastAPI, client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    paths = {*document["paths"], "/", "/docs", "/openapi.json"}
    assert len(paths) >= 11
    for path in paths:
        await client.get(path)
    # Refused before any route is found.
    await client.post("/translate", content=b"x" * 5000)
    text = (await client.get("/metrics")).text
    counted = [line for line in text.splitlines() if line.startswith("dragoman_http_request_seconds_count")]
    for path in paths:
        assert any(f'route="{path}"' in line for line in counted)
    assert not any("unmatched" in line for line in counted)
    assert any('code="413"' in line and 'route="/translate"' in line for line in counted)
    await client.get("/translate/secret")
    assert 'code="404",method="GET",route="unmatched"' in (await client.get("/metrics")).text


async def test_a_method_nobody_knows_is_not_written_to_the_log(
    client: httpx.AsyncClient, json_logs: io.StringIO
) -> None:
    await client.request("SECRETTEXT", "/translate")
    assert "SECRETTEXT" not in json_logs.getvalue()
    assert [json.loads(line)["method"] for line in json_logs.getvalue().splitlines()] == ["OTHER"]


@pytest.mark.parametrize("path", ["/translate/", "/v1/translate/", "/livez/"])
async def test_a_slash_too_many_is_not_found_rather_than_redirected_with_its_query(
    client: httpx.AsyncClient, path: str
) -> None:
    response = await client.get(path, params={"q": "secret"})
    assert response.status_code == 404
    assert "location" not in response.headers
    assert "secret" not in response.text
