"""`dragoman` = `python -m app`: parses the command line; what a command does is imported when it runs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Optional

import typer

from app.cli.keys import keys
from app.cli.termination import sigterm_as_ctrl_c
from app.errors import DragomanError, InvalidRequest, SettingsError

_EXIT_FAILED = 1
_EXIT_USAGE = 2
_EXIT_INTERRUPTED = 130
_TRAINING_MODULES = frozenset(
    {
        *(
            "torch",
            "onnx",
            "yaml",
            "safetensors",
            "thot",
            "backports",
            "sacrebleu",
            "matplotlib",
            "tensorboard",
            "httpx",
        ),
        *("exporters", "model"),
    }
)

cli = typer.Typer(
    name="dragoman",
    help="Self-hosted machine translation.",
    epilog="Every setting is also an environment variable DRAGOMAN_<NAME>; `dragoman settings` lists them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
models = typer.Typer(help="Show and check bundles.", no_args_is_help=True)
cli.add_typer(models, name="models")
cli.add_typer(keys, name="keys")

Bundles = Annotated[
    Optional[Path],  # noqa: UP045  # typer reads the annotation at run time
    typer.Option("--bundles", help="Folder of bundles, or one bundle. Default: the shipped ones."),
]
Device = Annotated[
    Optional[str],  # noqa: UP045  # typer reads the annotation at run time
    typer.Option(help="Where to run: auto, cpu, cuda (every GPU) or cuda:N. Default: auto."),
]
Variant = Annotated[
    Optional[str],  # noqa: UP045  # likewise
    typer.Option(help="Graphs to run: auto, cpu-int8, cpu-fp32 or cuda-fp16. Default: auto."),
]
Workers = Annotated[
    Optional[int],  # noqa: UP045  # likewise
    typer.Option(help="Decoding threads. Default: the usable cores, or one for each GPU."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        from app.cli.version import installed_version

        print(f"dragoman {installed_version()}")
        raise typer.Exit


@cli.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Self-hosted machine translation."""


