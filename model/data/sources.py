"""A source of training pairs, as a training configuration names it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from app.errors import InvalidOption
from model.data.parallel_text import ParallelText
from model.data.sampling import lowest_hashes
from model.data.text_files import OnRead

Values = Annotated[list[str], Field(min_length=1)]


class SourceConfig(BaseModel):
    """One ``[[data.source]]`` of a training configuration.

    Attributes:
        name: what reports and file names call it.
        path: a table of tab-separated columns, plain, ``.gz`` or ``.zst``; with `target_path`, the source
            side alone.
        target_path: the target side, line by line.
        source_column: of the table, counted from 1, or from the end by -1, -2 and so on.
        target_column: likewise.
        where: column, as a string -> the values of the rows that are wanted.
        sample: take so many pairs, those whose source texts have the lowest keyed hashes; all if None. They
            are taken before anything is filtered.
        weight: share of the pairs drawn for batches, in relation to the other sources' weights.
        reverse: the file's target side becomes the source, as back-translation wants it. `source_column`,
            `sample` and the like still speak of the file's own sides.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    path: Path
    target_path: Path | None = None
    source_column: int = 1
    target_column: int = 2
    where: dict[str, Values] = Field(default_factory=dict)
    sample: int | None = Field(default=None, ge=1)
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    reverse: bool = False

    @model_validator(mode="after")
    def _two_files_have_no_columns(self) -> SourceConfig:
        given = sorted({"source_column", "target_column"} & self.model_fields_set)
        if self.target_path is not None and given:
            raise ValueError(
                f"{' and '.join(given)} name columns of a table, and target_path says that the two sides are "
                "files of plain lines; leave one or the other out"
            )
        return self

    @model_validator(mode="after")
    def _columns_exist(self) -> SourceConfig:
        try:
            self.text()
        except InvalidOption as error:
            raise ValueError(error.message) from error
        return self

    def text(self) -> ParallelText:
        """Where the pairs lie.

        Raises:
            InvalidOption: the columns are impossible.
        """
        return ParallelText(
            self.path,
            target_path=self.target_path,
            source_column=self.source_column,
            target_column=self.target_column,
            where={_column(column): values for column, values in self.where.items()},
        )

    def files(self) -> tuple[Path, ...]:
        """The files that are read."""
        return (self.path,) if self.target_path is None else (self.path, self.target_path)


def pairs_of(source: SourceConfig, *, seed: int, on_read: OnRead | None = None) -> Iterator[tuple[str, str]]:
    """The pairs of a source, as a stream; a sample is held in memory.

    Args:
        source: whose pairs; all come in the order of the file, a sample in the order of its hashes.
        seed: of the sample; without a sample nothing depends on it.
        on_read: is told of the progress through the files.

    Raises:
        InvalidOption: as for `ParallelText.pairs`.
    """
    pairs = source.text().pairs(on_read=on_read)
    if source.sample is not None:
        pairs = lowest_hashes(
            pairs,
            num_items=source.sample,
            seed=seed,
            text_of=lambda pair: pair[0],
            tie_of=lambda pair: pair[1],
        )
    return ((target, source_text) for source_text, target in pairs) if source.reverse else pairs


def _column(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise InvalidOption(
            f"`where` names column {text}; a column is a whole number, counted from 1 or from the end by -1"
        ) from error
