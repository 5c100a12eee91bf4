"""A new shortlist goes into a bundle: the file, its record, the model card, and no score of the old one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from app.bundle import Bundle, open_bundle, sha256_of
from app.bundle.manifest import FileRecord, QualityScore
from app.decoding.shortlist import Shortlist
from app.errors import BundleUnsupported, InvalidOption
from exporters.export import MODEL_CARD_NAME, write_manifest
from exporters.model_card import QUALITY_HEADING, quality_section

_HEADING = "## Shortlist"


def check_takes_shortlist(bundle: Bundle) -> None:
    """Refuse a bundle whose graphs were built without a shortlist's input.

    Raises:
        BundleUnsupported: as said.
    """
    lacking = [
        name
        for name, graphs in bundle.manifest.variants.items()
        if graphs.shortlist_step is None and name != "cuda-fp16"  # which never has any
    ]
    if lacking:
        raise BundleUnsupported(
            f"bundle {bundle.manifest.id} has no shortlist graphs for {', '.join(lacking)}, so it cannot use "
            "a shortlist; write the lists to a file with --out, and export the model again with them"
        )


def put_into_bundle(
    path: Path, shortlist: Shortlist, provenance: Mapping[str, str], *, command: str
) -> Bundle:
    """Replace a bundle's shortlist.

    The new file is named by its checksum, so the old one stays whole until the manifest, which is replaced in
    one step, no longer names it. Scores measured with the old shortlist leave the manifest and the model
    card, since they say nothing of the new one.

    Args:
        path: the bundle's folder.
        shortlist: for the bundle's own vocabulary.
        provenance: facts about it for the manifest and the card.
        command: of ``dragoman export``, which made it.

    Raises:
        BundleError: the bundle cannot be opened, or has no shortlist graphs.
        InvalidOption: the lists are of another vocabulary.
    """
    bundle = open_bundle(path)
    manifest = bundle.manifest
    check_takes_shortlist(bundle)
    if shortlist.vocabulary_size != manifest.sizes.vocabulary_size:
        raise InvalidOption(
            f"the shortlist is for a vocabulary of {shortlist.vocabulary_size} tokens, bundle "
            f"{manifest.id} has {manifest.sizes.vocabulary_size}; use the bundle's own tokenizer"
        )
    quality = tuple(score for score in manifest.quality if not score.shortlist)
    card = _card(bundle.file(MODEL_CARD_NAME).read_text(encoding="utf-8"), provenance, quality, command)

    new_list, new_card = path / "shortlist.partial", path / f"{MODEL_CARD_NAME}.partial"
    shortlist.save(new_list)
    new_card.write_text(card, encoding="utf-8")
    name = f"shortlist-{sha256_of(new_list)[:12]}.bin"
    files = {key: value for key, value in manifest.files.items() if key != manifest.shortlist}
    files |= {name: _record(new_list), MODEL_CARD_NAME: _record(new_card)}
    kept = {key: value for key, value in manifest.provenance.items() if not key.startswith("shortlist_")}
    updated = manifest.model_copy(
        update={
            "shortlist": name,
            "files": files,
            "quality": quality,
            "provenance": kept | dict(provenance),
        }
    )
    new_list.replace(path / name)
    new_card.replace(path / MODEL_CARD_NAME)
    write_manifest(path, updated)
    if manifest.shortlist is not None and manifest.shortlist != name:
        (path / manifest.shortlist).unlink()
    return Bundle(path, updated)


def _record(path: Path) -> FileRecord:
    return FileRecord(size_bytes=path.stat().st_size, sha256=sha256_of(path))


def _card(text: str, facts: Mapping[str, str], quality: Sequence[QualityScore], command: str) -> str:
    """The card with a section on the shortlist, and the scores that still hold."""
    rows = "\n".join(f"| {key} | `{value}` |" for key, value in sorted(facts.items()))
    body = text.split(QUALITY_HEADING)[0].split(_HEADING)[0].rstrip()
    card = f"""{body}

{_HEADING}

Made by `dragoman export {command}`; it replaces the one that the sections above may name.

| fact | value |
|---|---|
{rows}
"""
    return f"{card}\n{quality_section(quality)}" if quality else card
