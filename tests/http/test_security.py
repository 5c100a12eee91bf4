import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any, get_type_hints

import httpx
import pytest
import throttled.utils
import uvicorn
from fake_engine import FakeEngine
from prometheus_client import CollectorRegistry

from app.api import ApiOptions, create_app
from app.api.authentication import AccessOptions, client_network
from app.api.engine_protocol import TranslationEngine
from app.api.quotas import Counters, metered
from app.cli.web_server import server_config
from app.errors import QueueFull
from app.keys import KeySource, Limits, NewKey, Scope, new_key
from app.observability import Metrics
from app.runtime.request import TranslationRequest
from app.settings import Settings

NATIVE: dict[str, Any] = {"texts": ["good morning"], "source": "en", "target": "pt"}
LIBRE: dict[str, Any] = {"q": "good morning", "source": "en", "target": "pt"}
MIDNIGHT_S = 20_000 * 86_400
Clock = Callable[[float], None]


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The limiting library's clocks, stopped at ten seconds before midnight UTC."""
    now = [MIDNIGHT_S - 10.0]
    monkeypatch.setattr(throttled.utils, "now_mono_f", lambda: now[0])
    monkeypatch.setattr(throttled.utils, "now_sec", lambda: int(now[0]))

    def advance(seconds: float) -> None:
        now[0] += seconds

    return advance


def limited_key(limits: Limits) -> NewKey:
    return new_key("someone", frozenset({Scope.TRANSLATE}), created_at=datetime.now(UTC), limits=limits)


