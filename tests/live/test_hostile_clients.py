"""Clients that are slow, silent or many, against one real server."""

import contextlib
import gzip
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from service_process import ROOT, WAIT_S, Service

pytestmark = pytest.mark.live
FAKE = str(Path(__file__).parent / "fake_service.py")
BODY = json.dumps({"q": "a", "source": "en", "target": "pt"}).encode()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    log = tmp_path_factory.mktemp("hostile") / "log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, FAKE, "0", "--port", "0"],
            cwd=ROOT,
            stderr=stderr,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "DRAGOMAN_LOG_FORMAT": "json",
                "DRAGOMAN_HEAD_TIMEOUT_S": "0.5",
                "DRAGOMAN_KEEP_ALIVE_S": "2",
            },
        )
    running = Service(process, log)
    try:
        running.url  # noqa: B018 - waits for it
        yield running
    finally:
        process.kill()
        process.wait()


def connected(url: str) -> socket.socket:
    host, _, port = url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=WAIT_S)


def everything(opened: socket.socket) -> bytes:
    answer = b""
    while piece := opened.recv(65536):
        answer += piece
    return answer


def assert_translates(url: str, *, times: int = 1) -> None:
    """Each time over a new connection."""
    headers = {"Content-Type": "application/json", "Connection": "close"}
    with httpx.Client(timeout=WAIT_S, headers=headers) as client:
        for _ in range(times):
            assert client.post(f"{url}/translate", content=BODY).status_code == 200
            assert client.get(f"{url}/livez").status_code == 200


@pytest.mark.parametrize("sent", [b"G", b"POST /translate HTTP/1.1\r\nHost: x\r\nX-A: "])
def test_a_head_that_never_ends_is_answered_408_and_its_connection_closed(
    service: Service, sent: bytes
) -> None:
    with connected(service.url) as opened:
        opened.sendall(sent)
        answer = everything(opened)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"0.5 s" in answer


def test_the_second_head_of_a_connection_has_the_same_limit(service: Service) -> None:
    with connected(service.url) as opened:
        opened.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert opened.recv(65536).startswith(b"HTTP/1.1 200 ")
        opened.sendall(b"GET /livez HTT")
        assert b"HTTP/1.1 408 " in everything(opened)


def test_a_head_begun_behind_a_whole_request_has_the_same_limit(service: Service) -> None:
    with connected(service.url) as opened:
        opened.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\nGET /li")
        answer = everything(opened)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"HTTP/1.1 408" in answer


@pytest.mark.parametrize("head", [b"X: " + b"a" * 60_000, b"\r\n".join([b"a:"] * 15_000)])
def test_a_head_that_is_too_large_is_refused_however_fast_it_arrives(service: Service, head: bytes) -> None:
    with connected(service.url) as opened:
        opened.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n\r\n")
        assert opened.recv(65536).startswith(b"HTTP/1.1 400")
    assert_translates(service.url)


def test_connections_that_say_nothing_are_closed_without_an_answer(service: Service) -> None:
    with connected(service.url) as opened:
        assert everything(opened) == b""


@pytest.mark.parametrize("path", ["/translate", "/v1/translate"])
def test_a_compressed_body_is_refused_with_the_remedy_and_not_expanded(service: Service, path: str) -> None:
    bomb = gzip.compress(b" " * 20_000_000)
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    answer = httpx.post(f"{service.url}{path}", content=bomb, headers=headers, timeout=WAIT_S)
    assert answer.status_code == 415
    assert "without Content-Encoding" in answer.text


def test_a_thousand_idle_connections_leave_room_for_a_translation(service: Service) -> None:
    with contextlib.ExitStack() as idle:
        for _ in range(1000):
            idle.enter_context(connected(service.url))
        assert_translates(service.url)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux only")
def test_connections_inherit_the_limit_on_readers_that_do_not_read() -> None:
    from app.cli.listening import Listeners

    listeners = Listeners("127.0.0.1", 0)
    listeners.listen()
    try:
        with connected(listeners.url):
            accepted, _ = listeners.sockets[0].accept()
            with accepted:
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000
                assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    finally:
        listeners.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux only")
@pytest.mark.parametrize("log", ["a full disk", "a closed pipe", "a pipe that nobody reads"])
def test_a_log_that_cannot_be_written_costs_no_translation_and_a_clean_stop(log: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    reading = -1
    if log == "a full disk":
        stderr = os.open("/dev/full", os.O_WRONLY)
    else:
        reading, stderr = os.pipe()
    if log == "a closed pipe":
        os.close(reading)
    elif log == "a pipe that nobody reads":
        os.set_blocking(stderr, False)
        with contextlib.suppress(BlockingIOError):
            while os.write(stderr, b"x" * 4096):
                pass
        os.set_blocking(stderr, True)
    try:
        process = subprocess.Popen(
            [sys.executable, FAKE, "0", "--port", str(port)],
            cwd=ROOT,
            stdout=stderr,
            stderr=stderr,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "DRAGOMAN_LOG_FORMAT": "json"},
        )
    finally:
        os.close(stderr)
    url = f"http://127.0.0.1:{port}"
    try:
        running = Service(process, Path(os.devnull))

        def answers() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"{url}/livez", timeout=WAIT_S).status_code == 200
            return False

        running.wait_until(answers, "the server to listen")
        assert_translates(url, times=50)
        running.signal()
        assert running.exit_code() == 0
    finally:
        process.kill()
        process.wait()
        if log == "a pipe that nobody reads":
            os.close(reading)
