"""One process or several that train one model together (torch.distributed)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module

import torch
from torch import Tensor, distributed

_LONGEST_WAIT = timedelta(days=7)  # PyTorch's own is 30 minutes


@dataclass(frozen=True)
class Processes:
    """This process among those that share a run.

    Attributes:
        rank: its number; 0 writes files and speaks.
        count: how many there are.
    """

    rank: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this one writes files and speaks."""
        return self.rank == 0

    def summed(self, gradients: Sequence[Tensor], num_tokens: int) -> int:
        """Replace the gradients by their sums over all processes, in place; returns the tokens of all."""
        if self.count == 1:
            return num_tokens
        # One message: many small ones cost more than the copy.
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        tokens = torch.tensor([num_tokens], dtype=torch.int64, device=flat.device)
        distributed.all_reduce(flat)
        distributed.all_reduce(tokens)
        start = 0
        for gradient in gradients:
            gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
            start += gradient.numel()
        return int(tokens)

    def totals(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Sums over all processes by name; one that had nothing to do may lack some names."""
        if self.count == 1:
            return dict(sums)
        of_each: list[dict[str, float]] = [{} for _ in range(self.count)]
        distributed.all_gather_object(of_each, dict(sums))
        names = dict.fromkeys(name for one in of_each for name in one)
        return {name: sum(one.get(name, 0.0) for one in of_each) for name in names}

    def agreed(self, value: bool) -> bool:
        """What the first process says, for all."""
        if self.count == 1:
            return value
        flag = torch.tensor([value], dtype=torch.int64)
        distributed.broadcast(flag, src=0)
        return bool(flag)

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Give all processes the first one's values, in place."""
        if self.count > 1:
            for tensor in tensors:
                distributed.broadcast(tensor, src=0)

    def wait(self) -> None:
        """Until all are here."""
        if self.count > 1:
            distributed.barrier()


def joined(device: torch.device) -> Processes:
    """Join the processes that `model.training.launcher` or torchrun started, or be the only one.

    They wait for one another as long as it takes: the first one prepares the data alone, and the launcher
    ends the others where one has failed.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        return Processes()
    # Its functions hold the group of the time of their import as a default, and the first step of an
    # optimiser imports them: read after the group is made, they would keep its threads alive when it is
    # left, and one of those that frees a tensor while the interpreter ends aborts the process.
    import_module("torch.distributed.nn.functional")
    if device.type == "cuda":
        # "cuda" means this process's own; what is no tensor of the model still travels by way of the CPU.
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        distributed.init_process_group("cpu:gloo,cuda:nccl", timeout=_LONGEST_WAIT)
    else:
        distributed.init_process_group("gloo", timeout=_LONGEST_WAIT)
    return Processes(distributed.get_rank(), count)


def left() -> None:
    """Leave them: their threads have ended when this returns."""
    if distributed.is_initialized():
        distributed.destroy_process_group()