@contextlib.asynccontextmanager
async def served(
    engine: FakeEngine, access: AccessOptions | None, *, address: str = "198.51.100.7", **options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    application = create_app(
        engine, ApiOptions(**options), metrics=Metrics(CollectorRegistry()), access=access
    )
    transport = httpx.ASGITransport(application, client=(address, 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
        yield client


def keyed(limits: Limits) -> tuple[AccessOptions, dict[str, str]]:
    one = limited_key(limits)
    return AccessOptions(keys=KeySource([one.key]), allow_anonymous=False), {"X-API-Key": one.text}


async def test_requests_beyond_the_rate_get_429_and_an_honest_retry_after(
    engine: FakeEngine, pass_time: Clock
) -> None:
    access, headers = keyed(Limits(requests_per_second=2))
    async with served(engine, access) as client:

        async def ask() -> httpx.Response:
            return await client.post("/v1/translate", json=NATIVE, headers=headers)

        first = await ask()
        assert first.status_code == 200
        assert first.headers["ratelimit-policy"] == '"requests";q=2;w=1'
        assert first.headers["ratelimit"] == '"requests";r=1;t=1'
        assert (await ask()).status_code == 200
        refused = await ask()
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limited")
        assert refused.json()["error"]["retryable"] is True
        assert refused.headers["retry-after"] == "1"
        assert refused.headers["ratelimit"] == '"requests";r=0;t=1'
        libre = await client.post("/translate", json=LIBRE, headers=headers)
        assert libre.status_code == 429
        assert libre.json()["error"].startswith("Slowdown: the limit is 2 requests per second")
        # Refused requests are not counted: the promised wait is enough.
        pass_time(float(refused.headers["retry-after"]))
        assert [(await ask()).status_code for _ in range(3)] == [200, 200, 429]


async def test_characters_are_counted_in_every_dialect_and_the_wait_is_just_enough(
    engine: FakeEngine, pass_time: Clock
) -> None:
    access, headers = keyed(Limits(characters_per_minute=60))
    async with served(engine, access) as client:

        async def ask(num_characters: int) -> httpx.Response:
            body = {**NATIVE, "texts": ["x" * num_characters]}
            return await client.post("/v1/translate", json=body, headers=headers)

        assert (await ask(40)).headers["ratelimit"] == '"characters";r=20;t=40'
        libre = await client.post("/translate", json={**LIBRE, "q": "x" * 10}, headers=headers)
        assert libre.headers["ratelimit"] == '"characters";r=10;t=50'
        refused = await ask(30)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "20")
        pass_time(19)
        assert (await ask(30)).status_code == 429
        pass_time(1)
        assert (await ask(30)).status_code == 200


async def test_a_request_that_could_never_fit_is_too_large_rather_than_told_to_wait(
    engine: FakeEngine, pass_time: Clock
) -> None:
    access, headers = keyed(Limits(characters_per_minute=60, characters_per_day=100))
    async with served(engine, access) as client:
        body = {**NATIVE, "texts": ["x" * 61]}
        answer = await client.post("/v1/translate", json=body, headers=headers)
        assert answer.status_code == 413
        assert "retry-after" not in answer.headers
        assert "61 characters, the limit is 60 characters per minute" in answer.json()["error"]["message"]


async def test_the_days_characters_end_and_come_back_at_midnight(
    engine: FakeEngine, pass_time: Clock
) -> None:
    access, headers = keyed(Limits(characters_per_day=24))
    async with served(engine, access) as client:

        async def ask() -> httpx.Response:
            return await client.post("/v1/translate", json=NATIVE, headers=headers)

        assert [(await ask()).status_code for _ in range(2)] == [200, 200]
        refused = await ask()
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "quota_exceeded")
        assert refused.headers["retry-after"] == "10"
        assert refused.headers["ratelimit"] == '"day";r=0;t=10'
        pass_time(10)
        assert (await ask()).status_code == 200


async def test_what_the_engine_refuses_is_not_counted_against_the_day(
    engine: FakeEngine, pass_time: Clock
) -> None:
    access, headers = keyed(Limits(characters_per_day=24))
    async with served(engine, access) as client:
        engine.fault = QueueFull("full", retry_after_s=1)
        for _ in range(5):
            await client.post("/v1/translate", json=NATIVE, headers=headers)
        engine.fault = None
        answer = await client.post("/v1/translate", json=NATIVE, headers=headers)
        assert answer.headers["ratelimit"].startswith('"day";r=12;')


async def test_nothing_is_taken_from_one_limit_when_another_refuses(
    engine: FakeEngine, pass_time: Clock
) -> None:
    access, headers = keyed(Limits(characters_per_minute=100, characters_per_day=12))
    async with served(engine, access) as client:
        for _ in range(3):
            answer = await client.post("/v1/translate", json=NATIVE, headers=headers)
        assert answer.status_code == 429
        # The library rounds down, so that one character may be missing for a moment.
        assert answer.headers["ratelimit"].startswith(('"characters";r=88;', '"characters";r=87;'))


async def test_anonymous_callers_are_limited_by_address_and_not_at_probes(
    engine: FakeEngine, pass_time: Clock
) -> None:
    access = AccessOptions(anonymous_limits=Limits(requests_per_second=1))
    application = create_app(engine, ApiOptions(), metrics=Metrics(CollectorRegistry()), access=access)

    async def statuses(address: str, path: str = "/v1/models") -> list[int]:
        transport = httpx.ASGITransport(application, client=(address, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
            spoofed = {"X-Forwarded-For": "203.0.113.9"}
            return [(await client.get(path, headers=spoofed)).status_code for _ in range(2)]

    assert await statuses("198.51.100.7") == [200, 429]
    assert await statuses("198.51.100.8") == [200, 429]
    assert await statuses("2001:db8::1") == [200, 429]
    assert await statuses("2001:db8::2") == [429, 429]
    assert await statuses("198.51.100.7", "/livez") == [200, 200]


async def test_a_key_has_its_own_limits_where_strangers_have_theirs(
    engine: FakeEngine, pass_time: Clock
) -> None:
    one = limited_key(Limits())
    access = AccessOptions(keys=KeySource([one.key]), anonymous_limits=Limits(requests_per_second=1))
    async with served(engine, access) as client:
        for _ in range(3):
            assert (await client.get("/v1/models", headers={"X-API-Key": one.text})).status_code == 200
        assert [(await client.get("/v1/models")).status_code for _ in range(2)] == [200, 429]


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("198.51.100.7", "198.51.100.7"),
        ("::ffff:198.51.100.7", "198.51.100.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("fe80::1%eth0", "fe80::"),
        ("<script>", "unknown"),
        ("", "unknown"),
    ],
)
def test_what_an_address_is_counted_under(host: str, network: str) -> None:
    assert client_network({"client": (host, 1)}) == network
    assert client_network({"client": None}) == "unknown"


def test_the_memory_for_counters_is_bounded_and_strangers_do_not_push_out_keys(pass_time: Clock) -> None:
    from app.api.authentication import Caller

    counters = Counters(max_counted=10)
    one = limited_key(Limits(requests_per_second=1))
    counters.meter(Caller("key", one.key, one.key.limits)).take_request()
    for number in range(100):
        counters.meter(Caller(f"address {number}", None, Limits(requests_per_second=1))).take_request()
    stores = (counters._of_addresses, counters._of_keys)
    assert [len(store._backend.get_client()) for store in stores] == [10, 1]


def test_every_way_to_ask_the_engine_for_a_translation_is_metered() -> None:
    engine = metered(FakeEngine())  # type: ignore[arg-type]  # only its class is looked at
    for name, member in vars(TranslationEngine).items():
        if callable(member) and TranslationRequest in get_type_hints(member).values():
            assert name in vars(type(engine)), f"{name} would translate without counting"


HARDENED = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


async def test_every_answer_is_hardened_whatever_it_is(engine: FakeEngine) -> None:
    async with served(engine, None, max_body_bytes=4096) as client:
        answers = [
            await client.post("/v1/translate", json=NATIVE),
            await client.post("/v1/translate", json={}),
            await client.post("/translate", content=b"x" * 5000),
            await client.get("/"),
            await client.get("/no-such-path"),
            await client.get("/metrics"),
            await client.get("/openapi.json"),
        ]
        engine.fault = ValueError("a fault")
        answers.append(await client.post("/v1/translate", json=NATIVE))
        page = await client.get("/docs")
    assert [answer.status_code for answer in answers] == [200, 422, 413, 307, 404, 200, 200, 500]
    for answer in (*answers, page):
        assert {name: answer.headers.get(name) for name in HARDENED} == HARDENED
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "script-src" not in policy
    assert "style-src 'unsafe-inline'" in page.headers["content-security-policy"]
    assert "style-src" not in answers[0].headers["content-security-policy"]


async def test_no_browser_origin_is_let_in_unless_it_is_configured(engine: FakeEngine) -> None:
    preflight = {
        "Origin": "https://page.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "X-API-Key",
    }
    access, _ = keyed(Limits())
    async with served(engine, access) as client:
        answer = await client.options("/v1/translate", headers=preflight)
        assert not any(name.startswith("access-control") for name in answer.headers)
    async with served(engine, access, cors_origins=("https://page.example",)) as client:
        answer = await client.options("/v1/translate", headers=preflight)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        refused = await client.post("/v1/translate", json=NATIVE, headers={"Origin": "https://page.example"})
        assert refused.status_code == 401
        # So that the page's script can read why.
        assert refused.headers["access-control-allow-origin"] == "https://page.example"
        other = await client.options("/v1/translate", headers={**preflight, "Origin": "https://evil.example"})
        assert other.status_code == 400


EVIL = "<script>alert(1)</script>"


async def test_nothing_a_stranger_sends_comes_back_as_markup_or_in_a_redirect(engine: FakeEngine) -> None:
    headers = {
        "Host": "evil.example",
        "X-Forwarded-Host": "evil.example",
        "X-Forwarded-Prefix": "//evil.example",
    }
    async with served(engine, None) as client:
        answers = [
            await client.get("/", headers=headers),
            await client.get("//evil.example/%2e%2e", headers=headers),
            await client.get(f"/{EVIL}", headers=headers),
            await client.get("/docs", params={"q": EVIL}, headers=headers),
            await client.get("/openapi.json", headers=headers),
            await client.request(EVIL.replace("/", ""), "/translate", headers=headers),
            await client.post("/translate", json={**LIBRE, "source": EVIL}, headers=headers),
            await client.post("/translate", data={**LIBRE, "target": EVIL, EVIL: EVIL}, headers=headers),
            await client.post("/v1/translate", json={**NATIVE, "target": EVIL, EVIL: 1}, headers=headers),
            await client.post("/v1/translate", content=EVIL, headers={**headers, "Content-Type": EVIL}),
            await client.get("/livez", headers={**headers, "X-Request-ID": EVIL}),
        ]
    for answer in answers:
        shown = answer.text + json.dumps(list(answer.headers.items()))
        assert "<script" not in shown
        assert "alert(1)" not in shown
        assert "evil.example" not in shown
        if answer.headers.get("content-type", "").startswith("text/html"):
            assert str(answer.request.url).startswith("http://service/docs")
    assert answers[0].headers["location"] == "docs"


@contextlib.asynccontextmanager
async def listening(engine: FakeEngine, access: AccessOptions, settings: Settings) -> AsyncIterator[int]:
    """The application behind the real server, configured as `dragoman serve` does."""
    application = create_app(engine, ApiOptions(), metrics=Metrics(CollectorRegistry()), access=access)
    server = uvicorn.Server(server_config(application, settings))
    with socket.create_server(("127.0.0.1", 0)) as bound:
        task = asyncio.create_task(server._serve([bound]))
        try:
            async with asyncio.timeout(30):
                while not server.started:  # noqa: ASYNC110  # the server has no event for it
                    await asyncio.sleep(0)
            yield bound.getsockname()[1]
        finally:
            server.should_exit = True
            await task


async def test_a_head_beyond_the_limit_is_refused_by_the_server_itself(engine: FakeEngine) -> None:
    async with listening(engine, AccessOptions(), Settings()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 40_000)
        answer = await reader.read(12)
        writer.close()
    assert answer == b"HTTP/1.1 400"


@pytest.mark.parametrize(("proxies", "statuses"), [("", [200, 429]), ("127.0.0.0/8", [200, 200])])
async def test_forwarded_addresses_count_only_from_trusted_proxies(
    engine: FakeEngine, pass_time: Clock, monkeypatch: pytest.MonkeyPatch, proxies: str, statuses: list[int]
) -> None:
    # The server's own variable must not open what the setting closes.
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    access = AccessOptions(anonymous_limits=Limits(requests_per_second=1))
    async with (
        listening(engine, access, Settings(trusted_proxies=proxies)) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
    ):
        answers = [
            await client.get("/v1/models", headers={"X-Forwarded-For": f"6.6.6.6, 203.0.113.{number}"})
            for number in range(2)
        ]
        assert [answer.status_code for answer in answers] == statuses
        # What the client itself wrote stands to the left of what the proxy added, and is not believed.
        same = await client.get("/v1/models", headers={"X-Forwarded-For": "7.7.7.7, 203.0.113.1"})
        assert same.status_code == 429
