"""A real Prometheus on loopback that scrapes metrics of this process."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from tests.observability.fed_metrics import fed_metrics, feed

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
_PATIENCE_S = 120
_NUM_SCRAPES = 4


class _Service:
    """Shows metrics that grow from scrape to scrape, and knows how often it was scraped."""

    def __init__(self) -> None:
        metrics = fed_metrics()
        scraped = self._scraped = threading.Condition()
        self._num_scrapes = 0
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                with scraped:
                    feed(metrics)
                    body = metrics.exposition()
                self.send_response(200)
                self.send_header("Content-Type", metrics.content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                try:
                    self.wfile.write(body)
                except BrokenPipeError:
                    return  # it gave up waiting: this scrape does not count
                with scraped:
                    service._num_scrapes += 1
                    scraped.notify_all()

            def log_message(self, format: str, *args: object) -> None:
                """Be silent."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.port: int = self._server.server_address[1]

    def __enter__(self) -> _Service:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def wait_for_scrapes(self, num_scrapes: int) -> None:
        with self._scraped:
            assert self._scraped.wait_for(lambda: self._num_scrapes >= num_scrapes, _PATIENCE_S)


class Prometheus:
    """Asks a running Prometheus."""

    def __init__(self, port: int) -> None:
        self._port = port

    def get(self, path: str, **parameters: str) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_PATIENCE_S)
        try:
            connection.request("GET", f"{path}?{urlencode(parameters)}")
            answer = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        assert answer["status"] == "success", answer
        return answer["data"]

    def values(self, expression: str) -> list[float]:
        """The values of an instant query."""
        data = self.get("/api/v1/query", query=expression)
        assert data["resultType"] == "vector"
        return [float(sample["value"][1]) for sample in data["result"]]


@contextmanager
def running_prometheus(folder: Path, rules: Path) -> Iterator[Prometheus]:
    """Prometheus after it has scraped a fed service several times."""
    assert PROMETHEUS is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    with _Service() as service:
        (folder / "prometheus.yml").write_text(
            "global: {scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}\n"
            f"rule_files: [{json.dumps(str(rules))}]\n"
            "scrape_configs:\n"
            f"  - {{job_name: dragoman, static_configs: [{{targets: ['127.0.0.1:{service.port}']}}]}}\n"
        )
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [
                    PROMETHEUS,
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                    "--log.level=warn",
                ],
                stdout=log,
                stderr=log,
            )
        try:
            service.wait_for_scrapes(_NUM_SCRAPES)
            yield Prometheus(port)
        finally:
            process.terminate()
            process.wait(_PATIENCE_S)
