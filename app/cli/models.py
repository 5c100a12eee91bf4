"""`dragoman models`: what bundles there are, and whether they are whole."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from app.bundle import Bundle, Manifest, bundle_folders, open_bundle
from app.bundle.manifest import QualityScore
from app.errors import BundleError

_MEGABYTE = 1_000_000
_PREFERRED_TEST_SET = "flores200-dev"
_HEADINGS = ("bundle", "pair", "variant", "MB", "BLEU", "chrF", "licence")
_RIGHT_ALIGNED = frozenset({"MB", "BLEU", "chrF"})


def list_models(directory: Path, *, as_json: bool) -> None:
    """Print every bundle in a folder, without reading the large files: one line per variant.

    Raises:
        BundleError: one cannot be opened.
    """
    bundles = [open_bundle(folder, verify=False) for folder in bundle_folders(directory)]
    if as_json:
        print(json.dumps([_facts(bundle) for bundle in bundles], indent=2, ensure_ascii=False))
        return
    rows = [_HEADINGS, *(row for bundle in bundles for row in _rows(bundle.manifest))]
    print(_aligned(rows))
    test_sets = sorted({name for bundle in bundles if (name := _test_set(bundle.manifest)) is not None})
    if test_sets:
        print(f"BLEU and chrF on {', '.join(test_sets)}; --json has every test set")
    print(f"in {directory.resolve()}")


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


def _rows(manifest: Manifest) -> list[tuple[str, ...]]:
    """A line per variant; the size is the whole bundle's, whose variants share their weights."""
    first, *others = (f"{pair.source}-{pair.target}" for pair in manifest.pairs)
    pair = f"{first} and {len(others)} more" if others else first
    test_set = _test_set(manifest)
    rows: list[tuple[str, ...]] = []
    for variant in manifest.variants:
        score = _score(manifest.quality, test_set, variant)
        rows.append(
            (
                manifest.id,
                pair,
                str(variant),
                f"{_num_bytes(manifest) / _MEGABYTE:.1f}",
                "-" if score is None else f"{score.bleu:.1f}",
                "-" if score is None else f"{score.chrf:.1f}",
                manifest.licence,
            )
        )
    return rows


def _test_set(manifest: Manifest) -> str | None:
    """The test set whose scores are shown; None if the bundle was never measured."""
    names = [score.test_set for score in manifest.quality]
    return _PREFERRED_TEST_SET if _PREFERRED_TEST_SET in names else next(iter(names), None)


def _score(scores: Sequence[QualityScore], test_set: str | None, variant: str) -> QualityScore | None:
    return next((score for score in scores if (score.test_set, score.variant) == (test_set, variant)), None)


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    """Columns of equal width, two spaces apart; nothing is wrapped or cut."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if heading in _RIGHT_ALIGNED else cell.ljust(width)
            for cell, width, heading in zip(row, widths, _HEADINGS, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


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