@cli.command()
def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on. Default: 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(help="TCP port. Default: 8000.")] = None,
    bundles: Bundles = None,
    device: Device = None,
    variant: Variant = None,
    workers: Workers = None,
    max_rows: Annotated[int | None, typer.Option(help="Segments decoded together per worker.")] = None,
    drain_s: Annotated[
        float | None, typer.Option(help="Seconds that admitted work may take to finish.")
    ] = None,
    log_format: Annotated[str | None, typer.Option(help="console or json.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
) -> None:
    """Answer translation requests over HTTP until SIGTERM or Ctrl-C."""
    from app.cli.serve import serve as run

    run(
        {
            "host": host,
            "port": port,
            "bundles": bundles,
            "device": device,
            "variant": variant,
            "num_workers": workers,
            "max_rows": max_rows,
            "drain_s": drain_s,
            "log_format": log_format,
            "log_level": log_level,
        }
    )


@cli.command()
def translate(
    texts: Annotated[list[str] | None, typer.Argument(metavar="TEXT", help="Texts to translate.")] = None,
    source: Annotated[str | None, typer.Option("--source", "-s", help="Source language, such as en.")] = None,
    target: Annotated[str | None, typer.Option("--target", "-t", help="Target language, such as pt.")] = None,
    bundle: Annotated[Path | None, typer.Option(help="One bundle; its languages need not be named.")] = None,
    bundles: Bundles = None,
    source_file: Annotated[Path | None, typer.Option("--input", "-i", help="File, one text a line.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File for the translations.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with OUTPUT.partial.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing OUTPUT.")] = False,
    report: Annotated[
        Path | None, typer.Option(help="With --input: write counts and speed to this file, as JSON.")
    ] = None,
    encoding: Annotated[str, typer.Option(help="Encoding of the input; the output is UTF-8.")] = "utf-8",
    beam_size: Annotated[int, typer.Option(help="Live beams; 1 is greedy search.")] = 1,
    length_penalty: Annotated[
        float, typer.Option(help="Exponent of beam search's length normalisation; 0: plain sums.")
    ] = 1.0,
    shortlist: Annotated[
        bool | None,
        typer.Option(
            "--shortlist/--no-shortlist", help="Use the bundle's lexical shortlist. Default: if it has one."
        ),
    ] = None,
    device: Device = None,
    variant: Variant = None,
    workers: Workers = None,
) -> None:
    """Translate TEXTs, or --input line by line, or standard input line by line.

    A file's translation is written to OUTPUT.partial and renamed when it is complete. If it is
    interrupted, the same command with --resume goes on where it stopped.
    """
    if (source_file is None) != (output is None):
        raise typer.BadParameter("--input and --output go together; a pipe needs neither")
    if texts and source_file is not None:
        raise typer.BadParameter("give either TEXTs or --input, not both")
    if (resume or force) and output is None:
        raise typer.BadParameter("--resume and --force are for --input and --output")
    if report is not None and output is None:
        raise typer.BadParameter("--report is for --input and --output")
    if bundle is not None and bundles is not None:
        raise typer.BadParameter("give either --bundle or --bundles, not both")
    if source_file is not None and not source_file.is_file():
        raise typer.BadParameter(f"{source_file} is not a file")
    from app.cli.translate import FileOptions
    from app.cli.translate import translate as run
    from app.decoding.options import DecodingOptions

    file = None
    if source_file is not None and output is not None:
        file = FileOptions(source_file, output, resume, force, report)
    try:
        run(
            texts or [],
            file,
            source=source,
            target=target,
            encoding=encoding,
            overrides={
                "bundles": bundle or bundles,
                "device": device,
                "variant": variant,
                "num_workers": workers,
                "use_shortlist": shortlist,
            },
            decoding=DecodingOptions(beam_size=beam_size, length_penalty=length_penalty),
        )
    except KeyboardInterrupt:
        hint = "" if file is None else f"; pass --resume to go on with {file.output}.partial"
        print(f"interrupted{hint}", file=sys.stderr)
        raise typer.Exit(_EXIT_INTERRUPTED) from None


@models.command("list")
def list_models(bundles: Bundles = None, as_json: AsJson = False) -> None:
    """List the bundles: languages, variants, size, measured quality."""
    from app.cli.models import list_models as run
    from app.settings import load_settings

    run(load_settings({"bundles": bundles}).bundles, as_json=as_json)


@models.command()
def verify(bundles: Bundles = None, as_json: AsJson = False) -> None:
    """Check every file of every bundle against the checksums of its manifest."""
    from app.cli.models import verify_models
    from app.settings import load_settings

    if not verify_models(load_settings({"bundles": bundles}).bundles, as_json=as_json):
        raise typer.Exit(_EXIT_FAILED)


@cli.command()
def settings(as_json: AsJson = False) -> None:
    """List every setting: its environment variable, its value now, its meaning."""
    from app.cli.settings_table import print_settings
    from app.settings import load_settings

    print_settings(load_settings(), as_json=as_json)


def _training_tool(name: str, summary: str, load: Callable[[], typer.Typer]) -> None:
    """Add a command of the training side, whose module is imported when it runs.

    It is named as text: the service must not depend on the training side, nor that be typed here.
    """

    @cli.command(
        name,
        help=f"{summary} (needs the train extra); see `dragoman {name} --help`.",
        context_settings={
            "allow_extra_args": True,
            "ignore_unknown_options": True,
            "help_option_names": [],
        },
        add_help_option=False,
    )
    def run(context: typer.Context) -> None:
        try:
            tool = load()
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in _TRAINING_MODULES:
                raise
            from app.cli.training_help import TRAINING_HELP, needs

            sentence = needs(name, str(error.name))
            if context.args and not {"-h", "--help"} & set(context.args):
                print(sentence, file=sys.stderr)
                raise typer.Exit(_EXIT_FAILED) from None
            print(f"{TRAINING_HELP[name]}\n{sentence}")
            raise typer.Exit from None
        tool(args=context.args, prog_name=f"dragoman {name}")


_training_tool(
    "export", "Make a bundle from a checkpoint", lambda: importlib.import_module("exporters.cli").app
)
_training_tool(
    "data", "Clean, sample and hold out training text", lambda: importlib.import_module("model.data.cli").app
)
_training_tool(
    "train",
    "Train a Transformer on parallel text",
    lambda: importlib.import_module("model.training.cli").train_app,
)
_training_tool(
    "distil",
    "Train a student on a teacher's translations",
    lambda: importlib.import_module("model.training.cli").distil_app,
)
_training_tool(
    "evaluate",
    "Score bundles or services on test sets",
    lambda: importlib.import_module("model.evaluation.cli").app,
)
_training_tool(
    "plot",
    "Draw what a model does and how its training went",
    lambda: importlib.import_module("model.figures.cli").app,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; ends by SystemExit with 0, 1 (it failed), 2 (wrong usage) or 130 (Ctrl-C, SIGTERM).

    Args:
        arguments: without the program's name; None takes the process's.
    """
    try:
        with sigterm_as_ctrl_c():
            cli(args=None if arguments is None else list(arguments), prog_name="dragoman")
    except DragomanError as error:
        print(f"dragoman: {error.message}", file=sys.stderr)
        sys.exit(_EXIT_USAGE if isinstance(error, InvalidRequest | SettingsError) else _EXIT_FAILED)
    except ModuleNotFoundError as error:
        if error.name != "onnxruntime":
            raise
        # It comes with an extra, since two packages provide it and only one of them may be installed.
        print(
            "dragoman: onnxruntime is not installed; install the extra cpu or the extra gpu, never both: "
            "pip install -c constraints.txt -e '.[cpu]'",
            file=sys.stderr,
        )
        sys.exit(_EXIT_FAILED)
    except OSError as error:
        # Files and ports of the user's choosing: the reason is enough, the stack helps nobody.
        print(f"dragoman: {error}", file=sys.stderr)
        sys.exit(_EXIT_FAILED)


if __name__ == "__main__":
    main()
