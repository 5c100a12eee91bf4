"""Text from files: a table with its columns, two files line by line, or one side alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from app.errors import InvalidOption
from model.data.text_files import OnRead, lines_of


@dataclass(frozen=True)
class ParallelText:
    """Where the two sides lie.

    Attributes:
        path: a table of tab-separated columns; with `target_path`, the source side alone.
        target_path: the target side, with as many lines; None when `path` is a table.
        source_column: counted from 1, or from the end by -1, -2 and so on.
        target_column: likewise.
        where: column -> the values of the rows that are wanted; other rows are passed over.
    """

    path: Path
    target_path: Path | None = None
    source_column: int = 1
    target_column: int = 2
    where: Mapping[int, Collection[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse columns that no table has."""
        _check_column("source", self.source_column)
        _check_column("target", self.target_column)
        _check_where(self.where)
        if self.target_path is None and self.source_column == self.target_column:
            raise InvalidOption(f"source and target are both column {self.source_column}; name two columns")
        if self.target_path is not None and self.where:
            raise InvalidOption(
                "`where` chooses rows of a table, and two files of plain lines are given; leave it out, or "
                "join the files to a table"
            )

    def pairs(self, *, on_read: OnRead | None = None) -> Iterator[tuple[str, str]]:
        """Every pair of source and target text, in the file's order.

        Args:
            on_read: is told of the progress.

        Raises:
            InvalidOption: a file is missing, damaged or not UTF-8, a line lacks a column, or one of two
                files is longer. The message names the file and the line, never its text.
        """
        if self.target_path is None:
            return self._from_table(on_read)
        return _side_by_side(self.path, self.target_path, on_read)

    def _from_table(self, on_read: OnRead | None) -> Iterator[tuple[str, str]]:
        source, target = _index(self.source_column), _index(self.target_column)
        wanted = (self.source_column, self.target_column)
        for number, cells in _rows(self.path, wanted, self.where, on_read):
            if source % len(cells) == target % len(cells):
                raise InvalidOption(
                    f"{self.path}, line {number}: of {len(cells)} columns, {self.source_column} and "
                    f"{self.target_column} are the same one; name two columns"
                )
            yield cells[source], cells[target]


@dataclass(frozen=True)
class MonolingualText:
    """Where text of one language lies.

    Attributes:
        path: plain lines, or a table of tab-separated columns.
        column: counted from 1, or from the end by -1, -2 and so on; None: a line is a text.
        where: column -> the values of the rows that are wanted; other rows are passed over.
    """

    path: Path
    column: int | None = None
    where: Mapping[int, Collection[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse columns that no table has."""
        if self.column is not None:
            _check_column("text's", self.column)
        elif self.where:
            raise InvalidOption("`where` chooses rows of a table; name the text's column too")
        _check_where(self.where)

    def texts(self, *, on_read: OnRead | None = None) -> Iterator[str]:
        """Every text, in the file's order.

        Args:
            on_read: is told of the progress.

        Raises:
            InvalidOption: as for `ParallelText.pairs`.
        """
        if self.column is None:
            return lines_of(self.path, on_read=on_read)
        index = _index(self.column)
        return (cells[index] for _, cells in _rows(self.path, (self.column,), self.where, on_read))


def _check_column(name: str, column: int) -> None:
    if column == 0:
        raise InvalidOption(f"the {name} column is 0; columns are counted from 1, or from the end by -1, -2")


def _check_where(where: Mapping[int, Collection[str]]) -> None:
    for column, values in where.items():
        _check_column("chosen", column)
        if isinstance(values, str) or not values:
            raise InvalidOption(f"`where` has no list of values for column {column}; give at least one value")


def _index(column: int) -> int:
    return column - 1 if column > 0 else column


def _rows(
    path: Path, columns: Sequence[int], where: Mapping[int, Collection[str]], on_read: OnRead | None
) -> Iterator[tuple[int, list[str]]]:
    """The line number and the cells of the wanted rows, each of which has all the columns."""
    asked = [*columns, *(column for column in where if column not in columns)]
    num_needed = max(map(abs, asked))
    conditions = [(_index(column), frozenset(values)) for column, values in where.items()]
    for number, line in enumerate(lines_of(path, on_read=on_read), start=1):
        cells = line.split("\t")
        if len(cells) < num_needed:
            word = "columns" if len(asked) > 1 else "column"
            raise InvalidOption(
                f"{path}, line {number}: the line has {len(cells)} tab-separated columns, {word} "
                f"{' and '.join(map(str, asked))} are wanted; name others, or mend the file"
            )
        if all(cells[index] in values for index, values in conditions):
            yield number, cells


def _side_by_side(source_path: Path, target_path: Path, on_read: OnRead | None) -> Iterator[tuple[str, str]]:
    sources = lines_of(source_path, on_read=on_read)
    # A pair counts as one line; the bytes of both sides count.
    targets = lines_of(
        target_path, on_read=None if on_read is None else lambda num_bytes, _: on_read(num_bytes, 0)
    )
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


def _without_lines(on_read: OnRead) -> OnRead:
    """A pair counts as one line, that of its source; the bytes of both files count."""
    return lambda num_bytes, _: on_read(num_bytes, 0)
