"""Sinusoidal position codes: Vaswani et al. 2017, section 3.5."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from model.config import PositionLayout

_INITIAL_POSITIONS = 512


def position_codes(count: int, d_model: int, *, layout: PositionLayout) -> Tensor:
    """Compute the codes of positions 0 to ``count - 1``.

    ``"interleaved"`` is the paper's formula, for i = 0 .. d/2-1::

        PE(p, 2i)   = sin(p / 10000^(2i / d))
        PE(p, 2i+1) = cos(p / 10000^(2i / d))

    ``"halves"`` is Marian's (``sinusoidalPositionEmbeddings`` in marian-dev's
    src/graph/node_initializers.cpp, there in float32): all sines come before all cosines, and the
    exponents reach 1::

        PE(p, i)       = sin(p / 10000^(i / (d/2 - 1)))
        PE(p, d/2 + i) = cos(p / 10000^(i / (d/2 - 1)))

    Args:
        count: T, how many positions.
        d_model: d, width of a code; even.
        layout: which of the two formulas.

    Returns:
        float32 [T, d], computed in float64: at position 500 a float32 angle is already off by 1e-5.

    Raises:
        ValueError: ``d_model`` is odd, or is 2 with halves, where Marian's exponent is 0/0.
    """
    smallest = 4 if layout == "halves" else 2
    if d_model % 2 or d_model < smallest:
        raise ValueError(
            f"d_model is {d_model}; {layout} positions need an even number of at least {smallest}"
        )
    num_waves = d_model // 2
    exponents = torch.arange(num_waves, dtype=torch.float64)  # [d/2]
    exponents = exponents / (num_waves if layout == "interleaved" else num_waves - 1)  # [d/2]
    frequencies = torch.exp(-math.log(10000.0) * exponents)  # [d/2]
    angles = torch.arange(count, dtype=torch.float64)[:, None] * frequencies  # [T, d/2]
    if layout == "interleaved":
        codes = torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)  # [T, d/2, 2] -> [T, d]
    else:
        codes = torch.cat([angles.sin(), angles.cos()], dim=1)  # [T, d]
    return codes.float()


class Positions(nn.Module):
    """The codes as a table that grows with the longest sequence seen.

    Nothing of it is in the ``state_dict``: the formula is the whole truth, and the model has no
    length limit of its own.
    """

    table: Tensor

    def __init__(self, d_model: int, *, layout: PositionLayout) -> None:
        """Compute the first 512 codes; see `position_codes` for errors."""
        super().__init__()
        self.d_model = d_model
        self.layout: PositionLayout = layout
        codes = position_codes(_INITIAL_POSITIONS, d_model, layout=layout)
        self.register_buffer("table", codes, persistent=False)

    def forward(self, first: int, count: int) -> Tensor:
        """Return the codes of ``count`` positions from ``first`` on, [count, d]."""
        end = first + count
        if end > self.table.shape[0]:
            size = max(end, 2 * self.table.shape[0])
            self.table = position_codes(size, self.d_model, layout=self.layout).to(self.table)
        return self.table[first:end]
