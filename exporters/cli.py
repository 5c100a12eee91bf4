"""`dragoman export`: checkpoints to bundles. Imported on demand; needs the `train` extra."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Optional, get_args

import pydantic
import sentencepiece
import typer
from rich.console import Console

from app.bundle import Bundle, Variant, open_bundle
from app.bundle.manifest import LanguagePair, QualityScore
from app.errors import InvalidOption
from app.text import Tokenizer
from exporters.bundle_shortlist import check_takes_shortlist, put_into_bundle
from exporters.checkpoint import Checkpoint
from exporters.export import ExportOptions, export_bundle
from exporters.given_texts import read_facts, read_sentences, verification_texts
from exporters.marian import import_marian
from exporters.model_card import ModelFacts, model_card
from exporters.quality import record_quality
from exporters.shortlist_training import (
    DEFAULT_MAX_PAIRS,
    ShortlistOptions,
    TrainedShortlist,
    train_shortlist,
)
from exporters.trained import (
    FEW_TEXTS,
    LICENCE,
    shortlist_for,
    to_checkpoint,
    to_saved_model,
    with_activation_scales,
)
from model.data.parallel_text import ParallelText
from model.saved_model import load_model, save_model

app = typer.Typer(
    name="export",
    help="Make a bundle from a checkpoint.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
UNKNOWN_LICENCE = "LicenseRef-unknown"
_console = Console(stderr=True)

BundleId = Annotated[
    Optional[str],  # noqa: UP045  # typer reads the annotation at run time
    typer.Option("--id", help="Unique name. Default: the folder's."),
]
Facts = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(help="JSON file with origin, changes, training_data, limitations for the model card."),
]
Out = Annotated[Path, typer.Option(help="Folder of the new bundle; must not exist.")]
Variants = Annotated[str, typer.Option(help=f"Separated by commas, of {', '.join(get_args(Variant))}.")]
VerifyWith = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        "--verify-with", help="Source sentences, one a line, for the final comparison with PyTorch."
    ),
]


@app.callback()
def root() -> None:
    """Make a bundle from a checkpoint."""


@app.command()
def marian(
    directory: Annotated[Path, typer.Argument(help="Folder with model*.bin, *.spm and lex*.bin.")],
    source: Annotated[str, typer.Option(help="Source language, BCP-47.")],
    target: Annotated[str, typer.Option(help="Target language, BCP-47.")],
    out: Out,
    bundle_id: BundleId = None,
    licence: Annotated[str, typer.Option(help="SPDX licence of the weights.")] = UNKNOWN_LICENCE,
    facts: Facts = None,
    variants: Variants = "cpu-int8,cpu-fp32",
    shortlist: Annotated[bool, typer.Option(help="Import the lexical shortlist.")] = True,
    max_source_tokens: Annotated[
        int, typer.Option(min=8, max=4096, help="Longer segments are wrapped.")
    ] = 128,
    texts: VerifyWith = None,
) -> None:
    """Import a Marian model (Firefox Translations, Bergamot) and verify the result."""
    checkpoint = import_marian(directory, shortlist=shortlist)
    with _console.status("exporting") as status:
        bundle = _export(
            checkpoint,
            out,
            [_pair(source, target)],
            bundle_id=bundle_id,
            licence=licence,
            facts=read_facts(facts, changes="Converted to ONNX graphs; the weights' values are unchanged."),
            variants=_variants(variants),
            verify_with=verification_texts(texts, source=source),
            max_source_tokens=max_source_tokens,
            progress=status.update,
        )
    _report(bundle)


@app.command("trained")
def trained_command(
    model: Annotated[Path, typer.Argument(help="Model folder, as `dragoman train` writes it.")],
    out: Out,
    bundle_id: BundleId = None,
    licence: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="SPDX licence of the weights. Default: what the model folder states."),
    ] = None,
    facts: Facts = None,
    variants: Variants = "cpu-int8,cpu-fp32",
    shortlist: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Lexical shortlist: a file of `dragoman export shortlist --out`."),
    ] = None,
    shortlist_of: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Bundle with the same vocabulary, whose lexical shortlist is taken."),
    ] = None,
    calibrate_with: Annotated[
        Optional[list[Path]],  # noqa: UP045
        typer.Option(help="Source sentences, one a line; may be given several times. A few hundred do best."),
    ] = None,
    max_source_tokens: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=8, max=4096, help="Longer segments are wrapped. Default: the model's, or 128."),
    ] = None,
    texts: VerifyWith = None,
) -> None:
    """Make a bundle of a model that was trained here, and verify it."""
    if out.exists():
        raise InvalidOption(f"--out {out} exists; name a new folder")
    known_variants = _variants(variants)
    saved = load_model(model)
    card_facts = read_facts(facts, changes="Rounded to int8 and converted to ONNX graphs.")
    pair = _pair(saved.source, saved.target)
    lists = shortlist_for(saved, file=shortlist, bundle=shortlist_of)
    limit = max_source_tokens or saved.max_source_tokens or 128
    verification = verification_texts(texts, source=saved.source)
    calibration = [
        line for path in calibrate_with or [] for line in read_sentences(path, option="--calibrate-with")
    ]
    seen = calibration or verification
    if len(seen) < FEW_TEXTS:
        _console.print(
            f"calibrating on {len(seen)} sentences, which is few; --calibrate-with takes files of them: "
            f"{FEW_TEXTS} or more, like what will be translated"
        )
    with _console.status("rounding to int8") as status:
        checkpoint = to_checkpoint(saved, shortlist=lists)
        checkpoint = with_activation_scales(checkpoint, seen, max_source_tokens=limit, progress=status.update)
        bundle = _export(
            checkpoint,
            out,
            [pair],
            bundle_id=bundle_id,
            licence=licence or saved.provenance.get(LICENCE, UNKNOWN_LICENCE),
            facts=card_facts,
            variants=known_variants,
            verify_with=verification,
            max_source_tokens=limit,
            progress=status.update,
        )
    _report(bundle)


@app.command("weights")
def weights_command(
    bundle: Annotated[Path, typer.Argument(help="Folder of the bundle.")],
    model: Annotated[Path, typer.Argument(help="Model folder to write; an older one is replaced.")],
) -> None:
    """Make a model folder of a bundle's weights, to train on or to learn from.

    Two things do not come back: weights are those that int8 left, and the unknown piece's bias is -1e9, since
    a bundle never says it.
    """
    saved = to_saved_model(open_bundle(bundle))
    save_model(saved, model)
    num_weights = sum(tensor.numel() for tensor in saved.weights.values())
    _console.print(f"{num_weights:,} weights of {saved.provenance['weights_of_bundle']} in {model}")


@app.command("record-quality")
def record_quality_command(
    bundle: Annotated[Path, typer.Argument(help="Folder of the bundle.")],
    scores: Annotated[Path, typer.Argument(help="JSON list of scores, as benchmarks.quality writes it.")],
) -> None:
    """Write measured scores into a bundle's manifest and model card."""
    bundle_id = open_bundle(bundle, verify=False).manifest.id
    try:
        rows = json.loads(scores.read_bytes())
        mine = [row for row in rows if row.pop("bundle") == bundle_id]
        parsed = [QualityScore.model_validate(row) for row in mine]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidOption(
            f"{scores} is not a list of scores ({type(error).__name__}); make it with benchmarks.quality"
        ) from error
    if not parsed:
        raise InvalidOption(f"{scores} has no scores of bundle {bundle_id}; measure it first")
    _report(record_quality(bundle, parsed))


