"""Clients that stop halfway, against a real server."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from service_process import WAIT_S, Service, Start

pytestmark = pytest.mark.live
FAKE = str(Path(__file__).parent / "fake_service.py")
BODIES = {
    "/translate": json.dumps({"q": "a", "source": "en", "target": "pt"}).encode(),
    "/v1/translate": json.dumps({"texts": ["a"], "source": "en", "target": "pt"}).encode(),
}


def head(path: str, num_bytes: int) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {num_bytes}\r\n\r\n"
    ).encode()


@contextmanager
def connection(url: str) -> Iterator[socket.socket]:
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as opened:
        yield opened


def received(opened: socket.socket) -> tuple[str, str]:
    """Head and body of all that comes until the other side closes."""
    answer = b""
    while piece := opened.recv(65536):
        answer += piece
    before, _, after = answer.decode().partition("\r\n\r\n")
    return before, after


def wait_until_in_flight(http: httpx.Client, service: Service, count: int) -> None:
    def in_flight() -> float:
        lines = http.get(f"{service.url}/metrics").text.splitlines()
        return float(
            next(line for line in lines if line.startswith("dragoman_http_requests_in_flight ")).split()[1]
        )

    # The question is itself in flight.
    service.wait_until(lambda: in_flight() == count + 1, f"{count} requests to be in flight")


def test_sigterm_answers_requests_whose_body_is_incomplete_at_once_and_without_a_traceback(
    start: Start, http: httpx.Client
) -> None:
    service = start(FAKE, "0", "--port", "0", "--drain-s", "20")
    with connection(service.url) as native, connection(service.url) as libretranslate:
        for opened, (path, body) in zip((libretranslate, native), BODIES.items(), strict=True):
            opened.sendall(head(path, len(body)) + body[:5])
        wait_until_in_flight(http, service, 2)
        began_s = time.monotonic()
        service.signal()
        for opened in (libretranslate, native):
            before, body = received(opened)
            assert before.startswith("HTTP/1.1 503 ")
            assert "retry-after: 1" in before.lower()
            assert "stopping" in body
        assert json.loads(body)["error"]["code"] == "shutting_down"
        assert service.exit_code() == 0
        assert time.monotonic() - began_s < 4  # uvicorn's own patience with open requests is 5 s
    assert "raceback" not in service.log_text()


def test_a_body_that_never_ends_is_answered_408_and_its_connection_closed(start: Start) -> None:
    service = start(FAKE, "0", "--port", "0", DRAGOMAN_BODY_TIMEOUT_S="0.3")
    for path, body in BODIES.items():
        with connection(service.url) as opened:
            opened.sendall(head(path, len(body)) + body[:5])
            before, answer = received(opened)
            assert before.startswith("HTTP/1.1 408 ")
            assert "0.3 s" in answer


def test_the_port_stays_open_and_readiness_red_for_the_grace_even_without_work(
    start: Start, http: httpx.Client
) -> None:
    service = start(FAKE, "0", "--port", "0", DRAGOMAN_DRAIN_GRACE_S="1.5")
    url = service.url
    began_s = time.monotonic()
    service.signal()
    service.wait_until(lambda: http.get(f"{url}/readyz").status_code == 503, "readiness to turn red")
    assert http.get(f"{url}/livez").status_code == 200
    with httpx.Client() as newcomer:
        headers = {"Content-Type": "application/json"}
        refused = newcomer.post(f"{url}/translate", content=BODIES["/translate"], headers=headers)
        assert refused.status_code == 503
    assert service.exit_code() == 0
    assert time.monotonic() - began_s > 1.4


def test_a_client_that_closes_its_sending_side_counts_as_one_that_left(
    start: Start, http: httpx.Client
) -> None:
    service = start(FAKE, "60", "--port", "0", "--drain-s", "0")
    with connection(service.url) as opened:
        body = BODIES["/translate"]
        opened.sendall(head("/translate", len(body)) + body)
        opened.shutdown(socket.SHUT_WR)
        assert received(opened) == ("", "")
    service.wait_until(
        lambda: [line.get("status") for line in service.lines if line["event"] == "request"] == [499],
        "the access line of a closed request",
    )
