from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.testing import assert_close

from model.ssru import SSRU


def test_the_recurrence_is_the_published_formula(randomise: Callable[[nn.Module], None]) -> None:
    cell = SSRU(3)
    randomise(cell)
    inputs = torch.randn(1, 4, 3)
    outputs, (last,) = cell.advance(inputs, cell.start(1))

    w, w_f, b_f = cell.candidate.weight.tolist(), cell.forget.weight.tolist(), cell.forget.bias.tolist()
    c = [0.0, 0.0, 0.0]
    for t, x in enumerate(inputs[0].tolist()):
        for i in range(3):
            f = 1 / (1 + math.exp(-sum(a * b for a, b in zip(w_f[i], x, strict=True)) - b_f[i]))
            c[i] = f * c[i] + (1 - f) * sum(a * b for a, b in zip(w[i], x, strict=True))
        assert_close(outputs[0, t], torch.tensor([max(0.0, value) for value in c]), rtol=1e-5, atol=1e-6)
    assert_close(last[0], torch.tensor(c), rtol=1e-5, atol=1e-6)


def test_all_positions_at_once_equal_one_after_the_other(randomise: Callable[[nn.Module], None]) -> None:
    cell = SSRU(16)
    randomise(cell)
    inputs = torch.randn(5, 9, 16)
    whole, (whole_state,) = cell.advance(inputs, cell.start(5))
    state: tuple[torch.Tensor, ...] = cell.start(5)
    for t in range(9):
        output, state = cell.advance(inputs[:, t : t + 1], state)
        assert_close(output[:, 0], whole[:, t], rtol=1e-5, atol=1e-6)
    assert_close(state[0], whole_state, rtol=1e-5, atol=1e-6)


def test_a_sequence_cut_in_two_continues_where_it_stopped(randomise: Callable[[nn.Module], None]) -> None:
    cell = SSRU(8)
    randomise(cell)
    inputs = torch.randn(2, 7, 8)
    whole, _ = cell.advance(inputs, cell.start(2))
    head, middle = cell.advance(inputs[:, :3], cell.start(2))
    tail, _ = cell.advance(inputs[:, 3:], middle)
    assert_close(torch.cat([head, tail], dim=1), whole, rtol=1e-5, atol=1e-6)