@app.command("shortlist")
def shortlist_command(
    text: Annotated[
        list[Path],
        typer.Argument(help="Parallel text: tab-separated tables, plain, .gz or .zst; or one source side."),
    ],
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
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Write the shortlist to this file, which must not exist."),
    ] = None,
    target_text: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="The target side, line by line like TEXT, which is then no table."),
    ] = None,
    source_column: Annotated[int, typer.Option(help="Column of the table; negative: from the end.")] = 1,
    target_column: Annotated[int, typer.Option(help="Column of the table; negative: from the end.")] = 2,
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
    max_tokens: Annotated[
        int, typer.Option(min=1, max=1024, help="Leave out pairs with more tokens on a side.")
    ] = 128,
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
    if target_text is not None and len(text) > 1:
        raise InvalidOption(f"--target-text goes with one TEXT, {len(text)} are given; join the files")
    texts = [
        ParallelText(path, target_path=target_text, source_column=source_column, target_column=target_column)
        for path in text
    ]
    if out is not None and (out.exists() or not out.parent.is_dir()):
        raise InvalidOption(f"--out {out} exists, or its folder does not; name a new file")
    pieces = _pieces(bundle, tokenizer, eos_id, replaces=out is None)
    with _console.status("reading") as status:
        pairs = itertools.chain.from_iterable(part.pairs() for part in texts)
        trained = train_shortlist(
            pairs, pieces, options, max_tokens=max_tokens, max_pairs=max_pairs, progress=status.update
        )
    _report_shortlist(trained, max_tokens=max_tokens, max_pairs=max_pairs)
    if out is not None:
        partial = out.with_name(f"{out.name}.partial")
        trained.shortlist.save(partial)
        partial.replace(out)
        _console.print(f"{out.stat().st_size / 1e6:.2f} MB in {out}")
    elif bundle is not None:
        num_scores = len(open_bundle(bundle, verify=False).manifest.quality)
        replaced = put_into_bundle(bundle, trained)
        if num_removed := num_scores - len(replaced.manifest.quality):
            _console.print(
                f"{num_removed} scores that were measured with the old shortlist are removed from the "
                "manifest and the model card; measure again"
            )
        _report(replaced)


