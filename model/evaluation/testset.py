"""Test sets: source lines and their references, from two files or from one table."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from app.errors import InvalidOption

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
"""Names of test sets and systems: they become names of files and columns."""


@dataclass(frozen=True)
class TestSet:
    """Lines to be translated, and what a person made of them.

    Attributes:
        name: as the user calls it.
        sources: N lines.
        references: N lines, one for each source.
    """

    __test__ = False

    name: str
    sources: tuple[str, ...]
    references: tuple[str, ...]

    def first(self, num_lines: int) -> TestSet:
        """The test set cut to its first lines."""
        return replace(self, sources=self.sources[:num_lines], references=self.references[:num_lines])


def read_lines(path: Path) -> list[str]:
    """The lines of a UTF-8 file; only LF and CRLF end one, as in `dragoman translate`.

    Raises:
        InvalidOption: it is missing, or not UTF-8.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise InvalidOption(f"{path} cannot be read ({error.strerror}); name a text file") from None
    except UnicodeDecodeError as error:
        raise InvalidOption(f"{path} is not UTF-8 (byte {error.start + 1}); convert it first") from None
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def read_testset(description: str, *, source_column: int = 1, target_column: int = 2) -> TestSet:
    """Read ``NAME=SOURCE_FILE,REFERENCE_FILE`` or ``NAME=TABLE``.

    Args:
        description: as on the command line; a table is tab-separated, without a heading.
        source_column: of a table, from 1.
        target_column: likewise, of the references.

    Raises:
        InvalidOption: it cannot be read, is empty, or the sides do not match; the message says where.
    """
    name, separator, value = description.partition("=")
    if not separator or not NAME_PATTERN.fullmatch(name):
        raise InvalidOption(
            f"--testset {description} is not NAME=SOURCE_FILE,REFERENCE_FILE or NAME=TABLE.tsv; "
            "a NAME has letters, digits, dots, dashes and underscores"
        )
    files = [part.strip() for part in value.split(",")]
    if len(files) > 2 or not all(files):
        raise InvalidOption(
            f"--testset {description} names {len(files)} files; give a source and a reference file, or one "
            "table. A comma in a file's name does not work here: link to it under another name"
        )
    if len(files) == 2:
        sources, references = (read_lines(Path(file)) for file in files)
        if len(sources) != len(references):
            raise InvalidOption(
                f"test set {name} has {len(sources)} source lines but {len(references)} references; "
                "line by line they must belong together"
            )
    else:
        sources, references = _columns(Path(files[0]), source_column, target_column)
    if not sources:
        raise InvalidOption(f"test set {name} has no line; give at least one")
    for number, reference in enumerate(references, 1):
        if not reference.strip():
            raise InvalidOption(f"line {number} of test set {name} has an empty reference; remove the line")
    return TestSet(name, tuple(sources), tuple(references))


def _columns(path: Path, source_column: int, target_column: int) -> tuple[list[str], list[str]]:
    if min(source_column, target_column) < 1 or source_column == target_column:
        raise InvalidOption(
            f"--source-column is {source_column} and --target-column {target_column}; they count from 1 and "
            "must differ"
        )
    sources, references = [], []
    for number, line in enumerate(read_lines(path), 1):
        cells = line.split("\t")
        if len(cells) < max(source_column, target_column):
            raise InvalidOption(
                f"{path}, line {number} has {len(cells)} columns, but column "
                f"{max(source_column, target_column)} is wanted; see --source-column and --target-column, or "
                "name two files, SOURCE,REFERENCE"
            )
        sources.append(cells[source_column - 1])
        references.append(cells[target_column - 1])
    return sources, references
