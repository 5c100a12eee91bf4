"""Bundles on disk and the models that run: what a reload does with each, and every way it may fail."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from echo_engine import PATIENCE_S, until
from reloaded_service import Service, load, translated
from structlog.testing import capture_logs
from structlog.typing import EventDict
from tiny_models import tiny_checkpoint, tiny_options

from app.bundle import MANIFEST_NAME, Bundle, discover, sha256_of
from app.bundle.manifest import LanguagePair
from app.errors import (
    BundleCorrupt,
    BundleNotFound,
    BundleUnsupported,
    DragomanError,
    ReloadFailed,
    ReloadInProgress,
    ShuttingDown,
)
from app.runtime.engine import Engine, EngineOptions
from app.runtime.reload import BundleChange, Change, ReloadOutcome
from exporters.export import export_bundle


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bundles `first` and `second` for en-pt under one id, and `reverse` for pt-en."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("exported")
    for name, bundle_id, ffn_size in (
        ("first", "tiny", 48),
        ("second", "tiny", 64),
        ("reverse", "back", 48),
    ):
        options = tiny_options(bundle_id, ("cpu-fp32",))
        if name == "reverse":
            options = type(options)(**vars(options) | {"pairs": [LanguagePair(source="pt", target="en")]})
        export_bundle(tiny_checkpoint(ffn_size=ffn_size), folder / name, options)
    return folder


@pytest.fixture(autouse=True)
def logs() -> Iterator[list[EventDict]]:
    with capture_logs() as lines:
        yield lines


@pytest.fixture
async def service(exported: Path, tmp_path: Path) -> AsyncIterator[Service]:
    folder = tmp_path / "bundles"
    folder.mkdir()
    shutil.copytree(exported / "first", folder / "tiny")
    service = Service(folder)
    service.engine.start()
    yield service
    await service.engine.stop(drain_s=PATIENCE_S)


@pytest.fixture
async def expected(exported: Path) -> dict[str, list[str]]:
    """What each bundle translates the texts into, loaded alone."""
    answers = {}
    for name in ("first", "second"):
        engine = Engine([load(bundle) for bundle in discover(exported / name)], EngineOptions(num_workers=1))
        engine.start()
        answers[name] = await translated(engine)
        await engine.stop(drain_s=PATIENCE_S)
    assert answers["first"] != answers["second"]
    return answers


async def test_what_is_unchanged_is_not_loaded_again(service: Service) -> None:
    assert await service.reload() == {"tiny": "unchanged"}
    assert service.loaded == []
    assert service.outcomes == [ReloadOutcome.UNCHANGED]


async def test_another_bundle_under_the_same_id_takes_its_place_whatever_is_cached(
    service: Service, exported: Path, expected: dict[str, list[str]]
) -> None:
    assert await translated(service.engine) == expected["first"]
    service.put(exported / "second", "tiny")
    report = await service.reloader.reload()
    assert [(part.bundle, part.change) for part in report.changes] == [("tiny", Change.LOADED)]
    assert 0 < report.changes[0].seconds < report.seconds
    assert await translated(service.engine) == expected["second"]
    service.put(exported / "first", "tiny")
    assert await service.reload() == {"tiny": "loaded"}
    assert await translated(service.engine) == expected["first"]
    assert service.outcomes == [ReloadOutcome.CHANGED] * 2


async def test_bundles_come_and_go_and_the_others_stay(service: Service, exported: Path) -> None:
    service.put(exported / "reverse", "back")
    assert await service.reload() == {"back": "loaded", "tiny": "unchanged"}
    assert await translated(service.engine, source="pt", target="en")
    (service.folder / "tiny").rename(service.folder.parent / "elsewhere")
    assert await service.reload() == {"back": "unchanged", "tiny": "removed"}
    assert [pair.model for pair in service.engine.pairs] == ["back"]
    assert service.loaded == ["back"]
    assert await service.reload() == {"back": "unchanged"}


async def test_a_bundle_that_moved_to_another_folder_is_unchanged(service: Service) -> None:
    (service.folder / "tiny").rename(service.folder / "renamed")
    assert await service.reload() == {"tiny": "unchanged"}


async def test_sessions_of_a_replaced_bundle_are_given_back_without_the_garbage_collector(
    service: Service, exported: Path
) -> None:
    gc.collect()
    gc.disable()
    try:
        for name in ("second", "first", "second"):
            service.put(exported / name, "tiny")
            await service.reload()
            await translated(service.engine)
        await until(lambda: [model() is not None for model in service.models] == [False, False, True])
    finally:
        gc.enable()


def edit(folder: Path, name: str, content: bytes) -> None:
    """Change a file and the manifest with it, so that the checksums are right."""
    (folder / name).write_bytes(content)
    manifest: dict[str, Any] = json.loads((folder / MANIFEST_NAME).read_text())
    manifest["files"][name] |= {"size_bytes": len(content), "sha256": sha256_of(folder / name)}
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest))


def lose_a_file(folder: Path) -> None:
    (folder / "weights.bin").unlink()


def flip_a_bit(folder: Path) -> None:
    content = bytearray((folder / "weights.bin").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "weights.bin").write_bytes(content)


def cut_the_manifest(folder: Path) -> None:
    path = folder / MANIFEST_NAME
    path.write_bytes(path.read_bytes()[:-9])


def lose_the_manifest(folder: Path) -> None:
    (folder / MANIFEST_NAME).unlink()


def break_a_graph(folder: Path) -> None:
    edit(folder, "step.cpu-fp32.onnx", b"no graph")


def spoil_the_weights(folder: Path) -> None:
    weights = np.full((folder / "weights.bin").stat().st_size // 4, np.nan, dtype=np.float32)
    edit(folder, "weights.bin", weights.tobytes())


def double_the_id(folder: Path) -> None:
    shutil.copytree(folder, folder.with_name("twin"))


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lose_a_file, BundleCorrupt),
        (flip_a_bit, BundleCorrupt),
        (cut_the_manifest, BundleCorrupt),
        (lose_the_manifest, BundleNotFound),
        (break_a_graph, BundleCorrupt),
        (spoil_the_weights, BundleUnsupported),
        (double_the_id, BundleCorrupt),
    ],
)
async def test_a_bundle_that_cannot_be_used_changes_nothing_and_is_named(
    service: Service,
    exported: Path,
    expected: dict[str, list[str]],
    damage: Callable[[Path], None],
    error: type[DragomanError],
    logs: list[EventDict],
) -> None:
    service.put(exported / "second", "tiny")
    damage(service.folder / "tiny")
    with pytest.raises(error) as caught:
        await service.reload()
    named = "bundles" if damage is lose_the_manifest else "tiny"
    assert named in caught.value.message
    assert [(line["event"], line["error"], line["reason"]) for line in logs] == [
        ("reload_failed", error.code, caught.value.message)
    ]
    assert service.outcomes == [ReloadOutcome.FAILED]
    assert [pair.model for pair in service.engine.pairs] == ["tiny"]
    assert await translated(service.engine) == expected["first"]
    shutil.rmtree(service.folder / "twin", ignore_errors=True)
    service.put(exported / "second", "tiny")
    assert await service.reload() == {"tiny": "loaded"}
    assert await translated(service.engine) == expected["second"]


async def test_one_damaged_bundle_keeps_the_others_from_changing_and_frees_them(
    service: Service, exported: Path, expected: dict[str, list[str]], logs: list[EventDict]
) -> None:
    service.put(exported / "reverse", "back")
    service.put(exported / "second", "tiny")
    spoil_the_weights(service.folder / "tiny")
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(BundleUnsupported):
            await service.reload()
        assert service.loaded == ["back", "tiny"]
        logs.clear()  # has the error, which a real log writes down and forgets
        await until(lambda: [model() for model in service.models] == [None, None])
    finally:
        gc.enable()
    assert [pair.model for pair in service.engine.pairs] == ["tiny"]
    assert await translated(service.engine) == expected["first"]


def refused_as_corrupt(cause: Exception) -> BundleCorrupt:
    error = BundleCorrupt("onnxruntime cannot load the graph")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (MemoryError(), r"bundle \S*/tiny could not be loaded: there is too little memory"),
        (
            refused_as_corrupt(MemoryError()),
            r"bundle \S*/tiny could not be loaded: there is too little memory",
        ),
        (
            refused_as_corrupt(RuntimeError("FAIL : Exception during initialization: std::bad_alloc")),
            r"bundle \S*/tiny could not be loaded: there is too little memory",
        ),
        (
            refused_as_corrupt(OSError(errno.ENOMEM, "secret")),
            r"bundle \S*/tiny could not be loaded: there is too little memory",
        ),
        (PermissionError(13, "secret"), r"bundle \S*/tiny could not be loaded: PermissionError"),
    ],
)
async def test_what_is_no_fault_of_the_bundle_is_said_to_be_none(
    service: Service, exported: Path, expected: dict[str, list[str]], fault: Exception, message: str
) -> None:
    def fail(_bundle: Bundle) -> None:
        raise fault

    service.on_load = fail
    service.put(exported / "second", "tiny")
    with pytest.raises(ReloadFailed, match=message) as caught:
        await service.reload()
    assert "secret" not in caught.value.message
    assert await translated(service.engine) == expected["first"]
    assert service.outcomes == [ReloadOutcome.FAILED]


class Held:
    """A loading that waits."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, _bundle: Bundle) -> None:
        self.reached.set()
        assert self.opened.wait(PATIENCE_S)

    async def wait_reached(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, PATIENCE_S)


