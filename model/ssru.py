"""The Simpler Simple Recurrent Unit: Kim et al. 2019, "From Research to Production and Back"."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SSRU(nn.Module):
    """A recurrence in the place of the decoder's self-attention; its state does not grow.

    Kim et al. 2019, as Marian computes it (``dec-cell: ssru``)::

        f_t = sigmoid(W_f x_t + b_f)
        c_t = f_t * c_{t-1} + (1 - f_t) * (W x_t)        c_{-1} = 0
        o_t = relu(c_t)

    The matrix products of all positions are done at once; only the element-wise c_t is sequential.
    """

    def __init__(self, d_model: int) -> None:
        """Make W (``candidate``, without bias) and W_f, b_f (``forget``)."""
        super().__init__()
        self.candidate = nn.Linear(d_model, d_model, bias=False)
        self.forget = nn.Linear(d_model, d_model)

    def start(self, num_rows: int) -> tuple[Tensor]:
        """The state before the first position: one cell of zeros [R, d]."""
        return (self.candidate.weight.new_zeros(num_rows, self.candidate.out_features),)

    def advance(self, inputs: Tensor, past: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor]]:
        """Continue the recurrence over T new positions.

        Args:
            inputs: [R, T, d].
            past: the cell after the position before, [R, d].

        Returns:
            The outputs [R, T, d], and the cell [R, d] to continue from.
        """
        (cell,) = past  # [R, d]
        forget = torch.sigmoid(self.forget(inputs))  # [R, T, d]
        remembered = (1.0 - forget) * self.candidate(inputs)  # [R, T, d]
        cells = []
        for forget_t, remembered_t in zip(forget.unbind(1), remembered.unbind(1), strict=True):  # [R, d] each
            cell = forget_t * cell + remembered_t  # [R, d]
            cells.append(cell)
        return torch.stack(cells, dim=1).relu(), (cell,)  # [R, T, d], [R, d]
