"""The training loop: batches in, updates, evaluations and checkpoints out; it can stop and go on anywhere."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from app.errors import CheckpointError
from model.data.batches import BatchStream
from model.training.checkpoint import (
    RunState,
    averaged_weights,
    checkpoints_of,
    load_checkpoint,
    remove_all_but,
    save_checkpoint,
    step_of,
)
from model.training.config import DevSection, TrainingSection
from model.training.dev import DevScores, DevSet
from model.training.interruption import Interruption
from model.training.metrics import RunMetrics
from model.training.objective import Objective, autocast_of
from model.training.optimization import Optimization
from model.training.processes import Processes
from model.transformer import Transformer

CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class Judge:
    """The sentences that judge a run, and how often and by what they do."""

    dev_set: DevSet
    section: DevSection

    def value(self, scores: DevScores) -> float:
        """What decides, made such that more is better; a loss that is no number is the worst."""
        if self.section.stop_by == "bleu" and scores.bleu is not None:
            return scores.bleu
        return -math.inf if math.isnan(scores.loss) else -scores.loss


class Trainer:
    """One run. All that is random follows from the seed and the step, so that nothing of it needs saving."""

    def __init__(
        self,
        model: Transformer,
        objective_for: Callable[[Transformer], Objective],
        section: TrainingSection,
        *,
        stream: BatchStream,
        folder: Path,
        seed: int,
        fingerprint: str,
        judge: Judge | None = None,
        processes: Processes | None = None,
        bfloat16: bool = False,
    ) -> None:
        """Take up the newest checkpoint of the folder, or begin.

        Args:
            model: on the device to train on.
            objective_for: makes the loss, once it is settled which parameters are frozen.
            section: how to optimise.
            stream: batches, at their beginning.
            folder: of the run.
            seed: of dropout and whatever else the objective draws.
            fingerprint: of what must be the same when a run goes on.
            judge: a dev set, or None.
            processes: those that share the run.
            bfloat16: whether matrices are multiplied in 16 bits.

        Raises:
            CheckpointError: the newest checkpoint is damaged or of another run.
        """
        self._model = model
        self._section = section
        self._stream = stream
        self._folder = folder
        self._seed = seed
        self._judge = judge
        self._processes = processes or Processes()
        self._bfloat16 = bfloat16
        self._optimization = Optimization(model, section)
        self._objective = objective_for(model)
        self._state = RunState(0, stream.position, fingerprint=fingerprint)
        self._device = model.output_bias.device
        self._saved_step: int | None = None
        if found := checkpoints_of(folder / CHECKPOINTS):
            self._resume(found[-1])

    @property
    def state(self) -> RunState:
        """Where the run stands."""
        return self._state

    def run(self) -> None:
        """Train until the last step, or until the dev set has had enough.

        A run that is interrupted (SIGINT or SIGTERM) finishes its step and writes a checkpoint first; a
        second signal ends it at once.

        Raises:
            KeyboardInterrupt: it was interrupted.
            TrainingFailed: a gradient was not finite.
        """
        section = self._section
        self._model.train()
        with (
            RunMetrics(
                self._folder,
                max_steps=section.max_steps,
                first_step=self._state.step,
                tensorboard=section.tensorboard,
                is_silent=not self._processes.is_first,
            ) as metrics,
            Interruption() as interruption,
        ):
            sums: defaultdict[str, float] = defaultdict(float)
            is_interrupted = False
            while self._state.step < section.max_steps and not self._has_had_enough():
                is_interrupted = self._processes.agreed(interruption.was_asked)
                if is_interrupted:
                    break
                self._step(sums, metrics)
            self._save()
            if is_interrupted:
                metrics.say(f"stopped at step {self._state.step}; the same command goes on from there")
                raise KeyboardInterrupt
            if self._has_had_enough():
                metrics.say(f"the dev set has not improved for {self._patience()} evaluations: done")

    def result(self) -> dict[str, Tensor]:
        """The weights of the run: those of the checkpoints of `result_steps`, averaged."""
        folder = self._folder / CHECKPOINTS
        steps = self.result_steps()
        return averaged_weights([path for path in checkpoints_of(folder) if step_of(path) in steps])

    def result_steps(self) -> list[int]:
        """The steps whose weights make the result, ascending: the run's last or best checkpoints.

        The last are those that were due and the one at the end: where the run was interrupted and went on
        makes no difference.

        Without a judge, as in a run that learns one batch by heart, none is the best, and the last are taken.
        """
        found = [step_of(path) for path in checkpoints_of(self._folder / CHECKPOINTS)]
        if self._section.average_of == "best" and self._judge is not None:
            best = self._state.best_steps(self._section.average)
            return [step for step in found if step in best]
        return [step for step in found if self._is_regular(step)][-self._section.average :]

    def _is_regular(self, step: int) -> bool:
        """Whether every run of this configuration has a checkpoint there, interrupted or not."""
        return step == self._state.step or (step > 0 and step % self._section.checkpoint_every_steps == 0)

    def _step(self, sums: defaultdict[str, float], metrics: RunMetrics) -> None:
        """One update and what is due after it; `sums` gathers numbers until they are written."""
        began_s = time.perf_counter()
        for name, value in self._update().items():
            sums[name] += value
        elapsed_s = time.perf_counter() - began_s
        sums["time_s"] += elapsed_s
        self._state = replace(self._state, time_s=self._state.time_s + elapsed_s)
        metrics.advance(self._state.step)
        if self._is_due(self._section.log_every_steps):
            metrics.write(self._state.step, self._state.time_s, self._means(self._processes.totals(sums)))
            sums.clear()
        is_good = self._evaluate_if_due(metrics)
        if is_good or self._is_due(self._section.checkpoint_every_steps):
            self._save()

    def _update(self) -> Mapping[str, float]:
        """One step: the sums of losses and tokens."""
        step = self._state.step + 1
        sums: defaultdict[str, float] = defaultdict(float)
        num_tokens = 0
        for part in range(self._section.accumulate):
            # Dropout follows from the place in the run: it goes on as if it had never stopped.
            torch.manual_seed(seed_of(self._seed, step, part, self._processes.rank))
            batch = self._stream.next_batch(rank=self._processes.rank, num_processes=self._processes.count)
            if batch is None:
                continue
            batch = batch.to(self._device)
            with autocast_of(self._device, bfloat16=self._bfloat16):
                loss = self._objective(self._model, batch, step=step)
            loss.total.backward()  # type: ignore[no-untyped-call]
            num_tokens += loss.num_tokens
            sums["loss"] += float(loss.total.detach())
            sums["source_tokens"] += int(batch.source_mask.sum())
            for name, value in loss.parts.items():
                sums[name] += value
        update = self._optimization.update(step, num_tokens, self._processes)
        sums["tokens"] = num_tokens
        sums["gradient_norm"] = update.gradient_norm
        sums["updates"] = 1
        self._state = replace(
            self._state,
            step=step,
            position=self._stream.position,
            num_tokens=self._state.num_tokens + update.num_tokens,
        )
        return sums

    def _means(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Losses per token, rates per second, from the sums of all processes."""
        rest = {"tokens", "source_tokens", "updates", "time_s", "gradient_norm"}
        tokens = max(sums["tokens"], 1)
        time_s = sums["time_s"] / self._processes.count
        numbers = {name: value / tokens for name, value in sums.items() if name not in rest}
        return numbers | {
            "gradient_norm": sums["gradient_norm"] / sums["updates"],
            "learning_rate": self._optimization.learning_rate(self._state.step),
            "target_tokens": self._state.num_tokens,
            "tokens_per_s": tokens / time_s,
            "source_tokens_per_s": sums["source_tokens"] / time_s,
        }

    def _is_due(self, every: int) -> bool:
        return self._state.step == self._section.max_steps or (every > 0 and self._state.step % every == 0)

    def _patience(self) -> int:
        return self._judge.section.patience if self._judge is not None else 0

    def _has_had_enough(self) -> bool:
        patience = self._patience()
        if not patience:
            return False
        return self._processes.agreed(self._state.evaluations_since_best() >= patience)

    def _evaluate_if_due(self, metrics: RunMetrics) -> bool:
        """Whether the model was judged and its checkpoint is worth keeping."""
        if self._judge is None or not self._is_due(self._judge.section.every_steps):
            return False
        is_good = False
        if self._processes.is_first:
            scores = self._judge.dev_set.evaluate(self._model)
            numbers = {"dev_loss": scores.loss} | ({} if scores.bleu is None else {"dev_bleu": scores.bleu})
            metrics.write(self._state.step, self._state.time_s, numbers)
            entry = (self._state.step, self._judge.value(scores))
            self._state = replace(
                self._state,
                evaluations=(*self._state.evaluations, entry),
                judged_by=self._judge.section.stop_by,
            )
            is_good = self._state.step in self._state.best_steps(self._num_best())
        return self._processes.agreed(is_good)

    def _num_best(self) -> int:
        """How many of the best checkpoints are kept."""
        return self._section.average if self._section.average_of == "best" else 1

    def _save(self) -> None:
        if self._state.step == self._saved_step:
            return
        self._saved_step = self._state.step
        if self._processes.is_first:
            folder = self._folder / CHECKPOINTS
            save_checkpoint(folder, self._model.state_dict(), self._optimization.state(), self._state)
            newest = max(self._section.keep_checkpoints, self._section.average)
            regular = [step for path in checkpoints_of(folder) if self._is_regular(step := step_of(path))]
            remove_all_but(folder, [*regular[-newest:], *self._state.best_steps(self._num_best())])
        self._processes.wait()

    def _resume(self, path: Path) -> None:
        checkpoint = load_checkpoint(path)
        if checkpoint.state.fingerprint != self._state.fingerprint:
            raise CheckpointError(
                f"{path} was made with other data or weights of sources, another seed, batch_tokens, "
                "accumulate, rounds or number of processes; go on with the configuration that it was made "
                "with, or name another output"
            )
        try:
            self._model.load_state_dict(checkpoint.weights, strict=True)
            self._optimization.restore(checkpoint.moments)
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"{path} is of another model or another choice of what is frozen; go on with the "
                "configuration that it was made with, or name another output"
            ) from error
        self._state = checkpoint.state
        judged_by = self._judge.section.stop_by if self._judge is not None else ""
        if self._state.judged_by != judged_by:
            # Losses and BLEU cannot be ranked together: what was judged otherwise says nothing now.
            self._state = replace(self._state, evaluations=(), judged_by=judged_by)
        self._saved_step = checkpoint.state.step
        self._stream.go_to(checkpoint.state.position)


def seed_of(*parts: int) -> int:
    """One seed out of several numbers, as different as theirs."""
    state = np.random.SeedSequence(parts).generate_state(2, np.uint32)
    return int(state[0]) << 32 | int(state[1])
