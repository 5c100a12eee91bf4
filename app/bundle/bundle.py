"""Opening bundles: every file is checked against the manifest before anything uses it."""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from app.bundle.manifest import FORMAT_VERSION, MANIFEST_NAME, FileRecord, Manifest
from app.errors import BundleCorrupt, BundleNotFound, BundleUnsupported

_MAX_MANIFEST_BYTES = 4 * 1024 * 1024
_CHUNK_BYTES = 1024 * 1024
_NOT_OURS = frozenset({"lost+found"})
"""What file systems put into their root, for nobody to read."""


@dataclass(frozen=True)
class Bundle:
    """A verified folder.

    Attributes:
        path: the folder.
        manifest: what it states.
    """

    path: Path
    manifest: Manifest

    def file(self, name: str) -> Path:
        """The path of a file the manifest records."""
        if name not in self.manifest.files:
            raise BundleCorrupt(f"bundle {self.path} records no file {name}; export the bundle again")
        return self.path / name


def default_directory() -> Path:
    """The folder of the bundles shipped with the service."""
    return Path(__file__).resolve().parent.parent / "bundles"


def discover(directory: Path) -> tuple[Bundle, ...]:
    """Open every bundle that lies in `directory`, or `directory` itself, sorted by id.

    Raises:
        BundleNotFound: the folder does not exist or holds no bundle.
        BundleCorrupt: a bundle is damaged, or two bundles share an id.
        BundleUnsupported: a bundle is of another format version.
    """
    by_id: dict[str, Bundle] = {}
    for bundle in map(open_bundle, bundle_folders(directory)):
        if (other := by_id.setdefault(bundle.manifest.id, bundle)) is not bundle:
            raise BundleCorrupt(
                f"{other.path} and {bundle.path} have the same id {bundle.manifest.id}; remove one of them"
            )
    return tuple(by_id[key] for key in sorted(by_id))


def bundle_folders(directory: Path) -> Iterator[Path]:
    """Folders that hold a manifest: `directory` itself, or those in it, by name.

    Raises:
        BundleNotFound: the folder does not exist or holds no bundle.
        BundleCorrupt: what is in it cannot be seen: a link to nothing, or no permission.
    """
    if (directory / MANIFEST_NAME).is_file():
        yield directory
        return
    if not directory.is_dir():
        raise BundleNotFound(
            f"{directory} is not a folder; name a folder of bundles, or make one with `dragoman export`"
        )
    try:
        paths = sorted(directory.iterdir())
    except OSError as error:
        raise BundleCorrupt(
            f"{directory} cannot be listed ({error.strerror}); let the service read it"
        ) from error
    folders = [path for path in paths if path.name not in _NOT_OURS and _has_manifest(path)]
    if not folders:
        raise BundleNotFound(
            f"no bundle (a folder with {MANIFEST_NAME}) lies in {directory}; make one with `dragoman export`"
        )
    yield from folders


def _has_manifest(path: Path) -> bool:
    """Whether this is a bundle; what cannot be looked into is not taken for none."""
    manifest = path / MANIFEST_NAME
    try:
        manifest.stat()
    except NotADirectoryError:
        return False
    except FileNotFoundError:
        if any(place.is_symlink() for place in (path, manifest)):
            raise BundleCorrupt(f"{path} or its {MANIFEST_NAME} is a link to nothing; mend it") from None
        return False
    except OSError as error:
        raise BundleCorrupt(
            f"{manifest} cannot be read ({error.strerror}); mend the link, or let the service read it"
        ) from error
    return True


def open_bundle(path: Path, *, verify: bool = True) -> Bundle:
    """Read and check one bundle.

    Args:
        path: its folder.
        verify: compare every file's size and sha256 with the manifest.

    Raises:
        BundleNotFound: there is no manifest.
        BundleUnsupported: its format version is not ours.
        BundleCorrupt: the manifest is not valid, or a file is missing, unreadable, altered or a link outside.
    """
    manifest_path = path / MANIFEST_NAME
    if not manifest_path.is_file():
        raise BundleNotFound(
            f"{path} has no {MANIFEST_NAME}, so it is not a finished bundle; export it again"
        )
    try:
        manifest = _read_manifest(manifest_path)
        for name, record in manifest.files.items():
            _check_file(path, name, record, verify=verify)
    except OSError as error:
        raise BundleCorrupt(
            f"{error.filename or path} cannot be read ({error.strerror}); let the service read it"
        ) from error
    return Bundle(path, manifest)


def _read_manifest(path: Path) -> Manifest:
    _check_is_inside(path, path.parent)
    if (size := path.stat().st_size) > _MAX_MANIFEST_BYTES:
        raise BundleCorrupt(
            f"{path} has {size} bytes; a manifest has at most {_MAX_MANIFEST_BYTES}. Export it again"
        )
    raw = path.read_bytes()
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BundleCorrupt(f"{path} is not JSON; restore the file or export the bundle again") from error
    version = document.get("format_version") if isinstance(document, dict) else None
    if version != FORMAT_VERSION:
        raise BundleUnsupported(
            f"{path} states format version {reprlib.repr(version)}; this version of dragoman reads "
            f"{FORMAT_VERSION}. Export the bundle again with this version"
        )
    try:
        return Manifest.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the document"
        raise BundleCorrupt(
            f"{path}: {where}: {first['msg']} ({error.error_count()} such faults); export the bundle again"
        ) from error


def _check_file(folder: Path, name: str, record: FileRecord, *, verify: bool) -> None:
    path = folder / name
    if not path.is_file():
        raise BundleCorrupt(f"{path} is missing; restore it or export the bundle again")
    _check_is_inside(path, folder)
    if (size := path.stat().st_size) != record.size_bytes:
        raise BundleCorrupt(
            f"{path} has {size} bytes, the manifest says {record.size_bytes}; restore it or export the "
            "bundle again"
        )
    if verify and (found := sha256_of(path)) != record.sha256:
        raise BundleCorrupt(
            f"{path} has sha256 {found}, the manifest says {record.sha256}; restore it or export the "
            "bundle again"
        )


def _check_is_inside(path: Path, folder: Path) -> None:
    if path.resolve().parent != folder.resolve():
        raise BundleCorrupt(f"{path} is a link out of its bundle; replace it by the file itself")


def sha256_of(path: Path) -> str:
    """Hex sha256 of a file, read in chunks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
