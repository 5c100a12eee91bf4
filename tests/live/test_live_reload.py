"""Bundles loaded anew in a real server, under load, by request and by signal."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from service_process import WAIT_S, Service, Start

from app.bundle import MANIFEST_NAME, default_directory

pytestmark = pytest.mark.live

TEXT = "The boats left the harbour before the storm, and nobody was there to see them go."
NUM_CLIENTS = 4
NUM_RELOADS = 3


class Folder:
    """A folder of bundles as an operator keeps it: a bundle is replaced whole, its files never written to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._aside = path.with_name("aside")
        self._aside.mkdir()
        path.mkdir()
        self._num_versions = 0

    def put(self, name: str, *, max_target_ratio: float | None = None, spoilt: bool = False) -> None:
        """Put the shipped bundle in place, as it is, with another limit, or damaged."""
        new = self._version(name)
        shutil.copytree(default_directory() / name, new)
        if max_target_ratio is not None:
            manifest = json.loads((new / MANIFEST_NAME).read_text())
            manifest["limits"]["max_target_ratio"] = max_target_ratio
            (new / MANIFEST_NAME).write_text(json.dumps(manifest))
        if spoilt:
            weights = bytearray((new / "weights.bin").read_bytes())
            weights[len(weights) // 2] ^= 1
            (new / "weights.bin").write_bytes(weights)
        if (self.path / name).exists():
            self.remove(name)
        new.rename(self.path / name)

    def remove(self, name: str) -> None:
        (self.path / name).rename(self._version(name))

    def _version(self, name: str) -> Path:
        self._num_versions += 1
        return self._aside / f"{name}-{self._num_versions}"


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    folder = Folder(tmp_path / "models")
    folder.put("en-pt")
    return folder


def begin(start: Start, folder: Folder, http: httpx.Client) -> tuple[Service, str]:
    """A service over the folder that is ready."""
    service = start(
        *("-m", "app", "serve", "--port", "0", "--bundles", str(folder.path)), DRAGOMAN_MAX_CACHE_BYTES="0"
    )
    url = service.url
    service.wait_until(lambda: http.get(f"{url}/readyz").status_code == 200, "the service to be ready")
    return service, url


def translation(http: httpx.Client, url: str) -> str:
    answer = http.post(f"{url}/v1/translate", json={"texts": [TEXT], "source": "en", "target": "pt"})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["texts"][0]["text"])


def reload(http: httpx.Client, url: str) -> dict[str, str]:
    answer = http.post(f"{url}/v1/reload")
    assert answer.status_code == 200, answer.text
    return {bundle["id"]: bundle["change"] for bundle in answer.json()["bundles"]}


def reloads(http: httpx.Client, url: str) -> dict[str, float]:
    """The metric, by outcome that there was."""
    prefix = 'dragoman_reloads_total{outcome="'
    lines = http.get(f"{url}/metrics").text.splitlines()
    counts = [line.removeprefix(prefix).split('"} ') for line in lines if line.startswith(prefix)]
    return {outcome: float(count) for outcome, count in counts if float(count)}


def mapped_weights(service: Service) -> set[str]:
    """Files of weights that the process has in memory: those of a model are mapped as long as it lives."""
    lines = Path(f"/proc/{service.process.pid}/maps").read_text().splitlines()
    return {line.split()[-1] for line in lines if line.endswith("weights.bin")}


def events(service: Service, name: str) -> list[dict[str, Any]]:
    return [line for line in service.lines if line["event"] == name]


