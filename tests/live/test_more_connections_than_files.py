"""A process that may open few files serves whoever asks, however many connections lie idle."""

import contextlib
import sys
from pathlib import Path

import httpx
import pytest
from service_process import WAIT_S, Service, Start
from test_hostile_clients import assert_translates, connected

pytestmark = [pytest.mark.live, pytest.mark.skipif(sys.platform != "linux", reason="Linux only")]
FAKE = str(Path(__file__).parent / "fake_service.py")
NUM_FILES = 256
LIVE = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture
def service(start: Start) -> Service:
    import resource

    service = start(FAKE, "0", "--port", "0", DRAGOMAN_KEEP_ALIVE_S="3600", DRAGOMAN_HEAD_TIMEOUT_S="3600")
    assert service.url
    limit = resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE, (NUM_FILES, limit[1]))
    return service


@pytest.mark.parametrize("sent", [b"", LIVE], ids=["silent", "kept alive"])
def test_more_idle_connections_than_there_are_files_keep_nobody_out(service: Service, sent: bytes) -> None:
    with contextlib.ExitStack() as idle:
        for _ in range(2 * NUM_FILES):
            opened = idle.enter_context(connected(service.url))
            opened.sendall(sent)
            if sent:
                assert opened.recv(65536).startswith(b"HTTP/1.1 200 ")
        assert_translates(service.url, times=10)
    assert "out of system resource" not in service.log_text()
    closed = [line for line in service.lines if line["event"] == "idle_connections_closed"]
    assert closed
    assert "ulimit" in closed[0]["remedy"]


def test_a_connection_in_use_stays_while_idle_ones_go(service: Service) -> None:
    with (
        httpx.Client(timeout=WAIT_S) as client,
        contextlib.ExitStack() as idle,
        connected(service.url) as used,
    ):
        used.sendall(LIVE[:-2])  # a request has begun
        for _ in range(2 * NUM_FILES):
            idle.enter_context(connected(service.url))
        assert client.get(f"{service.url}/readyz").status_code == 200
        used.sendall(LIVE[-2:])
        assert used.recv(65536).startswith(b"HTTP/1.1 200 ")
