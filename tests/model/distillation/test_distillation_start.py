from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from app.errors import InvalidOption
from model.distillation.initialisation import student_of
from model.transformer import Transformer

ModelMaker = Callable[..., Transformer]


def test_a_student_has_what_its_teacher_has_and_attention_for_the_cell(make_model: ModelMaker) -> None:
    teacher = make_model(decoder_cell="ssru", positions="halves", start_id=3, eos_id=2)
    student = student_of(teacher, dropout=0.25)
    assert (student.config.decoder_cell, student.config.dropout) == ("gated_attention", 0.25)
    assert student.config.num_query_heads == 2 * student.config.num_heads
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
