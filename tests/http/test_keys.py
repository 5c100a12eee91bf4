import io
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from example_keys import ADMIN, EXPIRED, GOOD, LOCKED, REVOKED, made, source_of
from fake_engine import FakeEngine
from prometheus_client import CollectorRegistry

from app.api import ApiOptions, create_app
from app.api.authentication import OPEN_PATHS, AccessOptions
from app.keys import KeyFile, KeySource, NewKey
from app.observability import Metrics, configure_logging

NATIVE: dict[str, Any] = {"texts": ["good morning"], "source": "en", "target": "pt"}
LIBRE: dict[str, Any] = {"q": "good morning", "source": "en", "target": "pt"}
Serve = Callable[[AccessOptions], AbstractAsyncContextManager[httpx.AsyncClient]]


def served(
    engine: FakeEngine, access: AccessOptions, **options: Any
) -> AbstractAsyncContextManager[httpx.AsyncClient]:
    @asynccontextmanager
    async def serving() -> AsyncIterator[httpx.AsyncClient]:
        application = create_app(
            engine,
            ApiOptions(max_body_bytes=4096, **options),
            metrics=Metrics(CollectorRegistry()),
            access=access,
        )
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(application), base_url="http://service"
        ) as client:
            yield client

    return serving()


@pytest.fixture
async def locked(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with served(engine, LOCKED) as client:
        yield client


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": f"Bearer {GOOD.text}"},
        {"Authorization": f"bearer   {GOOD.text} "},
        {"Authorization": f"DeepL-Auth-Key {GOOD.text}"},
        {"X-API-Key": GOOD.text},
        {"Authorization": "Basic dXNlcjpwYXNz", "X-API-Key": GOOD.text},
    ],
)
@pytest.mark.parametrize(("path", "body"), [("/v1/translate", NATIVE), ("/translate", LIBRE)])
async def test_a_key_in_a_header_opens_every_dialect(
    locked: httpx.AsyncClient, path: str, body: dict[str, Any], headers: dict[str, str]
) -> None:
    assert (await locked.post(path, json=body, headers=headers)).status_code == 200


async def test_libretranslate_takes_its_key_from_json_form_multipart_and_query(
    locked: httpx.AsyncClient,
) -> None:
    fields = {**LIBRE, "api_key": GOOD.text}
    parts: dict[str, Any] = {name: (None, value) for name, value in fields.items()}
    answers = [
        await locked.post("/translate", json=fields),
        await locked.post("/translate", data=fields),
        await locked.post("/translate", files=parts),
        await locked.post("/translate", params=fields),
        await locked.post("/translate", params={"api_key": GOOD.text, "q": "é"}, data=LIBRE),
    ]
    assert [answer.status_code for answer in answers] == [200] * 5
    assert answers[0].json() == {"translatedText": "GOOD MORNING"}


async def test_the_native_dialect_reads_no_key_from_its_body(locked: httpx.AsyncClient) -> None:
    assert (await locked.post("/v1/translate", json={**NATIVE, "api_key": GOOD.text})).status_code == 401


