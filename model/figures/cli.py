"""`dragoman plot`: every figure from the command line. Imported on demand; needs the `train` extra."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Optional

import sentencepiece
import typer
from matplotlib.figure import Figure
from rich.console import Console

from app.bundle import open_bundle
from app.bundle.manifest import MANIFEST_NAME
from app.errors import InvalidOption
from app.text import Tokenizer, check_text
from model.figures import (
    attention_heatmaps,
    attention_weights,
    complexity,
    positions,
    scaling,
    style,
    training_curves,
    translation_time,
)
from model.saved_model import load_model
from model.transformer import Transformer

app = typer.Typer(
    name="plot",
    help="Draw the model, its training and what it costs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_console = Console(stderr=True)

DEFAULT_SENTENCE = "The dog is tired because it ran."


class FileFormat(StrEnum):
    """What figures in a folder are."""

    png = "png"
    svg = "svg"


class PositionFigure(StrEnum):
    """The figures of `plot positions`."""

    codes = "codes"
    distance = "distance"


class AttentionFigure(StrEnum):
    """The figures of `plot attention`."""

    encoder = "encoder"
    decoder = "decoder"
    cross = "cross"


class Against(StrEnum):
    """The x axis of `plot curves`."""

    step = "step"
    time = "time"


Out = Annotated[Path, typer.Option(help="A .png or .svg file, or a folder for files of the figures' names.")]
Force = Annotated[bool, typer.Option("--force", help="Replace figures that exist.")]
Format = Annotated[FileFormat, typer.Option("--format", help="Format of the files in a folder.")]
Model = Annotated[Path, typer.Argument(help="Folder of a trained model, or of a bundle.")]
Repeats = Annotated[int, typer.Option(min=1, help="How often everything is measured; the median counts.")]


@dataclass(frozen=True)
class OpenedModel:
    """A model that can be looked into.

    Attributes:
        module: in eval mode, float32, on the CPU.
        tokenizer: of source and target.
    """

    module: Transformer
    tokenizer: Tokenizer


@app.callback()
def root() -> None:
    """Draw the model, its training and what it costs."""


@app.command("positions")
def positions_command(
    out: Out,
    d_model: Annotated[int, typer.Option("--width", min=4, max=8192, help="Features of a code, even.")] = 128,
    num_positions: Annotated[
        int, typer.Option("--positions", min=2, max=4096, help="Rows of the heat map.")
    ] = 100,
    max_distance: Annotated[
        int, typer.Option("--distance", min=1, max=1024, help="Furthest neighbour, in tokens.")
    ] = 60,
    only: Annotated[
        Optional[PositionFigure],  # noqa: UP045  # typer reads the annotation at run time
        typer.Option(help="Draw this figure alone."),
    ] = None,
    file_format: Format = FileFormat.png,
    force: Force = False,
) -> None:
    """The position codes in both layouts, and their dot products against distance."""
    if d_model % 2:
        raise InvalidOption(f"--width is {d_model}; position codes need an even number")
    wanted = [only] if only else list(PositionFigure)
    files = _files(out, [f"positions-{name}" for name in wanted], file_format, force)
    for name in wanted:
        if name is PositionFigure.codes:
            figure = positions.draw_codes(d_model=d_model, num_positions=num_positions)
        else:
            figure = positions.draw_dot_products(d_model=d_model, max_distance=max_distance)
        _save(figure, files[f"positions-{name}"])


@app.command("scaling")
def scaling_command(
    out: Out,
    max_head_size: Annotated[
        int, typer.Option(min=2, max=2048, help="Largest head size; a power of 2, or the one below it.")
    ] = 1024,
    file_format: Format = FileFormat.png,
    force: Force = False,
) -> None:
    """Why attention divides by the root of the head size: variance, saturation, gradient."""
    files = _files(out, ["scaling"], file_format, force)
    _save(scaling.draw_scaling(max_head_size=max_head_size), files["scaling"])


@app.command("attention")
def attention_command(
    model: Model,
    out: Out,
    text: Annotated[str, typer.Option(help="The source sentence.")] = DEFAULT_SENTENCE,
    only: Annotated[
        Optional[AttentionFigure],  # noqa: UP045
        typer.Option(help="Draw this figure alone."),
    ] = None,
    file_format: Format = FileFormat.png,
    force: Force = False,
) -> None:
    """What every layer and head looks at while a sentence is translated."""
    check_text(text, name="--text")
    if not text.strip():
        raise InvalidOption("--text is blank; give a sentence")
    opened = _open(model)
    has_decoder = opened.module.config.decoder_cell != "ssru"
    if only is AttentionFigure.decoder and not has_decoder:
        raise InvalidOption(
            f"the decoder of {model} has recurrent cells (SSRU) in the place of self-attention, so there "
            "are no weights to draw; choose --only cross or --only encoder"
        )
    kinds = [AttentionFigure(kind) for kind in attention_heatmaps.ATTENTION_KINDS]
    wanted = (
        [only] if only else [kind for kind in kinds if has_decoder or kind is not AttentionFigure.decoder]
    )
    files = _files(out, [f"attention-{kind}" for kind in wanted], file_format, force)
    maps = attention_weights.attention_of(opened.module, opened.tokenizer, text)
    if not has_decoder:
        _console.print("the decoder is recurrent (SSRU): it has no self-attention, that figure is left out")
    if not maps.ended:
        _console.print(f"the model did not end the sentence within {len(maps.target_pieces)} tokens")
    for kind in wanted:
        _save(attention_heatmaps.draw_attention(maps, kind.value), files[f"attention-{kind}"])


@app.command("curves")
def curves_command(
    runs: Annotated[list[Path], typer.Argument(help="Folders of training runs, or their metrics.jsonl.")],
    out: Out,
    against: Annotated[Against, typer.Option(help="Draw against updates or hours.")] = Against.step,
    metric: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="Draw this number alone; may be repeated."),
    ] = None,
    file_format: Format = FileFormat.png,
    force: Force = False,
) -> None:
    """Loss, BLEU, learning rate and speed of one or several training runs."""
    files = _files(out, ["curves"], file_format, force)
    read = [training_curves.read_run(path) for path in runs]
    axis: training_curves.TimeAxis = "step" if against is Against.step else "time_s"
    _save(training_curves.draw_curves(read, against=axis, metrics=metric or ()), files["curves"])


@app.command("time")
def time_command(
    model: Model,
    out: Out,
    repeats: Repeats = 5,
    file_format: Format = FileFormat.png,
    force: Force = False,
) -> None:
    """How long a sentence takes against its length, with the parts that grow with n and n squared."""
    files = _files(out, ["time"], file_format, force)
    measured = translation_time.measure_translation(_open(model).module, repeats=repeats)
    for times in measured:
        fit = translation_time.fit_quadratic(times.lengths, times.times_s)
        typer.echo(
            f"{times.title}: {fit.constant * 1e3:.3g} ms + {fit.linear * 1e3:.3g} ms n"
            f" + {fit.quadratic * 1e6:.3g} us n^2, residual {fit.residual:.1%}"
        )
    _save(translation_time.draw_translation_time(measured), files["time"])


@app.command("complexity")
def complexity_command(
    out: Out,
    repeats: Repeats = 5,
    max_length: Annotated[int, typer.Option(min=64, max=8192, help="Longest sequence.")] = 2048,
    file_format: Format = FileFormat.png,
    force: Force = False,
) -> None:
    """Time and memory of four kinds of layer against length and width."""
    files = _files(out, ["complexity"], file_format, force)
    lengths = {n for n in complexity.LENGTHS if n <= max_length} | {complexity.FIXED_LENGTH}
    points = {(n, complexity.FIXED_WIDTH) for n in lengths}
    points |= {(complexity.FIXED_LENGTH, d) for d in complexity.WIDTHS}
    costs = complexity.measure_costs(sorted(points), repeats=repeats)
    typer.echo("layer\tn\td\ttime_ms\tkept_MiB")
    for cost in costs:
        typer.echo(
            f"{cost.layer_type}\t{cost.length}\t{cost.width}"
            f"\t{cost.time_s * 1e3:.3f}\t{cost.memory_bytes / 2**20:.3f}"
        )
    _save(complexity.draw_complexity(costs), files["complexity"])


def _open(folder: Path) -> OpenedModel:
    """The PyTorch model in a model folder or a bundle."""
    if (folder / MANIFEST_NAME).is_file():
        from exporters.bundle_checkpoint import read_checkpoint
        from exporters.torch_reference import to_module

        checkpoint = read_checkpoint(open_bundle(folder))
        return _opened(to_module(checkpoint), checkpoint.tokenizer)
    saved = load_model(folder)
    return _opened(saved.module(), saved.tokenizer)


def _opened(module: Transformer, tokenizer: bytes) -> OpenedModel:
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer)
    return OpenedModel(module, Tokenizer(processor, eos_id=module.config.eos_id))


def _files(out: Path, names: list[str], file_format: FileFormat, force: bool) -> dict[str, Path]:
    return style.Destination(out, force=force, suffix=f".{file_format}").files(names)


def _save(figure: Figure, path: Path) -> None:
    style.save(figure, path)
    _console.print(f"{path}: {path.stat().st_size / 1e3:.0f} kB", highlight=False, soft_wrap=True)
