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
    """Read ``NAME.en`` and ``NAME.pt_BR`` of a folder.

    Raises:
        SystemExit: a file cannot be read, or the two do not have equally many lines.
    """
    sources, references = (_lines(folder / f"{name}.{_SUFFIX[code]}") for code in (source, target))
    if len(sources) != len(references):
        raise SystemExit(
            f"{folder / name} has {len(sources)} source lines and {len(references)} references; mend the "
            "files"
        )
    return TestSet(name, source, target, sources, references)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise SystemExit(
            f"{path} cannot be read ({reason}); name a folder with {' and '.join(NAMES)}, each as .en and "
            ".pt_BR"
        ) from error
