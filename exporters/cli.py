"""`dragoman export`: checkpoints to bundles. Imported on demand; needs the `train` extra."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Optional, get_args

import pydantic
import typer
from rich.console import Console

from app.bundle import Bundle, Variant, open_bundle
from app.bundle.manifest import LanguagePair, QualityScore
from app.errors import InvalidOption
from exporters import shortlist_cli
from exporters.bundle_report import report
from exporters.checkpoint import Checkpoint
from exporters.export import ExportOptions, export_bundle
from exporters.given_texts import read_facts, read_sentences, verification_texts
from exporters.marian import import_marian
from exporters.model_card import ModelFacts, model_card
from exporters.quality import record_quality
from exporters.trained import (
    FEW_TEXTS,
    LICENCE,
    shortlist_for,
    to_checkpoint,
    to_saved_model,
    with_activation_scales,
)
from model.averaging import mean_model
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
    report(bundle, _console)


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
    report(bundle, _console)


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


@app.command("average")
def average_command(
    models: Annotated[list[Path], typer.Argument(help="Model folders of runs with a common start.")],
    out: Annotated[Path, typer.Option(help="Model folder to write; must not exist.")],
) -> None:
    """Make a model folder whose weights are the mean of several runs'.

    It often keeps what each run of a chain learnt: the mean of a run and of one that went on from it with
    other text forgets less than the second and has much of what it gained.
    """
    if out.exists():
        raise InvalidOption(f"--out {out} exists; name a new folder")
    save_model(mean_model([load_model(model) for model in models]), out)
    _console.print(f"the mean of {len(models)} models in {out}")


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
    report(record_quality(bundle, parsed), _console)


app.command("shortlist")(shortlist_cli.shortlist_command)
app.command("compact-shortlist")(shortlist_cli.compact_command)


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
