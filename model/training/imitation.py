"""Before the first step: a student's self-attentions learn to do what its teacher's recurrences do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from model.data.batches import Batch, BatchStream, WeightedSource
from model.distillation.recurrence import imitate_recurrences
from model.training.checkpoint import checkpoints_of
from model.training.config import RunConfig
from model.training.processes import Processes
from model.training.trainer import CHECKPOINTS, seed_of
from model.transformer import Transformer


def has_recurrences_to_imitate(config: RunConfig, teacher: Transformer) -> bool:
    """Whether the run is at its beginning, and its student a copy of a teacher with recurrences."""
    distillation = config.distillation
    if distillation is None or not distillation.from_teacher or teacher.config.decoder_cell != "ssru":
        return False
    return not checkpoints_of(config.output / CHECKPOINTS)


def imitate_teacher(
    config: RunConfig,
    model: Transformer,
    teacher: Transformer,
    sources: Sequence[WeightedSource],
    processes: Processes,
    *,
    say: Callable[[str], None],
) -> None:
    """Make the student's self-attentions, by the first process for all.

    Args:
        config: of a run for which `has_recurrences_to_imitate` holds.
        model: the student, changed in place.
        teacher: on the same device.
        sources: of the run's pairs; they are gone through in another order than in the run itself.
        processes: those that share the run.
        say: told what was reached.
    """
    assert config.distillation is not None
    steps = config.distillation.fit_steps
    if processes.is_first:
        if steps:
            say(
                f"fitting self-attention to the recurrence: {steps} steps; a run that is stopped before "
                "their end begins them anew"
            )
        console = Console(stderr=True)
        with Progress(
            TextColumn("fitting self-attention to the recurrence"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        ) as progress:
            task = progress.add_task("", total=steps)

            def on_step(*_: object) -> None:
                progress.advance(task)

            batches = _batches(config, model, sources)
            reached = imitate_recurrences(model, teacher, batches, steps=steps, on_step=on_step)
        for number, fit in enumerate(reached if steps else ()):
            say(
                f"decoder layer {number}: self-attention leaves {fit.unexplained:.1%} of the "
                f"recurrence's variance unexplained after {steps} steps"
            )
    processes.share([parameter.data for parameter in model.parameters()])


def _batches(config: RunConfig, model: Transformer, sources: Sequence[WeightedSource]) -> Iterator[Batch]:
    """Endless, on the model's device."""
    stream = BatchStream(sources, max_tokens=config.training.batch_tokens, seed=seed_of(config.seed, 3))
    device = model.output_bias.device
    while True:
        batch = stream.next_batch()
        assert batch is not None  # None is for processes that share a batch
        yield batch.to(device)
