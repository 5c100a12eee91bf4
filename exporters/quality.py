"""Measured scores go into a bundle's manifest and model card."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from app.bundle import MANIFEST_NAME, Bundle, open_bundle, sha256_of
from app.bundle.manifest import FileRecord, QualityScore
from exporters.export import MODEL_CARD_NAME, prepare_manifest
from exporters.model_card import QUALITY_HEADING, quality_section


def record_quality(path: Path, scores: Sequence[QualityScore]) -> Bundle:
    """Replace the scores a bundle states.

    Args:
        path: the bundle's folder.
        scores: all scores it shall state from now on.

    Raises:
        BundleError: the bundle cannot be opened.
    """
    with _sole_writer(path):
        return _replace_quality(path, scores)


def _replace_quality(path: Path, scores: Sequence[QualityScore]) -> Bundle:
    bundle = open_bundle(path)
    card = bundle.file(MODEL_CARD_NAME)
    text = card.read_text(encoding="utf-8").split(QUALITY_HEADING)[0].rstrip() + "\n"
    # Both are written in full before either takes its place, so that a full disk changes nothing.
    new_card = card.with_name(f"{card.name}.partial")
    new_card.write_text(f"{text}\n{quality_section(scores)}", encoding="utf-8")
    record = FileRecord(size_bytes=new_card.stat().st_size, sha256=sha256_of(new_card))
    manifest = bundle.manifest.model_copy(
        update={"quality": tuple(scores), "files": {**bundle.manifest.files, MODEL_CARD_NAME: record}}
    )
    new_manifest = prepare_manifest(path, manifest)
    new_card.replace(card)
    new_manifest.replace(path / MANIFEST_NAME)
    return Bundle(path, manifest)


def add_quality(path: Path, scores: Sequence[QualityScore]) -> Bundle:
    """Add scores to those a bundle states; one measured in the same way takes its predecessor's place.

    Args:
        path: the bundle's folder.
        scores: the new ones.

    Raises:
        BundleError: the bundle cannot be opened.
    """
    with _sole_writer(path):
        stated = open_bundle(path, verify=False).manifest.quality
        merged = {_way(score): score for score in (*stated, *scores)}
        return _replace_quality(path, list(merged.values()))


@contextmanager
def _sole_writer(path: Path) -> Iterator[None]:
    """Wait for whoever else records scores in the bundle: each would drop the other's."""
    if not path.is_dir():
        yield  # there is nothing to guard, and opening the bundle says so
        return
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _way(score: QualityScore) -> tuple[object, ...]:
    """What two scores must share to be of the same measurement; greedy search knows no length penalty."""
    length_penalty = None if score.beam_size == 1 else score.length_penalty
    return (score.test_set, score.variant, score.shortlist, score.beam_size, length_penalty)
