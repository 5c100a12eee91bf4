"""POST /v1/reload: who may ask for it, what it answers, and that every dialect follows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from prometheus_client import CollectorRegistry

from app.api import ApiOptions, create_app
from app.api.authentication import AccessOptions
from app.api.error_codes import error_codes
from app.api.reload import ReloadAnswer
from app.errors import (
    BundleCorrupt,
    BundleNotFound,
    BundleUnsupported,
    DragomanError,
    ReloadFailed,
    ReloadInProgress,
    ShuttingDown,
)
from app.keys import KeySource, Scope, new_key
from app.observability import Metrics
from app.runtime.reload import BundleChange, Change, ReloadReport
from app.runtime.request import PairInfo

PATH = "/v1/reload"
NOW = datetime.now(UTC)
TRANSLATOR = new_key("someone", frozenset({Scope.TRANSLATE}), created_at=NOW)
ADMIN = new_key("ops", frozenset({Scope.ADMIN}), created_at=NOW)
KEYS = KeySource([TRANSLATOR.key, ADMIN.key])
REPORT = ReloadReport(
    (
        BundleChange("en-de", Change.REMOVED),
        BundleChange("en-pt", Change.LOADED, 0.5),
        BundleChange("pt-en", Change.UNCHANGED),
    ),
    0.75,
)


class FakeReload:
    """Counts its calls; answers with a report or a fault."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.fault: DragomanError | None = None

    async def __call__(self) -> ReloadReport:
        self.num_calls += 1
        if self.fault is not None:
            raise self.fault
        return REPORT


@pytest.fixture
def reload() -> FakeReload:
    return FakeReload()


def served(
    engine: FakeEngine,
    reload: FakeReload | None,
    access: AccessOptions | None = None,
    *,
    client: tuple[str, int] = ("127.0.0.1", 50_000),
    root_path: str = "",
) -> AbstractAsyncContextManager[httpx.AsyncClient]:
    @asynccontextmanager
    async def serving() -> AsyncIterator[httpx.AsyncClient]:
        app = create_app(
            engine, ApiOptions(), metrics=Metrics(CollectorRegistry()), access=access, reload=reload
        )
        transport = httpx.ASGITransport(app, client=client, root_path=root_path)
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as asking:
            yield asking

    return serving()


async def test_the_answer_says_what_became_of_every_bundle(engine: FakeEngine, reload: FakeReload) -> None:
    async with served(engine, reload) as client:
        answer = await client.post(PATH)
    assert answer.status_code == 200
    assert answer.json() == {
        "bundles": [
            {"id": "en-de", "change": "removed", "seconds": 0.0},
            {"id": "en-pt", "change": "loaded", "seconds": 0.5},
            {"id": "pt-en", "change": "unchanged", "seconds": 0.0},
        ],
        "seconds": 0.75,
    }
    ReloadAnswer.model_validate(answer.json(), strict=True)


@pytest.mark.parametrize(
    ("fault", "status", "retryable"),
    [
        (ReloadInProgress("another reload is running"), 409, True),
        (BundleCorrupt("/models/en-pt/weights.bin is missing"), 500, False),
        (BundleNotFound("no bundle lies in /models"), 500, False),
        (BundleUnsupported("bundle en-pt cannot translate"), 500, False),
        (ReloadFailed("bundle /models/en-pt could not be loaded: there is too little memory"), 500, False),
        (ShuttingDown("the service is stopping"), 503, True),
    ],
)
async def test_a_reload_that_fails_is_answered_with_its_name_and_its_bundle(
    engine: FakeEngine, reload: FakeReload, fault: DragomanError, status: int, retryable: bool
) -> None:
    reload.fault = fault
    async with served(engine, reload) as client:
        answer = await client.post(PATH)
        described = (await client.get("/openapi.json")).json()["paths"][PATH]["post"]["responses"]
    assert answer.status_code == status
    assert answer.json() == {"error": {"code": fault.code, "message": fault.message, "retryable": retryable}}
    assert ("retry-after" in answer.headers) == retryable
    assert str(status) in described
    assert (fault.code, status) in {(code.code, code.status) for code in error_codes()}


async def test_with_keys_it_needs_the_scope_admin_wherever_the_caller_is(
    engine: FakeEngine, reload: FakeReload
) -> None:
    for allow_anonymous in (False, True):
        access = AccessOptions(keys=KEYS, allow_anonymous=allow_anonymous)
        async with served(engine, reload, access) as client:
            for headers in ({}, {"X-API-Key": TRANSLATOR.text}, {"X-API-Key": "wrong"}):
                answer = await client.post(PATH, headers=headers)
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "access_denied")
        assert reload.num_calls == 0
    elsewhere = served(engine, reload, access, client=("203.0.113.9", 50_000))
    async with elsewhere as client:
        headers = {"X-API-Key": ADMIN.text, "Origin": "https://ops.example"}
        assert (await client.post(PATH, headers=headers)).status_code == 200
    assert reload.num_calls == 1


