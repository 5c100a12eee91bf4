from __future__ import annotations

import httpx
import pytest
from fake_engine import FakeEngine

LIVE = ("/livez", "/v2/health/live")
READY = ("/readyz", "/health", "/v2/health/ready")
STARTUP = ("/startupz",)


async def answers(client: httpx.AsyncClient, paths: tuple[str, ...]) -> set[tuple[int, str]]:
    return {(answer.status_code, answer.json()["status"]) for answer in [await client.get(p) for p in paths]}


async def test_readiness_follows_the_engine_and_names_what_is_amiss(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    assert await answers(client, READY) == {(200, "ok")}
    engine.alive = False
    assert await answers(client, READY) == {(503, "stuck")}
    engine.draining = True
    assert await answers(client, READY) == {(503, "draining")}
    engine.alive, engine.draining, engine.started = True, False, False
    assert await answers(client, READY) == {(503, "starting")}


async def test_startup_asks_only_whether_every_model_has_translated(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.started = False
    assert await answers(client, STARTUP) == {(503, "starting")}
    engine.started, engine.alive, engine.draining = True, False, True
    assert await answers(client, STARTUP) == {(200, "ok")}


async def test_liveness_is_that_the_loop_answers_and_nothing_else(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.started, engine.alive, engine.draining = False, False, True
    assert await answers(client, LIVE) == {(200, "ok")}


@pytest.mark.parametrize("path", [*LIVE, *READY, *STARTUP])
async def test_probes_may_ask_for_the_head_alone(
    client: httpx.AsyncClient, engine: FakeEngine, path: str
) -> None:
    answer = await client.head(path)
    assert (answer.status_code, answer.content) == (200, b"")
    engine.alive = engine.started = False
    assert (await client.head(path)).status_code == (200 if path in LIVE else 503)


@pytest.mark.parametrize("path", [*LIVE, *READY, *STARTUP])
async def test_probes_are_described_and_read_only(client: httpx.AsyncClient, path: str) -> None:
    described = (await client.get("/openapi.json")).json()["paths"][path]
    assert list(described) == ["get"]
    assert ("503" in described["get"]["responses"]) is (path not in LIVE)
    assert (await client.post(path)).status_code == 405
