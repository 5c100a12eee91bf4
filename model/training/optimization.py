"""AdamW over a model's parameters, some of them slower or frozen, with gradients summed over processes."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from app.errors import InvalidOption, TrainingFailed
from model.training.config import TrainingSection
from model.training.processes import Processes
from model.training.schedule import learning_rate_share


@dataclass(frozen=True)
class Update:
    """One update of the weights.

    Attributes:
        gradient_norm: before it was clipped.
        num_tokens: that all processes summed over.
    """

    gradient_norm: float
    num_tokens: int


class Optimization:
    """The update rule of one run."""

    def __init__(self, model: nn.Module, section: TrainingSection) -> None:
        """Sort the parameters by their learning rate; those with 0 lose their gradient for good.

        Raises:
            InvalidOption: a pattern fits no parameter, or nothing is left to train.
        """
        self._section = section
        scales = learning_rate_scales([name for name, _ in model.named_parameters()], section)
        groups: dict[tuple[float, float], list[Tensor]] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(scales[name] > 0)
            if scales[name] > 0:
                decay = section.weight_decay if parameter.ndim > 1 else 0.0
                groups.setdefault((scales[name], decay), []).append(parameter)
                self.parameters[name] = parameter
        if not self.parameters:
            raise InvalidOption("learning_rate_scales freezes every parameter; leave some to train")
        self._scales = [scale for scale, _ in groups]
        self._adamw = torch.optim.AdamW(
            [{"params": group, "weight_decay": decay} for (_, decay), group in groups.items()],
            lr=section.learning_rate,
            betas=section.betas,
            eps=section.epsilon,
        )

    def update(self, step: int, num_tokens: int, processes: Processes) -> Update:
        """Apply the gradients of summed losses as those of a mean over tokens.

        Args:
            step: counted from 1; sets the learning rate.
            num_tokens: that this process summed over.
            processes: whose gradients are summed.

        Raises:
            TrainingFailed: the gradient is not finite; the weights are as they were.
        """
        gradients = [
            parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            for parameter in self.parameters.values()
        ]
        total = processes.summed(gradients, num_tokens)
        for gradient in gradients:
            gradient.div_(max(total, 1))
        for parameter, gradient in zip(self.parameters.values(), gradients, strict=True):
            parameter.grad = gradient
        limit = self._section.clip_norm or float("inf")
        norm = float(nn.utils.clip_grad_norm_(self.parameters.values(), limit))
        if not math.isfinite(norm):
            raise TrainingFailed(
                f"the gradient of step {step} is not a finite number; lower training.learning_rate or "
                "training.clip_norm, and go on from the newest checkpoint with the same command"
            )
        rate = self.learning_rate(step)
        for group, scale in zip(self._adamw.param_groups, self._scales, strict=True):
            group["lr"] = rate * scale
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        return Update(norm, total)

    def learning_rate(self, step: int) -> float:
        """The rate of parameters with scale 1."""
        section = self._section
        return section.learning_rate * learning_rate_share(
            step,
            schedule=section.schedule,
            warmup_steps=section.warmup_steps,
            max_steps=section.max_steps,
            power=section.schedule_power,
        )

    def state(self) -> dict[str, Tensor]:
        """AdamW's moments by parameter, for a checkpoint."""
        state = {}
        for name, parameter in self.parameters.items():
            for part, value in self._adamw.state[parameter].items():
                state[f"{name}:{part}"] = torch.as_tensor(value)
        return state

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on with the moments of `state`.

        Raises:
            ValueError: they are of other parameters.
        """
        names = {name.rpartition(":")[0] for name in state}
        if state and names != set(self.parameters):
            odd = sorted(names ^ set(self.parameters))
            raise ValueError(f"the moments are of other parameters ({len(odd)} differ, such as {odd[0]})")
        for key, value in state.items():
            name, _, part = key.rpartition(":")
            # As AdamW has them: moments beside their parameter, the count of steps on the CPU.
            device = torch.device("cpu") if part == "step" else self.parameters[name].device
            self._adamw.state[self.parameters[name]][part] = value.to(device, copy=True)


def learning_rate_scales(names: Sequence[str], section: TrainingSection) -> dict[str, float]:
    """The factor of each parameter's learning rate: that of the first pattern that fits, or 1.

    Raises:
        InvalidOption: a pattern fits none.
    """
    patterns = section.learning_rate_scales
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise InvalidOption(
                f"learning_rate_scales has the pattern {pattern!r}, which fits none of the {len(names)} "
                f"parameters (such as {names[0]}); mend or remove it"
            )
    first = {
        name: next((pattern for pattern in patterns if fnmatch.fnmatchcase(name, pattern)), None)
        for name in names
    }
    if hidden := [pattern for pattern in patterns if pattern not in first.values()]:
        raise InvalidOption(
            f"learning_rate_scales has the pattern {hidden[0]!r}, and all that it fits is taken by patterns "
            "before it; put it first"
        )
    return {name: 1.0 if pattern is None else patterns[pattern] for name, pattern in first.items()}