async def test_a_second_reload_is_refused_and_requests_are_answered_meanwhile(
    service: Service, exported: Path, expected: dict[str, list[str]]
) -> None:
    held = service.on_load = Held()
    service.put(exported / "second", "tiny")
    first = asyncio.create_task(service.reload())
    await held.wait_reached()
    with pytest.raises(ReloadInProgress) as caught:
        await service.reload()
    assert caught.value.retryable
    assert await translated(service.engine) == expected["first"]
    held.opened.set()
    assert await first == {"tiny": "loaded"}
    assert service.outcomes == [ReloadOutcome.REFUSED, ReloadOutcome.CHANGED]
    assert await service.reload() == {"tiny": "unchanged"}


async def test_a_reload_goes_on_when_its_caller_leaves(
    service: Service, exported: Path, expected: dict[str, list[str]]
) -> None:
    held = service.on_load = Held()
    service.put(exported / "second", "tiny")
    caller = asyncio.create_task(service.reload())
    await held.wait_reached()
    caller.cancel()
    await asyncio.gather(caller, return_exceptions=True)
    with pytest.raises(ReloadInProgress):
        await service.reload()
    held.opened.set()
    await until(lambda: ReloadOutcome.CHANGED in service.outcomes)
    assert await translated(service.engine) == expected["second"]


async def test_a_stopping_service_is_not_reloaded(service: Service, exported: Path) -> None:
    held = service.on_load = Held()
    service.put(exported / "second", "tiny")
    reload = asyncio.create_task(service.reload())
    await held.wait_reached()
    service.engine.begin_drain()
    held.opened.set()
    with pytest.raises(ShuttingDown):
        await reload
    with pytest.raises(ShuttingDown):
        await service.reload()
    assert service.outcomes == []


async def test_the_log_says_what_became_of_every_bundle(
    service: Service, exported: Path, logs: list[EventDict]
) -> None:
    service.put(exported / "reverse", "back")
    report = await service.reloader.reload()
    (line,) = logs
    assert (line["event"], line["log_level"]) == ("reloaded", "info")
    assert (line["loaded"], line["unchanged"], line["removed"]) == (["back"], ["tiny"], [])
    assert line["seconds"] == round(report.seconds, 3)
    assert BundleChange("tiny", Change.UNCHANGED) in report.changes
