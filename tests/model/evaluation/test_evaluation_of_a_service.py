import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from app.errors import InvalidOption, InvalidRequest, Unavailable
from model.evaluation.service_system import MAX_TRIES, ServiceAddress, ServiceSystem
from model.evaluation.system import Decoding, Languages
from model.evaluation.testset import TestSet

SERVICE = ServiceAddress("http://service")
LINES = tuple(f"line {number}" for number in range(50))
TESTSET = TestSet("t", LINES, LINES)
Handler = Callable[[dict[str, Any]], httpx.Response]


def answer_of(text: str, num_target_tokens: int = 3) -> httpx.Response:
    return httpx.Response(
        200, json={"texts": [{"text": text, "segments": [{"num_target_tokens": num_target_tokens}]}]}
    )


def system_of(handle: Handler, waits: list[float] | None = None, concurrency: int = 4) -> ServiceSystem:
    def answer(request: httpx.Request) -> httpx.Response:
        assert (request.method, request.url.path) == ("POST", "/v1/translate")
        return handle(json.loads(request.content))

    async def sleep(seconds: float) -> None:
        assert waits is not None, "nobody asked to wait"
        waits.append(seconds)

    return ServiceSystem(
        "s",
        SERVICE,
        Languages("en", "pt"),
        Decoding(4, 0.6),
        concurrency=concurrency,
        sleep=sleep,
        transport=httpx.MockTransport(answer),
    )


def test_every_line_is_asked_for_once_and_kept_in_order() -> None:
    asked = []

    def handle(body: dict[str, Any]) -> httpx.Response:
        assert (body["source"], body["target"]) == ("en", "pt")
        assert body["options"] == {"beam_size": 4, "length_penalty": 0.6}
        (text,) = body["texts"]
        asked.append(text)
        return answer_of(f"{text}\nand\r\nmore")

    found = system_of(handle).translate(TESTSET)
    assert found.lines == tuple(f"{line} and more" for line in LINES)
    assert sorted(asked) == sorted(LINES)
    assert found.speed is not None
    assert (found.speed.num_lines, found.speed.num_target_tokens) == (50, 150)
    assert found.speed.elapsed_s > 0


