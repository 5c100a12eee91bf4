"""`dragoman data rare-words`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from app.errors import InvalidOption
from model.data.exclusions import Exclusions
from model.data.options import Column, Exclude, Force, Seed
from model.data.parallel_text import MonolingualText
from model.data.progress import reading_progress
from model.data.rare_words import RareWords, count_words
from model.data.text_files import check_new, lines_of, written_lines

_console = Console(stderr=True)


def rare_words(
    text: Annotated[Path, typer.Argument(help="Text: plain lines or a tab-separated table; .gz, .zst.")],
    out: Annotated[Path, typer.Option(help="The file to write, a text a line.")],
    known: Annotated[
        list[Path], typer.Option(help="Text of which the model learns already; may be given several times.")
    ],
    num_words: Annotated[int, typer.Option("--num-words", "-n", min=1, help="At most so many words.")],
    column: Column = None,
    known_fewer_than: Annotated[
        int, typer.Option(min=1, help="Words that are known so often are not wanted.")
    ] = 10,
    texts_each: Annotated[int, typer.Option(min=1, help="Texts for each word.")] = 2,
    longest: Annotated[
        int, typer.Option(min=1, help="Words of a text; of longer ones the part around the word is taken.")
    ] = 13,
    exclude: Exclude = None,
    seed: Seed = 1,
    force: Force = False,
) -> None:
    """Choose short texts with words that other text lacks, for `dragoman translate` and a distillation.

    The same ones come whatever the order of the text, which is read twice.
    """
    check_new([out], force=force)
    if text.exists() and not text.is_file():
        raise InvalidOption(f"{text} is no file, and the text is read twice; write it to a file first")
    exclusions = Exclusions.from_files(exclude or [])
    wanted = RareWords(
        num_words, known_fewer_than=known_fewer_than, texts_each=texts_each, longest=longest, seed=seed
    )

    def texts(label: str) -> Iterator[str]:
        with reading_progress(label, [text]) as on_read:
            for line in MonolingualText(text, column, {}).texts(on_read=on_read):
                if not exclusions.holds(line):
                    yield line

    with reading_progress("counting known words", known) as on_read:
        known_counts = count_words(line for path in known for line in lines_of(path, on_read=on_read))
    words = wanted.words(count_words(texts("counting words")), known_counts)
    chosen = [
        part
        for part in wanted.texts(words, texts("choosing texts"))
        if not exclusions.holds(part)  # a part of a longer line may be a test sentence
    ]
    with written_lines(out) as (file,):
        file.writelines(f"{part}\n" for part in chosen)
    _console.print(
        f"{len(chosen):,} texts for {len(words):,} words in {out}", highlight=False, soft_wrap=True
    )
