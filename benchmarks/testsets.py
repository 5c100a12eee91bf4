"""Parallel test sets read from a folder outside the repository (their licences forbid copying)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_SUFFIX = {"en": "en", "pt": "pt_BR"}
NAMES = ("flores200-dev", "pud")


@dataclass(frozen=True)
class TestSet:
    """One direction of a parallel test set.

    Attributes:
        name: file stem.
        source: language code of `sources`.
        target: language code of `references`.
        sources: lines.
        references: lines.
    """

    __test__ = False

    name: str
    source: str
    target: str
    sources: list[str]
    references: list[str]


def load(folder: Path, name: str, *, source: str, target: str) -> TestSet:
    """Read ``NAME.en`` and ``NAME.pt_BR`` of a folder."""
    sources, references = (
        (folder / f"{name}.{_SUFFIX[code]}").read_text(encoding="utf-8").rstrip("\n").split("\n")
        for code in (source, target)
    )
    if len(sources) != len(references):
        raise ValueError(f"{name}: {len(sources)} source lines but {len(references)} references")
    return TestSet(name, source, target, sources, references)
