from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from app.errors import InvalidOption
from model.attention import CausalSelfAttention
from model.config import PositionLayout
from model.distillation.initialisation import start_as_recurrence, student_of
from model.positions import position_codes
from model.ssru import SSRU
from model.transformer import Transformer

ModelMaker = Callable[..., Transformer]
DISTANCES = [0, 0, 0, 1, 1, 2, 2, 3]


def attention_on_codes(
    d_model: int, num_heads: int, layout: PositionLayout, *, with_noise: bool
) -> torch.Tensor:
    """Weights [H, T, T] over 40 positions that hold nothing but their codes."""
    attention, cell = CausalSelfAttention(d_model, num_heads), SSRU(d_model)
    if not with_noise:
        torch.nn.init.zeros_(attention.query.weight)
        torch.nn.init.zeros_(attention.key.weight)
    torch.nn.init.zeros_(attention.query.bias)
    torch.nn.init.zeros_(attention.key.bias)
    start_as_recurrence(attention, cell, layout=layout)
    codes = position_codes(40, d_model, layout=layout)[None]  # [1, T, d]
    keys, _ = attention.keys_values(codes)  # [1, H, T, D]
    queries = attention._split(attention.query(codes))  # [1, H, T, D]
    scores = (queries @ keys.transpose(2, 3) / (d_model // num_heads) ** 0.5)[0]  # [H, T, T]
    past = torch.ones(40, 40, dtype=torch.bool).tril()
    return scores.masked_fill(~past, -torch.inf).softmax(dim=2).detach()


@pytest.mark.parametrize("layout", ["interleaved", "halves"])
@pytest.mark.parametrize(("d_model", "num_heads"), [(64, 8), (256, 8), (128, 16), (64, 4)])
def test_each_head_looks_most_at_its_own_distance(
    d_model: int, num_heads: int, layout: PositionLayout
) -> None:
    weights = attention_on_codes(d_model, num_heads, layout, with_noise=False)
    for head in range(num_heads):
        distance = DISTANCES[head % 8]
        for position in range(40):
            assert int(weights[head, position].argmax()) == max(position - distance, 0)


@pytest.mark.parametrize("layout", ["interleaved", "halves"])
def test_at_the_size_of_the_shipped_models_the_noise_does_not_move_the_peaks_far(
    layout: PositionLayout,
) -> None:
    weights = attention_on_codes(256, 8, layout, with_noise=True)
    distances = torch.arange(40)[:, None] - torch.arange(40)[None]  # [T, T]
    for head, distance in enumerate(DISTANCES):
        peaks = (torch.arange(40) - weights[head].argmax(dim=1))[5:]
        assert (peaks - distance).abs().float().mean() <= 0.5
        near = weights[head].masked_fill((distances - distance).abs() > 3, 0.0).sum(dim=1)[8:]
        elsewhere = 1.0 / torch.arange(9, 41)  # what a head that looks nowhere in particular gives each
        assert (near > 7 * elsewhere).float().mean() > 0.9


@pytest.mark.parametrize("layout", ["interleaved", "halves"])
def test_values_are_the_recurrences_candidates(layout: PositionLayout) -> None:
    attention, cell = CausalSelfAttention(16, 4), SSRU(16)
    start_as_recurrence(attention, cell, layout=layout)
    inputs = torch.randn(2, 1, 16)  # one position looks at itself alone
    outputs, _ = attention.advance(inputs, attention.start(2))
    torch.testing.assert_close(outputs, cell.candidate(inputs))


def test_a_student_has_what_its_teacher_has_and_attention_for_the_cell(make_model: ModelMaker) -> None:
    teacher = make_model(decoder_cell="ssru", positions="halves", start_id=3, eos_id=2)
    student = student_of(teacher, dropout=0.25)
    assert (student.config.decoder_cell, student.config.dropout) == ("attention", 0.25)
    assert (student.config.start_id, student.config.eos_id) == (3, 2)
    theirs, mine = teacher.state_dict(), student.state_dict()
    common = [name for name in mine if ".self_attention." not in name or name.startswith("encoder")]
    assert {name for name in theirs if ".cell." not in name} == set(common)
    assert all(torch.equal(mine[name], theirs[name]) for name in common)
    ids, mask = torch.tensor([[4, 5, 2]]), torch.ones(1, 3, dtype=torch.bool)
    assert torch.isfinite(student.eval()(ids, mask, ids)).all()


def test_the_copy_is_not_the_teachers_own_memory(make_model: ModelMaker) -> None:
    teacher = make_model(decoder_cell="ssru")
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    student = student_of(teacher)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.state_dict().items())


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_a_teacher_with_attention_is_copied(make_model: ModelMaker, norm: str) -> None:
    teacher = make_model(norm=norm)
    student = student_of(teacher)
    assert all(torch.equal(student.state_dict()[name], value) for name, value in teacher.state_dict().items())


def test_a_pre_norm_recurrence_has_no_counterpart(make_model: ModelMaker) -> None:
    with pytest.raises(InvalidOption, match="pre-norm SSRU teacher"):
        student_of(make_model(decoder_cell="ssru", norm="pre"))
