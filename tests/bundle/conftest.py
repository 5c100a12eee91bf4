"""A bundle to be damaged."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_checkpoint, tiny_options

from exporters.export import export_bundle


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("original") / "tiny"
    export_bundle(tiny_checkpoint(shortlist=True), path, tiny_options())
    return path


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "bundles" / "tiny"))
