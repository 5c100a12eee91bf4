"""Bundles changed as a careless or hostile maker would."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.bundle import MANIFEST_NAME, Bundle, sha256_of
from app.runtime.served_model import ServedModel, load_served_model

Edit = Callable[[dict[str, Any]], None]


def edit_manifest(folder: Path, edit: Edit) -> None:
    path = folder / MANIFEST_NAME
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))


def record(folder: Path, name: str) -> None:
    """Make the manifest agree with a file, as a bundle's maker would."""
    facts = {"size_bytes": (folder / name).stat().st_size, "sha256": sha256_of(folder / name)}
    edit_manifest(folder, lambda document: document["files"].__setitem__(name, facts))


def serve(bundle: Bundle) -> ServedModel:
    return load_served_model(bundle, variant="cpu-int8", max_rows=4, use_shortlist=True)
