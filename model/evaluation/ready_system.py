"""Translations that are there already: of another system, or kept from an earlier evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from app.errors import InvalidOption
from model.evaluation.system import Translations
from model.evaluation.testset import TestSet, read_lines


@dataclass(frozen=True)
class ReadySystem:
    """A file of translations, or a folder with a file TEST_SET.txt for each test set.

    Attributes:
        name: as the user calls it.
        path: the file or folder.
    """

    name: str
    path: Path

    @property
    def facts(self) -> dict[str, object]:
        """Where they lie."""
        return {"kind": "file", "path": str(self.path)}

    def check(self, testset: TestSet) -> None:
        """Refuse files that do not fit.

        Raises:
            InvalidOption: there is no file for the test set, or it has another number of lines.
        """
        self.translate(testset)

    def translate(self, testset: TestSet) -> Translations:
        """Read them.

        Raises:
            InvalidOption: as `check`.
        """
        path = translations_path(self.path, testset.name) if self.path.is_dir() else self.path
        lines = read_lines(path)
        if len(lines) != len(testset.sources):
            raise InvalidOption(
                f"{path} has {len(lines)} lines, test set {testset.name} has {len(testset.sources)}; "
                "each source line needs one translation"
            )
        return Translations(tuple(lines), None)


def translations_path(folder: Path, testset_name: str) -> Path:
    """Where a folder keeps one system's translations of a test set."""
    return folder / f"{testset_name}.txt"
