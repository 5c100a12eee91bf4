import errno
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from app.bundle import Bundle
from app.cli import serve as serve_module
from app.cli import web_server
from app.cli.listening import AddressUnavailable, Listeners
from app.cli.web_server import server_config
from app.errors import BundleCorrupt
from app.settings import Settings


def test_sigterm_while_the_bundles_load_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stopped_by_the_operator(directory: Path) -> tuple[Bundle, ...]:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("loading went on after SIGTERM")

    monkeypatch.setattr(serve_module, "discover", stopped_by_the_operator)
    before = signal.getsignal(signal.SIGTERM)
    # Without a handler the signal would end the test run itself.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with pytest.raises(SystemExit) as ended:
            serve_module.serve({"log_level": "error", "port": 0})
        assert ended.value.code == 0
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_takes_long_to_import_is_imported_after_the_loading_has_begun() -> None:
    script = (
        "import sys, app.__main__, app.cli.serve\n"
        "late = {'fastapi', 'uvicorn', 'structlog', 'prometheus_client', 'app.runtime.engine'}\n"
        "print(sorted(late & sys.modules.keys()))\n"
    )
    root = Path(serve_module.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_a_bundle_that_the_loading_thread_refuses_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> None:
        raise BundleCorrupt("guided_step.onnx is damaged")

    monkeypatch.setattr(serve_module, "discover", lambda _directory: ())
    monkeypatch.setattr(serve_module, "load_models", refuse)
    monkeypatch.setattr(web_server, "configure_logging", lambda *_arguments: None)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(BundleCorrupt, match="is damaged"):
            serve_module.serve({"port": 0})
    finally:
        signal.signal(signal.SIGTERM, before)


def test_idle_connections_outlive_the_pools_of_common_clients() -> None:
    # httpx 5 s, nginx and AWS balancers 60 s, Go's http.Transport 90 s: a server that closes first
    # closes some connections at the very moment a request arrives.
    config = server_config(lambda: None, Settings())
    assert config.timeout_keep_alive > 90
    assert server_config(lambda: None, Settings(keep_alive_s=620)).timeout_keep_alive == 620


def test_an_address_is_bound_at_once_and_given_back() -> None:
    first = Listeners("127.0.0.1", 0)
    host, port = first.sockets[0].getsockname()
    assert first.url == f"http://{host}:{port}"
    first.listen()
    with pytest.raises(
        AddressUnavailable, match=rf"^127\.0\.0\.1:{port} is taken; choose another with --port$"
    ):
        Listeners("127.0.0.1", port)
    first.close()
    Listeners("127.0.0.1", port).close()


def test_of_two_that_start_at_once_the_later_one_says_the_port_is_taken() -> None:
    first = Listeners("127.0.0.1", 0)
    second = Listeners("127.0.0.1", first.sockets[0].getsockname()[1])
    first.listen()
    with pytest.raises(AddressUnavailable, match="is taken"):
        second.listen()
    assert second.sockets == []
    first.close()


def test_all_addresses_of_a_name_share_one_port() -> None:
    listeners = Listeners("localhost", 0)
    assert len({bound.getsockname()[1] for bound in listeners.sockets}) == 1
    listeners.close()


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("192.0.2.1", "192.0.2.1 is not an address of this machine; choose another with --host"),
        ("x" * 80, f"{'x' * 80} is no address and no name that is known here; choose another with --host"),
    ],
)
def test_an_address_of_another_machine_or_of_none_is_named(host: str, message: str) -> None:
    with pytest.raises(AddressUnavailable) as refused:
        Listeners(host, 0)
    assert refused.value.message == message


def test_a_port_that_needs_privileges_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, address: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(AddressUnavailable, match=r"^\[::1\]:80 needs privileges; choose a port from 1024"):
        Listeners("::1", 80)
