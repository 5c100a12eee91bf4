"""`dragoman data`: text made ready for training. Imported on demand; needs the `train` extra."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Optional

import pydantic
import typer
from rich.console import Console

from app.errors import InvalidOption
from model.data.exclusions import Exclusions, held_out
from model.data.filter_counts import FilterCounts
from model.data.filters import RULES, FilterConfig, PairFilter, counts_of
from model.data.options import (
    Column,
    Exclude,
    Force,
    Off,
    Seed,
    Set,
    Source,
    SourceColumn,
    Tables,
    Target,
    TargetColumn,
    TargetText,
    Where,
)
from model.data.parallel_text import MonolingualText, ParallelText
from model.data.progress import reading_progress
from model.data.rare_words_cli import rare_words
from model.data.sampling import lowest_hashes
from model.data.seen import SeenTexts
from model.data.text_files import check_new, written_lines
from model.data.vocabulary import VocabularyOptions, chosen_sentences, train_vocabulary

app = typer.Typer(
    name="data",
    help="Make text ready for training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_console = Console(stderr=True)


class Kind(StrEnum):
    """Of a vocabulary."""

    UNIGRAM = "unigram"
    BPE = "bpe"


@app.callback()
def root() -> None:
    """Make text ready for training."""


@app.command()
def clean(
    text: Tables,
    out: Annotated[Path, typer.Option(help="The table to write: source, tab, target.")],
    source: Source,
    target: Target,
    target_text: TargetText = None,
    source_column: SourceColumn = 1,
    target_column: TargetColumn = 2,
    where: Where = None,
    exclude: Exclude = None,
    off: Off = None,
    limits: Set = None,
    force: Force = False,
) -> None:
    """Write the pairs of parallel text that are fit to learn from, and say what the others lack."""
    check_new([out], force=force)
    texts = _parallel(text, target_text, source_column, target_column, where)
    filtered = _Filtered(texts, _filter(off, limits, source, target, exclude))
    with written_lines(out) as (file,):
        for pair in filtered.pairs():
            file.write("\t".join(map(_one_cell, pair)) + "\n")
    filtered.report()
    _console.print(f"{filtered.counts.total.num_kept:,} pairs in {out}", highlight=False, soft_wrap=True)


@app.command()
def sample(
    text: Annotated[Path, typer.Argument(help="Text: plain lines or a tab-separated table; .gz, .zst.")],
    out: Annotated[Path, typer.Option(help="The file to write: a text a line, or source, tab, target.")],
    num: Annotated[int, typer.Option("--num", "-n", min=1, help="So many texts.")],
    column: Column = None,
    target_column: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Column of the target side, for parallel text."),
    ] = None,
    where: Where = None,
    exclude: Exclude = None,
    seed: Seed = 1,
    force: Force = False,
) -> None:
    """Choose texts by a keyed hash: the same ones whatever their order; no text comes twice.

    With --target-column, pairs are chosen by their source texts. A smaller sample of the same text and seed
    is the beginning of a larger one.
    """
    check_new([out], force=force)
    conditions = _conditions(where)
    exclusions = Exclusions.from_files(exclude or [])
    counter: Counter[str] = Counter()
    with reading_progress("reading", [text]) as on_read:
        rows: Iterable[tuple[str, ...]]
        if target_column is None:
            rows = ((line,) for line in MonolingualText(text, column, conditions).texts(on_read=on_read))
        else:
            rows = ParallelText(
                text, source_column=column or 1, target_column=target_column, where=conditions
            ).pairs(on_read=on_read)
        chosen = list(
            lowest_hashes(
                _new_rows(rows, exclusions, counter),
                num_items=num,
                seed=seed,
                text_of=lambda row: row[0],
                tie_of=lambda row: row[-1],
            )
        )
    with written_lines(out) as (file,):
        file.writelines("\t".join(map(_one_cell, row)) + "\n" for row in chosen)
    _console.print(
        f"{len(chosen):,} of {sum(counter.values()):,} texts in {out}; left out before choosing: "
        f"{counter['empty']:,} empty, {counter['excluded']:,} with test sentences, "
        f"{counter['duplicate']:,} that came before",
        highlight=False,
        soft_wrap=True,
    )
    if len(chosen) < num:
        _console.print(f"there are no {num:,} texts", highlight=False, soft_wrap=True)


app.command("rare-words")(rare_words)


@app.command("hold-out")
def hold_out(
    text: Tables,
    out: Annotated[Path, typer.Option(help="NAME of the files NAME.SOURCE and NAME.TARGET to write.")],
    num: Annotated[int, typer.Option("--num", "-n", min=1, help="So many pairs.")],
    source: Source,
    target: Target,
    target_text: TargetText = None,
    source_column: SourceColumn = 1,
    target_column: TargetColumn = 2,
    where: Where = None,
    exclude: Exclude = None,
    off: Off = None,
    limits: Set = None,
    seed: Seed = 1,
    force: Force = False,
) -> None:
    """Choose pairs for a test set of our own, by a keyed hash, and write them to two files.

    Name both files with --exclude, or among the exclusions of a training configuration, whenever training
    data is made.
    """
    paths = [out.with_name(f"{out.name}.{language}") for language in (source, target)]
    check_new(paths, force=force)
    texts = _parallel(text, target_text, source_column, target_column, where)
    filtered = _Filtered(texts, _filter(off, limits, source, target, exclude))
    chosen = list(held_out(filtered.pairs(), num_pairs=num, seed=seed))
    filtered.report()
    if len(chosen) < num:
        raise InvalidOption(
            f"{num:,} pairs with different sources are wanted, and {len(chosen):,} are there; want fewer"
        )
    with written_lines(*paths) as files:
        for pair in chosen:
            for file, side in zip(files, pair, strict=True):
                file.write(f"{side}\n")
    _console.print(f"{num:,} pairs in {paths[0]} and {paths[1]}", highlight=False, soft_wrap=True)


@app.command()
def vocabulary(
    texts: Annotated[list[Path], typer.Argument(help="Text of both languages, plain, .gz or .zst.")],
    out: Annotated[Path, typer.Option(help="The SentencePiece model to write.")],
    column: Annotated[
        Optional[list[int]],  # noqa: UP045
        typer.Option(
            help="Column of the tables to take, from 1; may be repeated. Default: a line is a text."
        ),
    ] = None,
    num_pieces: Annotated[int, typer.Option(help="Size of the vocabulary.")] = VocabularyOptions.num_pieces,
    kind: Annotated[Kind, typer.Option(help="How pieces are found.")] = Kind.UNIGRAM,
    byte_fallback: Annotated[
        bool, typer.Option(help="Spell unknown characters in bytes.")
    ] = VocabularyOptions.byte_fallback,
    character_coverage: Annotated[
        float, typer.Option(help="Share of characters that get pieces.")
    ] = VocabularyOptions.character_coverage,
    symbol: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="Piece that is never split; may be repeated."),
    ] = None,
    num_sentences: Annotated[
        int, typer.Option(min=1, help="Train on so many texts, chosen by a keyed hash.")
    ] = VocabularyOptions.num_sentences,
    seed: Seed = 1,
    force: Force = False,
) -> None:
    """Train one SentencePiece vocabulary for both languages."""
    check_new([out], force=force)
    options = VocabularyOptions(
        num_pieces=num_pieces,
        kind=kind.value,
        byte_fallback=byte_fallback,
        character_coverage=character_coverage,
        user_symbols=tuple(symbol or ()),
        num_sentences=num_sentences,
        seed=seed,
    )
    columns: Sequence[int | None] = column or [None]
    parts = [MonolingualText(path, part) for path in texts for part in columns]
    with reading_progress("reading", [part.path for part in parts]) as on_read:
        chosen = chosen_sentences((line for part in parts for line in part.texts(on_read=on_read)), options)
    with _console.status(f"training on {len(chosen):,} sentences"):
        model = train_vocabulary(chosen, options)
    partial = out.with_name(f"{out.name}.partial")
    partial.write_bytes(model)
    partial.replace(out)
    _console.print(
        f"{num_pieces:,} pieces from {len(chosen):,} sentences, {len(model) / 1e6:.2f} MB in {out}",
        highlight=False,
        soft_wrap=True,
    )


class _Filtered:
    """The kept pairs of several texts, and what became of the others."""

    def __init__(self, texts: Sequence[ParallelText], pair_filter: PairFilter) -> None:
        self._texts = texts
        self._filter = pair_filter
        self.counts = FilterCounts()

    def pairs(self) -> Iterator[tuple[str, str]]:
        """With a progress bar; the counts are right when all have come."""
        files = [path for text in self._texts for path in (text.path, text.target_path) if path is not None]
        with reading_progress("filtering", files) as on_read:
            for text in self._texts:
                counter: Counter[str] = Counter()
                yield from self._filter.kept(text.pairs(on_read=on_read), counter=counter)
                self.counts += counts_of(text.path.name, counter)

    def report(self) -> None:
        """What was read, kept and rejected, and what could not be judged."""
        _console.print(self.counts.table(RULES))
        for note in self._filter.notes:
            _console.print(note, highlight=False, soft_wrap=True)


def _parallel(
    paths: Sequence[Path],
    target_path: Path | None,
    source_column: int,
    target_column: int,
    where: Sequence[str] | None,
) -> list[ParallelText]:
    if target_path is not None and len(paths) > 1:
        raise InvalidOption(f"--target-text goes with one TEXT, {len(paths)} are given; join the files")
    return [
        ParallelText(
            path,
            target_path=target_path,
            source_column=source_column,
            target_column=target_column,
            where=_conditions(where),
        )
        for path in paths
    ]


def _conditions(where: Sequence[str] | None) -> dict[int, list[str]]:
    conditions: dict[int, list[str]] = {}
    for text in where or ():
        column, equals, values = text.partition("=")
        if not equals or not column.strip().removeprefix("-").isdecimal():
            raise InvalidOption(f"--where {text} is not COLUMN=VALUE[,VALUE...], such as 3=prose,phrase")
        if int(column) in conditions:
            raise InvalidOption(f"--where names column {int(column)} twice; put all its values into one")
        conditions[int(column)] = values.split(",")
    return conditions


def _filter(
    off: Sequence[str] | None,
    limits: Sequence[str] | None,
    source: str,
    target: str,
    exclude: Sequence[Path] | None,
) -> PairFilter:
    fields: dict[str, object] = {"off": off or []}
    for text in limits or ():
        name, equals, value = text.partition("=")
        if not equals or name == "off":
            raise InvalidOption(f"--set {text} is not NAME=VALUE, such as max_length_ratio=4")
        fields[name] = value
    try:
        config = FilterConfig.model_validate(fields)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        known = ", ".join(name for name in FilterConfig.model_fields if name != "off")
        raise InvalidOption(
            f"--set or --off: {where}: {first['msg']}; the limits are {known}, the rules {', '.join(RULES)}"
        ) from error
    return PairFilter(
        config,
        source_language=source,
        target_language=target,
        exclusions=Exclusions.from_files(exclude or ()),
    )


def _new_rows(
    rows: Iterable[tuple[str, ...]], exclusions: Exclusions, counter: Counter[str]
) -> Iterator[tuple[str, ...]]:
    """The rows without an empty or excluded text, each once."""
    seen = SeenTexts()
    for row in rows:
        if not all(text.strip() for text in row):
            counter["empty"] += 1
        elif any(map(exclusions.holds, row)):
            counter["excluded"] += 1
        elif (joined := "\t".join(row)) in seen:
            counter["duplicate"] += 1
        else:
            seen.add(joined)
            counter["new"] += 1
            yield row


def _one_cell(text: str) -> str:
    """A tab inside of a text would begin the next column; to a model it is a space anyway."""
    return text.replace("\t", " ")
