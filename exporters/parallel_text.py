"""Parallel text from files: one table with both sides in columns, or two files line by line.

Plain, gzip (``.gz``) and zstd (``.zst``) files are read as streams, so their size does not matter.
"""

from __future__ import annotations

import gzip
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import IO, cast

from app.errors import InvalidOption


@dataclass(frozen=True)
class ParallelText:
    """Where the two sides lie.

    Attributes:
        path: a table of tab-separated columns; with `target_path`, the source side alone.
        target_path: the target side, with as many lines; None when `path` is a table.
        source_column: counted from 1, or from the end by -1, -2 and so on.
        target_column: likewise.
    """

    path: Path
    target_path: Path | None = None
    source_column: int = 1
    target_column: int = 2

    def __post_init__(self) -> None:
        """Refuse columns that no table has."""
        for name, column in (("source", self.source_column), ("target", self.target_column)):
            if column == 0:
                raise InvalidOption(
                    f"the {name} column is 0; columns are counted from 1, or from the end by -1, -2"
                )
        if self.target_path is None and self.source_column == self.target_column:
            raise InvalidOption(f"source and target are both column {self.source_column}; name two columns")

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Every pair of source and target text, in the file's order.

        Raises:
            InvalidOption: a file is missing, damaged or not UTF-8, a line lacks a column, or one of two
                files is longer. The message names the file and the line, never its text.
        """
        if self.target_path is None:
            return self._from_table()
        return _side_by_side(self.path, self.target_path)

    def _from_table(self) -> Iterator[tuple[str, str]]:
        num_needed = max(
            column if column > 0 else -column for column in (self.source_column, self.target_column)
        )
        source, target = (
            column - 1 if column > 0 else column for column in (self.source_column, self.target_column)
        )
        for number, line in enumerate(_lines(self.path), start=1):
            cells = line.split("\t")
            if len(cells) < num_needed:
                raise InvalidOption(
                    f"{self.path}, line {number}: the line has {len(cells)} tab-separated columns, columns "
                    f"{self.source_column} and {self.target_column} are wanted; name others, or mend the file"
                )
            if source % len(cells) == target % len(cells):
                raise InvalidOption(
                    f"{self.path}, line {number}: of {len(cells)} columns, {self.source_column} and "
                    f"{self.target_column} are the same one; name two columns"
                )
            yield cells[source], cells[target]


def _side_by_side(source_path: Path, target_path: Path) -> Iterator[tuple[str, str]]:
    sources, targets = _lines(source_path), _lines(target_path)
    number = 0
    while True:
        source, target = next(sources, None), next(targets, None)
        if source is None and target is None:
            return
        if source is None or target is None:
            shorter = source_path if source is None else target_path
            raise InvalidOption(
                f"{shorter} ends after line {number} and the other file goes on; the lines of {source_path} "
                f"and {target_path} must belong together, one by one"
            )
        number += 1
        yield source, target


def _lines(path: Path) -> Iterator[str]:
    """The lines without their ends, which are LF or CR LF; no other character ends a line."""
    number = 0
    try:
        with _opened(path) as file:
            for raw in file:
                number += 1
                yield raw.rstrip(b"\n").rstrip(b"\r").decode("utf-8")
    except UnicodeDecodeError as error:
        # Not chained: that error carries the text.
        raise InvalidOption(
            f"{path}, line {number}: byte {error.start + 1} is not UTF-8; convert the file to UTF-8"
        ) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InvalidOption(
            f"{path} cannot be read after line {number}: the compressed data is damaged or cut short; "
            "fetch the file again"
        ) from error
    except OSError as error:
        raise InvalidOption(f"{path} cannot be read after line {number}: {error.strerror}") from error


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    if path.suffix == ".gz":
        with gzip.open(path, "rb") as file:
            yield cast(IO[bytes], file)
    elif path.suffix == ".zst":
        zstd = _zstd(path)
        try:
            with zstd.open(path, "rb") as file:
                yield file
        except zstd.ZstdError as error:
            raise EOFError(str(error)) from error
    else:
        with path.open("rb") as file:
            yield file


def _zstd(path: Path) -> ModuleType:
    """The standard library's module, or before Python 3.14 its backport."""
    try:
        if sys.version_info >= (3, 14):
            import compression.zstd as zstd
        else:
            import backports.zstd as zstd
    except ModuleNotFoundError as error:
        raise InvalidOption(
            f"reading {path.name} needs the library backports.zstd, which is not installed; "
            "`pip install backports.zstd`, or unpack the file with `zstd -d`"
        ) from error
    return zstd
