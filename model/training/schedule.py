"""Learning rates over the steps of a run."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["inverse_sqrt", "linear", "constant"]


def learning_rate_share(
    step: int, *, schedule: Schedule, warmup_steps: int, max_steps: int, power: float = 1.0
) -> float:
    """The share of the peak learning rate that a step gets.

    All schedules rise linearly over ``warmup_steps``. Then ``inverse_sqrt`` falls as
    ``sqrt(warmup_steps / step)`` (Vaswani et al. 2017, equation 3, with the peak as its unit), ``linear``
    falls to 0 at ``max_steps`` as ``(1 - t)**power``, where t is the share of the steps after the warm-up,
    and ``constant`` stays.

    Args:
        step: counted from 1.
        schedule: which of them.
        warmup_steps: 0 for none.
        max_steps: length of the run; only ``linear`` asks for it.
        power: of ``linear``; 1 is a straight line.

    Returns:
        In [0, 1].
    """
    if step < warmup_steps:
        return step / warmup_steps
    if schedule == "constant":
        return 1.0
    if schedule == "inverse_sqrt":
        return math.sqrt(max(warmup_steps, 1) / max(step, 1))
    remaining = (max_steps - step) / max(max_steps - warmup_steps, 1)
    return float(max(remaining, 0.0) ** power)
