"""A service that asks for keys, and requests made of junk."""

import functools
from typing import Any

from example_keys import LOCKED
from fake_engine import FakeEngine
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from app.api import ApiOptions, create_app
from app.observability import Metrics

JUNK = st.text(st.characters(min_codepoint=0x20, max_codepoint=0xFF, exclude_characters="\x7f"), max_size=60)
NAMES = st.sampled_from(
    [
        "Authorization",
        "X-API-Key",
        "Content-Type",
        "Content-Length",
        "X-Forwarded-For",
        "Host",
        "Cookie",
        "Range",
    ]
)
PATHS = st.sampled_from(
    [
        "/v1/translate",
        "/translate",
        "/v1/models",
        "/metrics",
        "/v2/translate",
        "/admin",
        "/detect",
        "//v1/translate",
    ]
)
TYPES = st.sampled_from(
    ["", "application/json", "application/x-www-form-urlencoded", "multipart/form-data; boundary=b", "a/b"]
)
PIECES = st.sampled_from(
    [
        "api_key",
        "=",
        "&",
        '"',
        "{",
        "}",
        ":",
        "[",
        "--b",
        "\r\n",
        "\r\n\r\n",
        "%",
        "%61",
        "\\ud800",
        "name=",
        "q",
        "é",
    ]
)


@functools.cache
def closed_service() -> tuple[FakeEngine, FastAPI]:
    engine = FakeEngine()
    options = ApiOptions(max_body_bytes=4096)
    return engine, create_app(engine, options, metrics=Metrics(CollectorRegistry()), access=LOCKED)


BODIES = st.one_of(st.binary(max_size=200), st.lists(PIECES, max_size=30).map("".join).map(str.encode))


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "OPTIONS"]),
    path=PATHS,
    query=st.one_of(st.binary(max_size=60), st.just(b"api_key=%C3%28"), st.just(b"api_key=" + b"x" * 99)),
    headers=st.lists(st.tuples(NAMES, st.one_of(JUNK, JUNK.map("Bearer ".__add__))), max_size=4),
    content_type=TYPES,
    body=BODIES,
)
async def test_no_junk_gets_in_and_none_makes_a_fault(
    method: str, path: str, query: bytes, headers: list[tuple[str, str]], content_type: str, body: bytes
) -> None:
    engine, application = closed_service()
    sent: list[Any] = []
    messages: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return messages.pop() if messages else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers]
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": query,
        "root_path": "",
        "scheme": "http",
        "http_version": "1.1",
        "headers": [(b"content-type", content_type.encode()), *raw],
        "client": ("198.51.100.7", 1),
        "server": ("127.0.0.1", 80),
    }
    await application(scope, receive, send)
    status = sent[0]["status"]
    assert status in (401, 403, 413), status
    assert engine.requests == []
