"""What a model is trained to do better: the loss of one batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from model.data.batches import Batch
from model.transformer import Transformer


@dataclass(frozen=True)
class Loss:
    """The loss of one batch, as a sum, so that the mean over several batches is exact.

    Attributes:
        total: the sum over the target tokens, with its gradient; scalar.
        num_tokens: target tokens summed over.
        parts: sums of what makes up the total, detached, by name.
    """

    total: Tensor
    num_tokens: int
    parts: Mapping[str, float] = field(default_factory=dict)


class Objective(Protocol):
    """A loss; ``step`` lets what is random in it follow from the run's position."""

    def __call__(self, model: Transformer, batch: Batch, *, step: int) -> Loss:
        """The loss of a batch under a model in its present mode."""
        ...


@dataclass(frozen=True)
class LabelSmoothing:
    """Cross-entropy with the given tokens, smoothed as in Szegedy et al. 2016, section 7.

    The wanted distribution is ``(1 - e) onehot + e / V``; with e = 0 it is the plain cross-entropy.

    Attributes:
        smoothing: e.
        unknown_id: a piece that no text should have and that is left out of "all others"; or None.
    """

    smoothing: float = 0.0
    unknown_id: int | None = None

    def __call__(self, model: Transformer, batch: Batch, *, step: int) -> Loss:  # noqa: ARG002
        """Sum over real target tokens of the smoothed cross-entropy."""
        logits = model(batch.source_ids, batch.source_mask, batch.target_ids)  # [B, T, V]
        total, plain = smoothed_cross_entropy(
            logits[batch.target_mask].float(),
            batch.target_ids[batch.target_mask],
            smoothing=self.smoothing,
            unknown_id=self.unknown_id,
        )
        return Loss(total, batch.num_target_tokens(), {"cross_entropy": plain})


def smoothed_cross_entropy(
    logits: Tensor, target_ids: Tensor, *, smoothing: float, unknown_id: int | None = None
) -> tuple[Tensor, float]:
    """The smoothed sum over N tokens with its gradient, and the plain sum without.

    Args:
        logits: f32 [N, V].
        target_ids: i64 [N].
        smoothing: e, in [0, 1).
        unknown_id: left out of the even distribution. In a bundle's weights its bias is -1e9, so that a mean
            over it would drown everything else.
    """
    log_probs = functional.log_softmax(logits, dim=1)  # [N, V]
    plain = -log_probs.gather(1, target_ids[:, None]).sum()
    if not smoothing:
        return plain, float(plain.detach())
    others = log_probs
    if unknown_id is not None:
        others = torch.cat([log_probs[:, :unknown_id], log_probs[:, unknown_id + 1 :]], dim=1)  # [N, V - 1]
    uniform = -others.mean(dim=1).sum()
    return (1.0 - smoothing) * plain + smoothing * uniform, float(plain.detach())


def autocast_of(device: torch.device, *, bfloat16: bool) -> torch.autocast:
    """The context that multiplies matrices in bfloat16, or one that changes nothing."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=bfloat16)