def test_reloads_under_load_lose_no_request_and_give_the_old_models_memory_back(
    start: Start, http: httpx.Client, folder: Folder
) -> None:
    service, url = begin(start, folder, http)
    id_ = http.get(f"{url}/v1/models").json()["models"][0]["id"]
    whole = translation(http, url)
    folder.put("en-pt", max_target_ratio=0.5)
    assert reload(http, url) == {id_: "loaded"}
    cut = translation(http, url)
    assert cut != whole
    done = threading.Event()

    def keep_asking() -> Counter[str]:
        answers: Counter[str] = Counter()
        with httpx.Client(timeout=WAIT_S) as client:
            while not done.is_set():
                answers[translation(client, url)] += 1
                assert client.get(f"{url}/readyz").status_code == 200
        return answers

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        clients = [pool.submit(keep_asking) for _ in range(NUM_CLIENTS)]
        try:
            for round_ in range(NUM_RELOADS):
                is_whole = round_ % 2 == 0
                folder.put("en-pt", max_target_ratio=None if is_whole else 0.5)
                assert reload(http, url) == {id_: "loaded"}
                assert translation(http, url) == (whole if is_whole else cut), "who comes later gets the new"
            assert reload(http, url) == {id_: "unchanged"}
        finally:
            done.set()
        answers = sum((client.result() for client in clients), Counter[str]())
    assert set(answers) == {whole, cut}
    assert reloads(http, url) == {"changed": NUM_RELOADS + 1.0, "unchanged": 1.0}
    served = str(folder.path / "en-pt" / "weights.bin")
    service.wait_until(lambda: mapped_weights(service) == {served}, "the old models' memory to be given back")
    assert len(events(service, "reloaded")) == NUM_RELOADS + 2
    assert "raceback" not in service.log_text()
    service.signal()
    assert service.exit_code() == 0


def test_a_damaged_bundle_leaves_the_service_as_it_was(
    start: Start, http: httpx.Client, folder: Folder
) -> None:
    service, url = begin(start, folder, http)
    before = translation(http, url)
    folder.put("pt-en")
    folder.put("en-pt", spoilt=True)
    answer = http.post(f"{url}/v1/reload")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["retryable"]) == (500, "bundle_corrupt", False)
    assert str(folder.path / "en-pt" / "weights.bin") in error["message"]
    assert http.get(f"{url}/readyz").status_code == 200
    assert translation(http, url) == before
    assert [entry["code"] for entry in http.get(f"{url}/languages").json()] == ["en", "pt"]
    assert len(http.get(f"{url}/v1/models").json()["models"]) == 1
    assert reloads(http, url) == {"failed": 1.0}
    (line,) = events(service, "reload_failed")
    assert (line["level"], line["reason"]) == ("error", error["message"])
    folder.put("en-pt")
    assert sorted(reload(http, url).values()) == ["loaded", "unchanged"]
    assert len(http.get(f"{url}/v1/models").json()["models"]) == 2


def test_sighup_has_the_bundles_loaded_anew(start: Start, http: httpx.Client, folder: Folder) -> None:
    service, url = begin(start, folder, http)

    def targets() -> dict[str, list[str]]:
        return {entry["code"]: entry["targets"] for entry in http.get(f"{url}/languages").json()}

    assert targets() == {"en": ["pt"], "pt": []}
    folder.put("pt-en")
    service.signal(signal.SIGHUP)
    service.wait_until(lambda: targets() == {"en": ["pt"], "pt": ["en"]}, "the new pair to be offered")
    folder.remove("en-pt")
    service.signal(signal.SIGHUP)
    service.wait_until(lambda: targets() == {"en": [], "pt": ["en"]}, "the old pair to vanish")
    gone = http.post(f"{url}/v1/translate", json={"texts": [TEXT], "source": "en", "target": "pt"})
    assert (gone.status_code, gone.json()["error"]["code"]) == (422, "unsupported_pair")
    folder.put("pt-en", spoilt=True)
    service.signal(signal.SIGHUP)
    service.wait_until(lambda: len(events(service, "reload_failed")) == 1, "the reload to fail")
    assert http.get(f"{url}/readyz").status_code == 200
    back = http.post(f"{url}/v1/translate", json={"texts": ["Bom dia."], "source": "pt", "target": "en"})
    assert back.status_code == 200
    assert reloads(http, url) == {"changed": 2.0, "failed": 1.0}
    service.signal()
    assert service.exit_code() == 0


def test_a_terminal_that_closes_ends_the_service_and_loads_nothing(start: Start, http: httpx.Client) -> None:
    window, program = pty.openpty()
    service = start("-m", "app", "serve", "--port", "0", stdin=program)
    os.close(program)
    url = service.url
    service.wait_until(lambda: http.get(f"{url}/readyz").status_code == 200, "the service to be ready")
    service.signal(signal.SIGHUP)
    service.wait_until(lambda: len(events(service, "reloaded")) == 1, "the reload while the window is open")
    os.close(window)
    service.signal(signal.SIGHUP)
    assert service.exit_code() == 0
    assert len(events(service, "reloaded")) == 1
