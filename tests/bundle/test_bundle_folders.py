"""What lies in a folder of bundles: nothing that may be a bundle is passed over in silence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from app.bundle import MANIFEST_NAME, bundle_folders, discover
from app.errors import BundleCorrupt


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("one", "two", "no-bundle"):
        (tmp_path / "bundles" / name).mkdir(parents=True)
    for name in ("one", "two"):
        (tmp_path / "bundles" / name / MANIFEST_NAME).write_text("{}")
    (tmp_path / "bundles" / "README").write_text("about them")
    return tmp_path / "bundles"


def test_folders_with_a_manifest_are_bundles_and_nothing_else_is(folder: Path) -> None:
    assert [path.name for path in bundle_folders(folder)] == ["one", "two"]


def dangling_folder(folder: Path) -> None:
    (folder / "three").symlink_to(folder / "nowhere")


def dangling_manifest(folder: Path) -> None:
    (folder / "two" / MANIFEST_NAME).unlink()
    (folder / "two" / MANIFEST_NAME).symlink_to(folder / "nowhere")


def loop(folder: Path) -> None:
    (folder / "two" / MANIFEST_NAME).unlink()
    (folder / "two" / MANIFEST_NAME).symlink_to(MANIFEST_NAME)


@pytest.mark.parametrize("spoil", [dangling_folder, dangling_manifest, loop])
def test_what_cannot_be_looked_into_is_an_error_that_names_it(
    folder: Path, spoil: Callable[[Path], None]
) -> None:
    spoil(folder)
    with pytest.raises(BundleCorrupt, match=r"two|three"):
        discover(folder)


@pytest.mark.parametrize("unreadable", ["two", f"two/{MANIFEST_NAME}"])
def test_what_may_not_be_read_is_an_error_that_names_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, unreadable: str
) -> None:
    # Permissions bind everybody but root, whom tests in containers often run as.
    refused = folder / unreadable
    stat, read_bytes = Path.stat, Path.read_bytes

    def refuse(path: Path) -> None:
        if path == refused or refused in path.parents:
            raise PermissionError(13, "Permission denied", str(path))

    def guarded_stat(path: Path, **named: bool) -> object:
        if path.parent == refused:
            refuse(path)
        return stat(path, **named)

    def guarded_read(path: Path) -> bytes:
        refuse(path)
        return read_bytes(path)

    (folder / "one" / MANIFEST_NAME).unlink()
    monkeypatch.setattr(Path, "stat", guarded_stat)
    monkeypatch.setattr(Path, "read_bytes", guarded_read)
    with pytest.raises(BundleCorrupt, match=r"two.*Permission denied"):
        discover(folder)
