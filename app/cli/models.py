"""`dragoman models`: what bundles there are, and whether they are whole."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from app.bundle import Bundle, Manifest, open_bundle
from app.cli.opening import bundle_folders
from app.errors import BundleError

_MEBIBYTE = 1024 * 1024


def list_models(directory: Path, *, as_json: bool) -> None:
    """Print every bundle in a folder, without reading the large files.

    Raises:
        BundleError: one cannot be opened.
    """
    bundles = [open_bundle(folder, verify=False) for folder in bundle_folders(directory)]
    if as_json:
        print(json.dumps([_facts(bundle) for bundle in bundles], indent=2, ensure_ascii=False))
        return
    table = Table(caption=f"in {directory.resolve()}")
    for heading in ("folder", "id", "pairs", "variants", "MiB", "BLEU", "licence"):
        table.add_column(heading, overflow="fold")
    for bundle in bundles:
        manifest = bundle.manifest
        table.add_row(
            bundle.path.name,
            manifest.id,
            ", ".join(f"{pair.source} to {pair.target}" for pair in manifest.pairs),
            ", ".join(manifest.variants),
            f"{_num_bytes(manifest) / _MEBIBYTE:.1f}",
            "\n".join(f"{score.bleu:.1f} {score.test_set} {score.variant}" for score in manifest.quality)
            or "-",
            manifest.licence,
        )
    Console().print(table)


def verify_models(directory: Path, *, as_json: bool) -> bool:
    """Check every file of every bundle against its manifest; True if all are whole."""
    results: list[dict[str, str | bool]] = []
    for folder in bundle_folders(directory):
        try:
            manifest = open_bundle(folder, verify=True).manifest
            message = f"{len(manifest.files)} files, {_num_bytes(manifest)} bytes"
            results.append({"folder": str(folder), "ok": True, "message": message})
        except BundleError as error:
            results.append({"folder": str(folder), "ok": False, "message": error.message})
    if as_json:
        print(json.dumps(results, indent=2, ensure_ascii=False))
    else:
        for result in results:
            print(f"{'ok    ' if result['ok'] else 'FAILED'} {result['folder']}: {result['message']}")
    return all(result["ok"] for result in results)


def _num_bytes(manifest: Manifest) -> int:
    return sum(record.size_bytes for record in manifest.files.values())


def _facts(bundle: Bundle) -> dict[str, object]:
    manifest = bundle.manifest
    return {
        "id": manifest.id,
        "pairs": [{"source": pair.source, "target": pair.target} for pair in manifest.pairs],
        "variants": list(manifest.variants),
        "size_bytes": _num_bytes(manifest),
        "quality": [score.model_dump(mode="json") for score in manifest.quality],
        "licence": manifest.licence,
        "path": str(bundle.path),
    }
