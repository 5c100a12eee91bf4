"""How an engine uses the machine, and the lanes that come of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from app.runtime.events import RuntimeObserver
from app.runtime.lane import Lane
from app.runtime.served_model import ServedModel

COMPANY = 4
MAX_HELD_STEPS = 6
"""Of closed loops of 32 clients, 4 and 6 cost the least CPU time a request (benchmarks/README.md)."""

_FIRST_GPU_PASS_S = 20.0
"""Before a group's first pass its memory is taken and its steps are captured; kernels are loaded with it."""


@dataclass(frozen=True)
class EngineOptions:
    """How the engine uses the machine.

    Attributes:
        num_workers: decoding threads, one per core, or one per GPU.
        max_waiting_tokens: source tokens times beams admitted and not finished, over all requests.
        max_admission_tokens: padded source tokens encoded between two decoder steps.
        max_rows: rows per row group of a worker.
        use_shortlist: limit the output to each bundle's lexical shortlist, where it has one.
        max_bulk_share: share of each group's rows and of the waiting tokens that bulk requests may hold.
        request_timeout_s: seconds a request may take that asks for no less; 0 sets no limit.
        max_cache_bytes: for translations of segments that may come again; 0 decodes every segment anew.
    """

    num_workers: int
    max_waiting_tokens: int = 131_072
    max_admission_tokens: int = 1024
    max_rows: int = 64
    use_shortlist: bool = True
    max_bulk_share: float = 0.75
    request_timeout_s: float = 0.0
    max_cache_bytes: int = 0


def make_lane(
    model: ServedModel,
    worker_index: int = 0,
    *,
    options: EngineOptions,
    observer: RuntimeObserver,
    clock: Callable[[], float],
) -> Lane:
    """A lane with a runner of its own for this worker, whose buffers may take a while to come by."""
    return Lane(
        model.id,
        model.make_runner(worker_index),
        max_admission_tokens=options.max_admission_tokens,
        min_newcomers=max(1, options.max_rows // 4),
        company=COMPANY,
        max_held_steps=MAX_HELD_STEPS,
        max_bulk_share=options.max_bulk_share,
        first_pass_s=_FIRST_GPU_PASS_S
        if model.devices[worker_index % len(model.devices)].kind == "cuda"
        else 0,
        observer=observer,
        clock=clock,
    )
