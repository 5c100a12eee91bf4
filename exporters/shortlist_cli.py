"""`dragoman export shortlist` and `compact-shortlist`: lexical shortlists from text, and smaller ones."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Optional

import sentencepiece
import typer
from rich.console import Console

from app.bundle import open_bundle
from app.decoding.shortlist import Shortlist
from app.errors import InvalidOption
from app.text import Tokenizer
from exporters.bundle_report import report
from exporters.bundle_shortlist import check_takes_shortlist, put_into_bundle
from exporters.shortlist_compaction import DEFAULT_NUM_COMMON, compact_shortlist
from exporters.shortlist_training import (
    DEFAULT_MAX_PAIRS,
    ShortlistOptions,
    TrainedShortlist,
    train_shortlist,
)
from model.data.parallel_text import ParallelText

_console = Console(stderr=True)
_HAS_MORE = "the text goes on after the {max_pairs:,} pairs of --max-pairs; the rest was not read"

Text = Annotated[
    list[Path],
    typer.Argument(help="Parallel text: tab-separated tables, plain, .gz or .zst; or one source side."),
]
Out = Annotated[
    Optional[Path],  # noqa: UP045  # typer reads the annotation at run time
    typer.Option(help="Write the shortlist to this file, which must not exist."),
]
TargetText = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(help="The target side, line by line like TEXT, which is then no table."),
]
SourceColumn = Annotated[int, typer.Option(help="Column of the table; negative: from the end.")]
TargetColumn = Annotated[int, typer.Option(help="Column of the table; negative: from the end.")]
MaxTokens = Annotated[int, typer.Option(min=1, max=1024, help="Leave out pairs with more tokens on a side.")]


def shortlist_command(
    text: Text,
    bundle: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Bundle whose vocabulary is taken. Without --out, its shortlist is replaced."),
    ] = None,
    tokenizer: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="SentencePiece model of source and target, in place of --bundle."),
    ] = None,
    eos_id: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="With --tokenizer: id that ends a sentence. Default: the SentencePiece model's."),
    ] = None,
    out: Out = None,
    target_text: TargetText = None,
    source_column: SourceColumn = 1,
    target_column: TargetColumn = 2,
    frequent: Annotated[
        int, typer.Option(help="So many frequent target tokens are always allowed.")
    ] = ShortlistOptions.num_frequent,
    best: Annotated[
        int, typer.Option(help="At most so many targets of a source token.")
    ] = ShortlistOptions.num_best,
    min_probability: Annotated[
        float, typer.Option(help="Leave out a source token's targets that are less probable.")
    ] = ShortlistOptions.min_probability,
    copies: Annotated[
        bool, typer.Option(help="Allow each source token itself as a target.")
    ] = ShortlistOptions.copies,
    max_tokens: MaxTokens = 128,
    max_pairs: Annotated[
        int, typer.Option(min=1, help="Read so many pairs; 700,000 take 12 minutes and 2.5 GB.")
    ] = DEFAULT_MAX_PAIRS,
) -> None:
    """Make a lexical shortlist from parallel text, for a bundle or as a file.

    The text should be like what will be translated, and its target side the model's own translations
    (`dragoman translate` of source text, without a shortlist): what a list lacks, the model cannot say.
    """
    options = ShortlistOptions(
        num_frequent=frequent, num_best=best, min_probability=min_probability, copies=copies
    )
    texts = _texts(text, target_text, source_column, target_column)
    _check_new(out)
    pieces = _pieces(bundle, tokenizer, eos_id, replaces=out is None)
    with _console.status("reading") as status:
        pairs = itertools.chain.from_iterable(part.pairs() for part in texts)
        trained = train_shortlist(
            pairs, pieces, options, max_tokens=max_tokens, max_pairs=max_pairs, progress=status.update
        )
    _report_shortlist(trained, max_tokens=max_tokens, max_pairs=max_pairs)
    if out is not None:
        _save(trained.shortlist, out)
    elif bundle is not None:
        _replace(bundle, trained.shortlist, trained.provenance, command="shortlist")


def compact_command(
    bundle: Annotated[
        Path, typer.Option(help="Bundle whose shortlist is compacted; without --out, in place.")
    ],
    out: Out = None,
    common: Annotated[
        int, typer.Option(help="So many targets, those that most lists hold, become candidates everywhere.")
    ] = DEFAULT_NUM_COMMON,
) -> None:
    """Make a bundle's lexical shortlist smaller: what most lists hold is written once.

    No sentence loses a candidate; each has up to --common more, which a step pays for.
    """
    _check_new(out)
    opened = open_bundle(bundle)
    manifest = opened.manifest
    if manifest.shortlist is None:
        raise InvalidOption(
            f"bundle {manifest.id} has no shortlist to compact; make one with `dragoman export shortlist`"
        )
    before = Shortlist.load(opened.file(manifest.shortlist))
    after = compact_shortlist(before, num_common=common, eos_id=manifest.tokens.eos_id)
    _console.print(f"{after.num_entries:,} entries, {before.num_entries:,} before")
    if out is not None:
        _save(after, out)
        return
    facts = {key: value for key, value in manifest.provenance.items() if key.startswith("shortlist_")}
    _replace(bundle, after, facts | {"shortlist_common": str(common)}, command="compact-shortlist")


def _texts(
    paths: Sequence[Path], target: Path | None, source_column: int, target_column: int
) -> list[ParallelText]:
    if target is not None and len(paths) > 1:
        raise InvalidOption(f"--target-text goes with one TEXT, {len(paths)} are given; join the files")
    return [
        ParallelText(path, target_path=target, source_column=source_column, target_column=target_column)
        for path in paths
    ]


def _check_new(out: Path | None) -> None:
    if out is not None and (out.exists() or not out.parent.is_dir()):
        raise InvalidOption(f"--out {out} exists, or its folder does not; name a new file")


def _save(shortlist: Shortlist, out: Path) -> None:
    """Complete or not at all."""
    partial = out.with_name(f"{out.name}.partial")
    shortlist.save(partial)
    partial.replace(out)
    _console.print(f"{out.stat().st_size / 1e6:.2f} MB in {out}")


def _replace(bundle: Path, shortlist: Shortlist, facts: Mapping[str, str], *, command: str) -> None:
    """Put the lists into the bundle, and tell which scores that removed."""
    num_scores = len(open_bundle(bundle, verify=False).manifest.quality)
    replaced = put_into_bundle(bundle, shortlist, facts, command=command)
    if num_removed := num_scores - len(replaced.manifest.quality):
        _console.print(
            f"{num_removed} scores that were measured with the old shortlist are removed from the "
            "manifest and the model card; measure again"
        )
    report(replaced, _console)


def _pieces(bundle: Path | None, tokenizer: Path | None, eos_id: int | None, *, replaces: bool) -> Tokenizer:
    """The vocabulary of a bundle or of a SentencePiece model."""
    if (bundle is None) == (tokenizer is None):
        raise InvalidOption("the vocabulary comes from --bundle or from --tokenizer; give one of the two")
    if bundle is not None:
        if eos_id is not None:
            raise InvalidOption("--eos-id goes with --tokenizer; a bundle states its own")
        opened = open_bundle(bundle)
        if replaces:
            check_takes_shortlist(opened)
        manifest = opened.manifest
        return Tokenizer.open(opened.file(manifest.tokenizer), eos_id=manifest.tokens.eos_id)
    assert tokenizer is not None
    if replaces:
        raise InvalidOption("--tokenizer needs --out, the file to write")
    checked = Tokenizer.open(tokenizer, eos_id=eos_id or 0)
    if eos_id is not None:
        return checked
    own = int(sentencepiece.SentencePieceProcessor(model_file=str(tokenizer)).eos_id())
    if own < 0:
        raise InvalidOption(f"{tokenizer} has no end-of-sentence piece; name the model's id with --eos-id")
    return Tokenizer.open(tokenizer, eos_id=own)


def _report_shortlist(trained: TrainedShortlist, *, max_tokens: int, max_pairs: int) -> None:
    _console.print(
        f"aligned {trained.num_pairs:,} pairs; left out: {trained.num_empty:,} with an empty side, "
        f"{trained.num_long:,} with more than {max_tokens} tokens on a side"
    )
    if trained.has_more:
        _console.print(_HAS_MORE.format(max_pairs=max_pairs))
    shortlist = trained.shortlist
    _console.print(f"{shortlist.num_entries:,} targets of {shortlist.vocabulary_size:,} source tokens")