async def test_below_a_servers_root_path_it_needs_the_scope_too(
    engine: FakeEngine, reload: FakeReload
) -> None:
    access = AccessOptions(keys=KEYS, allow_anonymous=True)
    async with served(engine, reload, access, root_path="/prefix") as client:
        assert (await client.post(f"/prefix{PATH}")).status_code in (401, 403)
        headers = {"X-API-Key": ADMIN.text}
        assert (await client.post(f"/prefix{PATH}", headers=headers)).status_code == 200


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.9.10", "::1", "::ffff:127.0.0.1"])
async def test_without_keys_the_own_machine_may_ask(
    engine: FakeEngine, reload: FakeReload, address: str
) -> None:
    async with served(engine, reload, client=(address, 50_000)) as client:
        assert (await client.post(PATH)).status_code == 200


@pytest.mark.parametrize(
    ("address", "headers"),
    [
        ("203.0.113.9", {}),
        ("10.0.0.1", {}),
        ("::ffff:10.0.0.1", {}),
        ("2001:db8::1", {}),
        ("", {}),
        ("localhost", {}),
        # A page in a browser on this machine, and what a proxy on this machine hands on.
        ("127.0.0.1", {"Origin": "https://page.example"}),
        ("127.0.0.1", {"Origin": "null"}),
        ("127.0.0.1", {"X-Forwarded-For": "203.0.113.9"}),
        ("127.0.0.1", {"X-Forwarded-For": "127.0.0.1"}),
        ("127.0.0.1", {"Forwarded": "for=203.0.113.9"}),
        ("127.0.0.1", {"X-Real-IP": "203.0.113.9"}),
        ("127.0.0.1", {"Via": "1.1 proxy"}),
    ],
)
async def test_without_keys_nobody_else_may(
    engine: FakeEngine, reload: FakeReload, address: str, headers: dict[str, str]
) -> None:
    async with served(engine, reload, client=(address, 50_000)) as client:
        answer = await client.post(PATH, headers=headers)
        assert answer.status_code == 401
        assert "its own machine" in answer.json()["error"]["message"]
        body = {"texts": ["good morning"], "source": "en", "target": "pt"}
        assert (await client.post("/v1/translate", json=body, headers=headers)).status_code == 200
    assert reload.num_calls == 0


async def test_it_takes_no_options_and_no_other_method(engine: FakeEngine, reload: FakeReload) -> None:
    async with served(engine, reload) as client:
        answer = await client.post(PATH, json={"force": True})
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "invalid_request")
        for method in ("GET", "HEAD", "PUT", "DELETE"):
            answer = await client.request(method, PATH)
            assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert reload.num_calls == 0


async def test_a_service_without_bundles_of_its_own_has_no_such_route(engine: FakeEngine) -> None:
    async with served(engine, None) as client:
        assert (await client.post(PATH)).status_code == 404
        assert PATH not in (await client.get("/openapi.json")).json()["paths"]


async def test_every_route_and_the_metrics_follow_the_pairs(engine: FakeEngine, reload: FakeReload) -> None:
    async with served(engine, reload) as client:

        async def said() -> tuple[Any, ...]:
            languages = (await client.get("/languages")).json()
            models = (await client.get("/v1/models")).json()["models"]
            loaded = (await client.get("/metrics")).text
            return (
                [(entry["code"], entry["targets"]) for entry in languages],
                [model["id"] for model in models],
                [line for line in loaded.splitlines() if line.startswith("dragoman_model_loaded{")],
            )

        async def statuses(target: str) -> list[int]:
            native = {"texts": ["good morning"], "source": "en", "target": target}
            libre = {"q": "good morning", "source": "en", "target": target}
            return [
                (await client.post("/v1/translate", json=native)).status_code,
                (await client.post("/translate", json=libre)).status_code,
            ]

        languages, models, metrics = await said()
        assert (languages, models) == ([("en", ["pt"]), ("pt", ["en"])], ["en-pt", "pt-en"])
        assert len(metrics) == 2
        assert (await statuses("pt"), await statuses("DE")) == ([200, 200], [422, 400])
        engine.pairs = (PairInfo("en", "de", "en-de"),)
        languages, models, metrics = await said()
        assert (languages, models) == ([("de", []), ("en", ["de"])], ["en-de"])
        assert metrics == ['dragoman_model_loaded{model="en-de",pair="en-de"} 1.0']
        assert (await statuses("pt"), await statuses("DE")) == ([422, 400], [200, 200])


async def test_readiness_stays_green_while_a_reload_runs(engine: FakeEngine) -> None:
    gate, entered = asyncio.Event(), asyncio.Event()

    async def slow() -> ReloadReport:
        entered.set()
        await gate.wait()
        return REPORT

    async with served(engine, slow) as client:  # type: ignore[arg-type]
        running = asyncio.create_task(client.post(PATH))
        await entered.wait()
        assert (await client.get("/readyz")).status_code == 200
        gate.set()
        assert (await running).status_code == 200