async def every_refusal(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[httpx.Response]:
    texts = [EXPIRED.text, REVOKED.text, ADMIN.text, GOOD.text[:-1], GOOD.text + "x", GOOD.key.id, "x" * 9000]
    return [
        await client.post(path, json=body),
        *[await client.post(path, json=body, headers={"Authorization": f"Bearer {text}"}) for text in texts],
        *[await client.post(path, json=body, headers={"X-API-Key": text}) for text in texts],
    ]


async def test_every_refusal_reads_the_same_whatever_was_wrong(
    locked: httpx.AsyncClient, engine: FakeEngine
) -> None:
    native = await every_refusal(locked, "/v1/translate", NATIVE)
    assert {answer.status_code for answer in native} == {401}
    assert {answer.headers["www-authenticate"] for answer in native} == {'Bearer realm="dragoman"'}
    assert len({answer.content for answer in native}) == 1
    assert native[0].json()["error"]["code"] == "access_denied"
    libre = await every_refusal(locked, "/translate", LIBRE)
    libre += [
        await locked.post("/translate", json={**LIBRE, "api_key": value})
        for value in (EXPIRED.text, "", None, 7, [GOOD.text], {"": 1})
    ]
    json_type = {"Content-Type": "application/json"}
    half = b'{"q": "a", "source": "en", "target": "pt", "api_key": "\\ud800"}'
    libre.append(await locked.post("/translate", content=half, headers=json_type))
    assert {answer.status_code for answer in libre} == {403}
    assert len({answer.content for answer in libre}) == 1
    assert list(libre[0].json()) == ["error"]
    assert engine.requests == []


async def test_every_refusal_hashes_and_compares_once(
    locked: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    from app.keys import ring

    compared: list[int] = []
    compare = ring.hmac.compare_digest

    def counting(left: bytes, right: bytes) -> bool:
        compared.append(len(left))
        return compare(left, right)

    monkeypatch.setattr(ring.hmac, "compare_digest", counting)
    refusals = await every_refusal(locked, "/v1/translate", NATIVE)
    assert compared == [32] * len(refusals)


async def test_probes_docs_and_the_list_of_languages_stay_open(locked: httpx.AsyncClient) -> None:
    for path in OPEN_PATHS - {"/frontend/settings"}:
        assert (await locked.get(path)).status_code in (200, 307), path
    assert (await locked.head("/livez")).status_code == 200


async def test_every_other_route_is_closed_unless_somebody_opens_it(engine: FakeEngine) -> None:
    application = create_app(engine, ApiOptions(), metrics=Metrics(CollectorRegistry()), access=LOCKED)
    paths = {
        *application.openapi()["paths"],
        "/",
        "/docs",
        "/openapi.json",
        "/admin",
        "/admin/x",
        "/no/such/path",
    }
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(application), base_url="http://service"
    ) as client:
        for path in paths - OPEN_PATHS:
            for method in ("GET", "POST", "HEAD", "DELETE", "BREW"):
                answer = await client.request(method, path)
                assert answer.status_code in (401, 403), (method, path)
        for path in OPEN_PATHS:
            assert (await client.post(path)).status_code in (401, 403), path


async def test_the_metrics_need_the_admin_scope_or_the_setting(engine: FakeEngine) -> None:
    def bearing(one: NewKey) -> dict[str, str]:
        return {"Authorization": f"Bearer {one.text}"}

    async with served(engine, LOCKED) as client:
        assert (await client.get("/metrics")).status_code == 403
        assert (await client.get("/metrics", headers=bearing(GOOD))).status_code == 403
        assert (await client.get("/metrics", headers=bearing(ADMIN))).status_code == 200
    public = AccessOptions(keys=LOCKED.keys, allow_anonymous=True)
    async with served(engine, public) as client:
        assert (await client.get("/metrics")).status_code == 403
    opened = AccessOptions(keys=LOCKED.keys, allow_anonymous=False, open_metrics=True)
    async with served(engine, opened) as client:
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.post("/v1/translate", json=NATIVE)).status_code == 401
    async with served(engine, AccessOptions()) as client:
        assert (await client.get("/metrics")).status_code == 200


async def test_a_wrong_key_is_refused_even_where_none_is_needed(engine: FakeEngine) -> None:
    public = AccessOptions(keys=source_of(GOOD), allow_anonymous=True)
    async with served(engine, public) as client:
        assert (await client.post("/v1/translate", json=NATIVE)).status_code == 200
        assert (await client.post("/translate", json=LIBRE)).status_code == 200
        assert (await client.post("/translate", json={**LIBRE, "api_key": "wrong"})).status_code == 403
        wrong = {"Authorization": "Bearer wrong"}
        assert (await client.post("/v1/translate", json=NATIVE, headers=wrong)).status_code == 401


async def test_without_any_keys_the_key_that_a_client_must_send_is_ignored(client: httpx.AsyncClient) -> None:
    headers = {"Authorization": "DeepL-Auth-Key whatever"}
    assert (await client.post("/v1/translate", json=NATIVE, headers=headers)).status_code == 200
    assert (await client.post("/translate", json={**LIBRE, "api_key": "whatever"})).status_code == 200


