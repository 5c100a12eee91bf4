"""When a reload may take a bundle out of service."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from app.bundle import Bundle, Manifest
from app.errors import BundleCorrupt
from app.runtime.reload import Change, Reloader, ReloadOutcome
from app.runtime.served_model import ServedModel


class Engine:
    """Remembers what it was told to serve."""

    draining = False

    def __init__(self) -> None:
        self.orders: list[list[str]] = []

    async def exchange(self, loaded: Sequence[ServedModel], *, order: Sequence[str]) -> None:
        assert not loaded
        self.orders.append(list(order))


@pytest.fixture
def bundles(tmp_path: Path) -> list[Bundle]:
    made = []
    for id_ in ("back", "tiny"):
        (tmp_path / id_).mkdir()
        made.append(Bundle(tmp_path / id_, cast(Manifest, SimpleNamespace(id=id_))))
    return made


def reloader(engine: Engine, bundles: list[Bundle], outcomes: list[ReloadOutcome]) -> Reloader:
    def load(bundle: Bundle) -> ServedModel:
        raise AssertionError(f"{bundle.path} was loaded")

    return Reloader(engine, bundles, read=lambda: bundles[1:], load=load, observe=outcomes.append)


async def test_a_folder_that_only_lost_its_manifest_is_no_removal(bundles: list[Bundle]) -> None:
    engine, outcomes = Engine(), list[ReloadOutcome]()
    with pytest.raises(BundleCorrupt, match=r"back is still there .* restore the bundle back"):
        await reloader(engine, bundles, outcomes).reload()
    assert (engine.orders, outcomes) == ([], [ReloadOutcome.FAILED])


async def test_a_link_to_nothing_is_no_removal(bundles: list[Bundle], tmp_path: Path) -> None:
    (tmp_path / "back").rmdir()
    (tmp_path / "back").symlink_to(tmp_path / "nowhere")
    with pytest.raises(BundleCorrupt, match="back is still there"):
        await reloader(Engine(), bundles, []).reload()


async def test_a_folder_that_is_gone_is_a_removal(bundles: list[Bundle], tmp_path: Path) -> None:
    (tmp_path / "back").rmdir()
    engine, outcomes = Engine(), list[ReloadOutcome]()
    report = await reloader(engine, bundles, outcomes).reload()
    assert report.bundles(Change.REMOVED) == ["back"]
    assert (engine.orders, outcomes) == ([["tiny"]], [ReloadOutcome.CHANGED])