def _export(
    checkpoint: Checkpoint,
    out: Path,
    pairs: Sequence[LanguagePair],
    *,
    bundle_id: str | None,
    licence: str,
    facts: ModelFacts,
    variants: Sequence[Variant],
    verify_with: Sequence[str],
    max_source_tokens: int,
    progress: Callable[[str], None],
) -> Bundle:
    bundle_id = bundle_id or out.name
    card = model_card(
        bundle_id=bundle_id,
        pairs=pairs,
        config=checkpoint.config,
        licence=licence,
        facts=facts,
        provenance=checkpoint.provenance,
    )
    options = ExportOptions(
        bundle_id=bundle_id,
        pairs=pairs,
        licence=licence,
        model_card=card,
        variants=variants,
        verification_texts=verify_with,
        max_source_tokens=max_source_tokens,
        max_target_tokens=3 * max_source_tokens,
    )
    return export_bundle(checkpoint, out, options, progress=progress)


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
        _console.print(
            f"the text goes on after the {max_pairs:,} pairs of --max-pairs; the rest was not read"
        )
    shortlist = trained.shortlist
    _console.print(f"{shortlist.num_entries:,} targets of {shortlist.vocabulary_size:,} source tokens")


def _pair(source: str, target: str) -> LanguagePair:
    try:
        return LanguagePair(source=source, target=target)
    except pydantic.ValidationError as error:
        raise InvalidOption(
            f"--source {source} or --target {target} is no BCP-47 code such as en or pt-BR"
        ) from error


def _variants(text: str) -> list[Variant]:
    known = get_args(Variant)
    wanted = [part.strip() for part in text.split(",") if part.strip()]
    if unknown := [part for part in wanted if part not in known]:
        raise InvalidOption(f"--variants has {', '.join(unknown)}; known are {', '.join(known)}")
    if not wanted:
        raise InvalidOption(f"--variants names none; known are {', '.join(known)}")
    return [variant for variant in known if variant in wanted]


def _report(bundle: Bundle) -> None:
    manifest = bundle.manifest
    num_bytes = sum(record.size_bytes for record in manifest.files.values())
    _console.print(f"{manifest.id}: {num_bytes / 1e6:.1f} MB in {bundle.path}")
    for report in manifest.verification:
        _console.print(
            f"  {report.variant}: {report.num_identical} of {report.num_segments} segments as PyTorch, "
            f"scores within {report.max_score_difference:.1e}"
        )
