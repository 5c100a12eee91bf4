"""`dragoman train` and `dragoman distil`. Imported on demand; they need the `train` extra."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Optional

import torch
import typer
from rich.console import Console

from app.bundle import MANIFEST_NAME, open_bundle
from app.errors import CheckpointError, InvalidOption
from model.saved_model import load_model
from model.training.config_file import check_files, load_run_config
from model.training.device import device_of, uses_bfloat16
from model.training.kept_memory import keep_freed_memory
from model.training.launcher import run_processes
from model.training.processes import joined, left
from model.training.run import Surroundings, run_training
from model.training.start import Given

_console = Console(stderr=True)
Config = Annotated[Path, typer.Argument(help="The run's TOML file; see docs/training.md.")]
Overfit = Annotated[
    bool,
    typer.Option("--overfit", help="Learn the first batch by heart: shows that a model can learn at all."),
]
Processes = Annotated[
    Optional[int],  # noqa: UP045  # typer reads the annotation at run time
    typer.Option(min=1, help="Processes that share the run, in place of training.processes."),
]


def _app(name: str, command: Callable[..., None]) -> typer.Typer:
    """A command by itself."""
    app = typer.Typer(
        name=name,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.command(name)(command)
    return app


def train(config: Config, overfit: Overfit = False, processes: Processes = None) -> None:
    """Train a Transformer on parallel text, as CONFIG says.

    A run that was stopped goes on from its newest checkpoint when the same command is given again.
    The result is the model folder OUTPUT/model; `dragoman export trained` makes a bundle of it.
    """
    _run(config, overfit=overfit, num_processes=processes, needs_teacher=False)


def distil(config: Config, overfit: Overfit = False, processes: Processes = None) -> None:
    """Train a student on a teacher's translations, probabilities and hidden states, as CONFIG says.

    The teacher is a bundle or a model folder. Its translations are made beforehand, by
    `dragoman translate`. A run that was stopped goes on from its newest checkpoint when the same
    command is given again.
    """
    _run(config, overfit=overfit, num_processes=processes, needs_teacher=True)


def _run(path: Path, *, overfit: bool, num_processes: int | None, needs_teacher: bool) -> None:
    config = load_run_config(path)
    if needs_teacher and config.distillation is None:
        raise InvalidOption(f"{path} has no [distillation]; add one, or take `dragoman train`")
    if not needs_teacher and config.distillation is not None:
        raise InvalidOption(f"{path} has a [distillation]; take `dragoman distil`, or remove it")
    check_files(config)
    wanted = num_processes or config.training.processes
    if wanted > 1 and "WORLD_SIZE" not in os.environ:
        raise typer.Exit(run_processes(wanted, [sys.executable, "-m", "app", *sys.argv[1:]]))
    if overfit:
        config = config.model_copy(
            update={"output": config.output.with_name(f"{config.output.name}-overfit")}
        )
    training = config.training.model_copy(update={"processes": wanted})
    config = config.model_copy(update={"training": training})
    keep_freed_memory()
    torch.set_num_threads(training.threads)
    device = device_of(training)
    shared = joined(device)
    try:
        if shared.count != wanted:
            raise InvalidOption(
                f"{wanted} processes are wanted and WORLD_SIZE says {shared.count}; give --processes "
                f"{shared.count}, or unset the variable"
            )
        around = Surroundings(
            open_model=open_model,
            processes=shared,
            device=device,
            bfloat16=uses_bfloat16(training.precision, device),
            say=_say if shared.is_first else lambda _: None,
        )
        folder = run_training(config, around, overfit=overfit)
        around.say(f"the model is in {folder}")
    except KeyboardInterrupt:
        _say("interrupted; the same command goes on")
        raise typer.Exit(130) from None
    finally:
        left()


def open_model(path: Path) -> Given:
    """Read a model folder, or a bundle with its shortlist.

    Raises:
        CheckpointError: it is neither.
        BundleError: the bundle is damaged.
    """
    if (path / MANIFEST_NAME).is_file():
        # Reading ONNX graphs is the exporters' knowledge; only this entry point joins the two sides.
        from exporters.trained import shortlist_for, to_saved_model

        bundle = open_bundle(path)
        model = to_saved_model(bundle)
        if bundle.manifest.shortlist is None:
            return Given(model)
        shortlist = shortlist_for(model, file=None, bundle=path)
        return Given(model, None if shortlist is None else shortlist.candidates)
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder; name a bundle or a model folder")
    return Given(load_model(path))


def _say(text: str) -> None:
    _console.print(text, highlight=False, soft_wrap=True)


train_app = _app("train", train)
distil_app = _app("distil", distil)
