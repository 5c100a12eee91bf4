import asyncio
import json

import httpx
import pytest
from fake_engine import FakeEngine
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.types import Message

from app.api import ApiOptions, create_app
from app.api.body_limits import Drain
from app.observability import Metrics

WAIT_S = 10
PATHS = pytest.mark.parametrize("path", ["/translate", "/v1/translate"])


class Answer:
    """What an application sent to one raw request whose body never ends."""

    def __init__(self) -> None:
        self.waits = asyncio.Event()
        self.messages: list[Message] = []

    async def receive(self) -> Message:
        if not self.waits.is_set():
            self.waits.set()
            return {"type": "http.request", "body": b'{"q', "more_body": True}
        await asyncio.Event().wait()
        raise AssertionError("an event nobody sets was set")

    async def send(self, message: Message) -> None:
        self.messages.append(message)

    async def to(self, app: FastAPI, path: str) -> None:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        await app(scope, self.receive, self.send)

    @property
    def status(self) -> int:
        status: int = self.messages[0]["status"]
        return status

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.messages[0]["headers"]}

    def error(self, path: str) -> str:
        error = json.loads(self.messages[1]["body"])["error"]
        assert isinstance(error, dict if path.startswith("/v1") else str)
        return error["code"] if isinstance(error, dict) else error


@PATHS
async def test_a_body_that_takes_too_long_is_answered_408_and_the_connection_closed(path: str) -> None:
    app = create_app(FakeEngine(), ApiOptions(body_timeout_s=0.01), metrics=Metrics(CollectorRegistry()))
    answer = Answer()
    async with asyncio.timeout(WAIT_S):
        await answer.to(app, path)
    assert answer.status == 408
    assert answer.headers["connection"] == "close"
    assert "0.01 s" in answer.error(path) or answer.error(path) == "body_timeout"


@PATHS
async def test_a_body_not_complete_when_the_drain_begins_is_answered_503_at_once(path: str) -> None:
    drain = Drain()
    engine = FakeEngine()
    app = create_app(engine, ApiOptions(), metrics=Metrics(CollectorRegistry()), drain=drain)
    before, after = Answer(), Answer()
    async with asyncio.timeout(WAIT_S):
        call = asyncio.create_task(before.to(app, path))
        await before.waits.wait()
        drain.begin()
        drain.begin()
        await call
        await after.to(app, path)
    assert not after.waits.is_set(), "a body was read that would be refused"
    for answer in (before, after):
        assert answer.status == 503
        assert answer.headers["retry-after"] == "1"
        assert "stopping" in answer.error(path) or answer.error(path) == "shutting_down"
    assert engine.requests == []


async def test_a_complete_body_has_no_deadline_and_its_work_outlives_the_begin_of_the_drain() -> None:
    drain = Drain()
    engine = FakeEngine()
    app = create_app(
        engine, ApiOptions(body_timeout_s=0.01), metrics=Metrics(CollectorRegistry()), drain=drain
    )
    engine.gate.clear()
    async with (
        asyncio.timeout(WAIT_S),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service") as client,
    ):
        body = {"q": "a", "source": "en", "target": "pt"}
        call = asyncio.create_task(client.post("/translate", json=body))
        await engine.entered.wait()
        drain.begin()
        late = asyncio.create_task(asyncio.sleep(0.05))
        done, _ = await asyncio.wait({call, late}, return_when=asyncio.FIRST_COMPLETED)
        assert done == {late}
        engine.gate.set()
        assert (await call).json() == {"translatedText": "A"}


async def test_readiness_answers_while_the_service_drains() -> None:
    drain = Drain()
    engine = FakeEngine()
    app = create_app(engine, ApiOptions(), metrics=Metrics(CollectorRegistry()), drain=drain)
    drain.begin()
    engine.begin_drain()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service") as client:
        assert (await client.get("/readyz")).json() == {"status": "draining"}
        assert (await client.get("/livez")).status_code == 200