async def test_no_more_requests_are_under_way_than_allowed() -> None:
    running = most = 0

    class Counting(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            nonlocal running, most
            running += 1
            most = max(most, running)
            for _ in range(3):
                await asyncio.sleep(0)
            running -= 1
            return answer_of("x")

    system = ServiceSystem(
        "s",
        SERVICE,
        Languages("en", "pt"),
        Decoding(),
        concurrency=5,
        transport=Counting(),
    )
    await system._translate(TESTSET)
    assert most == 5


@pytest.mark.parametrize("status", [429, 503])
def test_an_overloaded_service_is_asked_again_after_the_wait_it_names(status: int) -> None:
    waits: list[float] = []
    refused: set[str] = set()

    def handle(body: dict[str, Any]) -> httpx.Response:
        (text,) = body["texts"]
        if text in LINES[:3] and text not in refused:
            refused.add(text)
            return httpx.Response(status, headers={"Retry-After": "7"})
        return answer_of(text)

    assert system_of(handle, waits).translate(TESTSET).lines == LINES
    assert waits == [7.0, 7.0, 7.0]


@pytest.mark.parametrize(
    ("header", "wait_s"), [({}, 1.0), ({"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, 1.0),
                           ({"Retry-After": "1000000"}, 60.0), ({"Retry-After": "-3"}, 0.0),
                           ({"Retry-After": "nan"}, 1.0)],
)  # fmt: skip
def test_an_overload_without_end_is_given_up_with_the_services_words(
    header: dict[str, str], wait_s: float
) -> None:
    waits: list[float] = []
    error = {"error": {"code": "queue_full", "message": "too much is waiting", "retryable": True}}
    system = system_of(lambda body: httpx.Response(429, headers=header, json=error), waits, concurrency=1)
    with pytest.raises(Unavailable, match=r"429 to line 1 10 times in a row: too much is waiting.*--concurr"):
        system.translate(TESTSET)
    assert waits == [wait_s] * MAX_TRIES


def test_a_refusal_is_told_in_the_services_words() -> None:
    error = {
        "error": {"code": "unsupported_pair", "message": "en to xx is not available", "retryable": False}
    }
    with pytest.raises(InvalidRequest, match="answered 422 to line 1: en to xx is not available"):
        system_of(lambda body: httpx.Response(422, json=error), concurrency=1).translate(TESTSET)
    keyless = {"error": {"code": "unauthorized", "message": "a key is needed", "retryable": False}}
    with pytest.raises(
        InvalidRequest, match=r"answered 401 to line 1: a key is needed; name a file .*--key-file"
    ):
        system_of(lambda body: httpx.Response(401, json=keyless), concurrency=1).translate(TESTSET)
    with pytest.raises(Unavailable, match="answered 500 to line 1: Internal Server Error"):
        system_of(lambda body: httpx.Response(500, text="boom"), concurrency=1).translate(TESTSET)


def test_another_kind_of_server_is_told_apart() -> None:
    for response in (httpx.Response(200, text="<html>"), httpx.Response(200, json={"texts": []})):
        with pytest.raises(InvalidRequest, match="does not answer as this project's service does"):
            system_of(lambda body, response=response: response, concurrency=1).translate(TESTSET)  # type: ignore[misc]


def test_a_service_that_is_not_there_is_named_with_the_remedy() -> None:
    def handle(body: dict[str, Any]) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(Unavailable, match=r"http://service does not answer.*dragoman serve"):
        system_of(handle).translate(TESTSET)


@pytest.mark.parametrize(
    ("text", "url", "credentials"),
    [
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000", None),
        ("http://[::1]:8000", "http://[::1]:8000", None),
        ("HTTP://127.0.0.1:8000", "http://127.0.0.1:8000", None),
        ("https://mt.example/behind/a/proxy/", "https://mt.example/behind/a/proxy", None),
        ("https://ana:geheim@mt.example", "https://mt.example", ("ana", "geheim")),
        ("https://ana:ge%40heim@mt.example:1/x", "https://mt.example:1/x", ("ana", "ge@heim")),
    ],
)
def test_a_service_s_password_is_no_part_of_what_is_shown_of_its_address(
    text: str, url: str, credentials: tuple[str, str] | None
) -> None:
    address = ServiceAddress.read(text)
    assert (address.url, address.credentials) == (url, credentials)
    assert "heim" not in repr(address)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("http://[::1", r"http://\[::1 is no URL"),
        ("http://host:port", "http://host:port is no URL"),
        ("http://", "http:// names no host"),
        ("http://:8000", "http://:8000 names no host"),
        ("http://host:99999", "http://host:99999 names port 99999; the last is 65535"),
        ("ftp://host", "ftp://host is no address of a service"),
        ("s=http://host", "s=http://host is no address of a service"),
        ("http://host/?key=geheim", "http://host/ goes on behind its path"),
        ("http://host/x#geheim", "http://host/x goes on behind its path"),
    ],
)
def test_what_is_no_url_is_refused_by_its_name(text: str, message: str) -> None:
    with pytest.raises(InvalidOption, match=message) as caught:
        ServiceAddress.read(text)
    assert "heim" not in str(caught.value)


@pytest.mark.parametrize(
    "user", ["ana:geheim", "ana:ge\nheim", "ana:1/geheim", "ana:1#geheim", "ana:1?geheim"]
)
@pytest.mark.parametrize(
    "text", ["http://{}@[::1", "http://{}@:80", "http://{}@x:y", "ftp://{}@x", "a b=http://{}@x"]
)
def test_a_url_that_is_refused_does_not_show_its_password(text: str, user: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        ServiceAddress.read(text.format(user))
    assert "heim" not in str(caught.value)


@pytest.mark.parametrize("text", ["http://ana:1/geheim@x", "http://ana:1#geheim@x", "http://ana:1?geheim@x"])
def test_a_password_with_a_sign_that_ends_it_is_no_path(text: str) -> None:
    with pytest.raises(InvalidOption, match=r"http://…@x goes on behind its path, .* as %2F"):
        ServiceAddress.read(text)


@pytest.mark.parametrize("proxy", ["http://ana:geheim@[::1", "socks9://ana:geheim@h:1"])
def test_a_proxy_that_cannot_be_used_is_named_without_its_password(
    proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    system = ServiceSystem("s", SERVICE, Languages("en", "pt"), Decoding())
    with pytest.raises(InvalidOption, match="the proxy that HTTP_PROXY") as caught:
        system.translate(TESTSET)
    assert "geheim" not in str(caught.value)


def test_a_service_behind_a_password_gets_it_with_every_request() -> None:
    seen = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("Authorization"))
        return answer_of("x")

    address = ServiceAddress.read("http://ana:geheim@service")
    system = ServiceSystem(
        "s", address, Languages("en", "pt"), Decoding(), transport=httpx.MockTransport(answer)
    )
    system.translate(TESTSET)
    assert seen == ["Basic YW5hOmdlaGVpbQ=="] * len(LINES)
    assert "geheim" not in str(system.facts)


def test_an_api_key_goes_with_every_request_beside_a_password() -> None:
    seen = set()

    def answer(request: httpx.Request) -> httpx.Response:
        seen.add((request.headers["X-API-Key"], request.headers["Authorization"]))
        return answer_of("x")

    address = ServiceAddress.read("http://ana:geheim@service", key="dk_1")
    system = ServiceSystem(
        "s", address, Languages("en", "pt"), Decoding(), transport=httpx.MockTransport(answer)
    )
    system.translate(TESTSET)
    assert seen == {("dk_1", "Basic YW5hOmdlaGVpbQ==")}
    assert "dk_1" not in f"{system.facts} {system!r}"