async def test_a_path_below_a_servers_root_path_needs_the_scope_of_its_route(engine: FakeEngine) -> None:
    application = create_app(engine, ApiOptions(), metrics=Metrics(CollectorRegistry()), access=LOCKED)
    transport = httpx.ASGITransport(application, root_path="/prefix")
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
        headers = {"X-API-Key": GOOD.text}
        assert (await client.get("/prefix/metrics", headers=headers)).status_code == 403
        headers = {"X-API-Key": ADMIN.text}
        assert (await client.get("/prefix/metrics", headers=headers)).status_code == 200


async def test_keys_come_and_go_while_the_service_runs(engine: FakeEngine, tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    file.update(lambda _: (GOOD.key,))
    access = AccessOptions(keys=KeySource([], file, interval_s=0), allow_anonymous=False)
    late = made("late")
    async with served(engine, access) as client:

        async def statuses() -> list[int]:
            return [
                (await client.get("/v1/models", headers={"X-API-Key": one.text})).status_code
                for one in (GOOD, late)
            ]

        assert await statuses() == [200, 401]
        file.update(lambda _: (late.key,))
        assert await statuses() == [401, 200]


async def test_limits_on_the_body_hold_while_a_key_is_looked_for(locked: httpx.AsyncClient) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(6):
            yield b"x" * 1000

    assert (await locked.post("/translate", content=b"x" * 5000)).status_code == 413
    assert (await locked.post("/translate", content=chunks())).status_code == 413


async def test_a_web_socket_without_a_key_is_closed_before_it_opens(engine: FakeEngine) -> None:
    application = create_app(engine, ApiOptions(), metrics=Metrics(CollectorRegistry()), access=LOCKED)
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "websocket",
        "path": "/v1/translate",
        "headers": [],
        "query_string": b"",
        "app": application,
    }
    await application(scope, receive, send)
    assert [message["type"] for message in sent] == ["websocket.close"]


@pytest.fixture
def everything_logged() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    stream = io.StringIO()
    configure_logging("json", "debug", stream=stream)
    logging.getLogger("httpx").setLevel("WARNING")
    yield stream
    root.handlers[:] = before
    root.setLevel(level)
    logging.getLogger("httpx").setLevel("NOTSET")


async def test_a_whole_session_leaves_neither_keys_nor_texts_in_the_log(
    engine: FakeEngine, everything_logged: io.StringIO
) -> None:
    secret_text = "zebra-crossing"
    wrong = made("wrong").text
    native, libre = {**NATIVE, "texts": [secret_text]}, {**LIBRE, "q": secret_text}
    async with served(engine, LOCKED) as client:
        for text in (GOOD.text, ADMIN.text, EXPIRED.text, REVOKED.text, wrong):
            for fault in (None, ValueError(f"{secret_text} {text}")):
                engine.fault = fault
                for headers in ({"Authorization": f"Bearer {text}"}, {"X-API-Key": text}):
                    await client.post("/v1/translate", json=native, headers=headers)
                    await client.post("/v1/translate", content=text, headers=headers)
                    await client.get(f"/{text}/{secret_text}", headers=headers)
                fields = {**libre, "api_key": text}
                await client.post("/translate", json=fields)
                await client.post("/translate", data=fields)
                await client.post("/translate", params=fields)
                await client.request(text, "/translate", params=fields)
                await client.get("/metrics", params=fields, headers={"X-Request-ID": f"{text}?"})
    log = everything_logged.getvalue()
    assert len(log.splitlines()) > 100
    assert {json.loads(line)["event"] for line in log.splitlines()} >= {"request", "request_failed"}
    assert "zebra" not in log
    for one in (GOOD, ADMIN, EXPIRED, REVOKED):
        assert one.text not in log
        assert one.text[-20:] not in log
        assert one.key.digest.hex() not in log
    assert wrong not in log
