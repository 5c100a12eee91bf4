"""`dragoman export`: checkpoints to bundles. Imported on demand; needs the `train` extra."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Optional, get_args

import pydantic
import typer
from rich.console import Console

from app.bundle import Bundle, Variant, open_bundle
from app.bundle.manifest import LanguagePair, QualityScore
from app.errors import CheckpointError, InvalidOption
from exporters.export import ExportOptions, export_bundle
from exporters.marian import import_marian
from exporters.model_card import ModelFacts, model_card
from exporters.quality import record_quality

app = typer.Typer(
    name="export",
    help="Make a bundle from a checkpoint.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_console = Console(stderr=True)
_TEXTS = Path(__file__).resolve().parent / "verification_texts"


@app.callback()
def root() -> None:
    """Make a bundle from a checkpoint."""


@app.command()
def marian(
    directory: Annotated[Path, typer.Argument(help="Folder with model*.bin, *.spm and lex*.bin.")],
    source: Annotated[str, typer.Option(help="Source language, BCP-47.")],
    target: Annotated[str, typer.Option(help="Target language, BCP-47.")],
    out: Annotated[Path, typer.Option(help="Folder of the new bundle; must not exist.")],
    bundle_id: Annotated[
        Optional[str],  # noqa: UP045  # typer reads the annotation at run time
        typer.Option("--id", help="Unique name. Default: the folder's."),
    ] = None,
    licence: Annotated[str, typer.Option(help="SPDX licence of the weights.")] = "LicenseRef-unknown",
    facts: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="JSON file with origin, changes, training_data, limitations for the model card."),
    ] = None,
    variants: Annotated[str, typer.Option(help="Arithmetics, separated by commas.")] = "cpu-int8,cpu-fp32",
    shortlist: Annotated[bool, typer.Option(help="Import the lexical shortlist.")] = True,
    max_source_tokens: Annotated[
        int, typer.Option(min=8, max=4096, help="Longer segments are wrapped.")
    ] = 128,
    texts: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--verify-with", help="Source sentences, one a line, for the final comparison with PyTorch."
        ),
    ] = None,
) -> None:
    """Import a Marian model (Firefox Translations, Bergamot) and verify the result."""
    pairs = [_pair(source, target)]
    checkpoint = import_marian(directory, shortlist=shortlist)
    bundle_id = bundle_id or out.name
    card = model_card(
        bundle_id=bundle_id,
        pairs=pairs,
        config=checkpoint.config,
        licence=licence,
        facts=_facts(facts),
        provenance=checkpoint.provenance,
    )
    options = ExportOptions(
        bundle_id=bundle_id,
        pairs=pairs,
        licence=licence,
        model_card=card,
        variants=_variants(variants),
        verification_texts=_verification_texts(texts, source),
        max_source_tokens=max_source_tokens,
        max_target_tokens=3 * max_source_tokens,
    )
    with _console.status("exporting") as status:
        bundle = export_bundle(checkpoint, out, options, progress=status.update)
    _report(bundle)


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


def _facts(path: Path | None) -> ModelFacts:
    if path is None:
        return ModelFacts(
            origin="Not stated.", changes="Converted to ONNX graphs; the weights' values are unchanged."
        )
    try:
        return ModelFacts(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise InvalidOption(
            f"--facts {path} is not a JSON object of origin, changes, training_data, limitations"
        ) from error


def _verification_texts(path: Path | None, source: str) -> list[str]:
    if path is None:
        # Any text will do for a comparison of arithmetic; one in the model's language does better.
        language = source.split("-")[0].lower()
        path = _TEXTS / f"{language}.txt"
        path = path if path.is_file() else _TEXTS / "en.txt"
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"--verify-with {path} cannot be read as UTF-8 text") from error
    if not lines:
        raise CheckpointError(f"--verify-with {path} has no sentence; give at least one a line")
    return lines


def _report(bundle: Bundle) -> None:
    manifest = bundle.manifest
    num_bytes = sum(record.size_bytes for record in manifest.files.values())
    _console.print(f"{manifest.id}: {num_bytes / 1e6:.1f} MB in {bundle.path}")
    for report in manifest.verification:
        _console.print(
            f"  {report.variant}: {report.num_identical} of {report.num_segments} segments as PyTorch, "
            f"scores within {report.max_score_difference:.1e}"
        )
