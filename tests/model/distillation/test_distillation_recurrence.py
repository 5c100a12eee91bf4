"""Self-attention that begins as a recurrence: how far its heads look, and what fitting it brings."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from model.attention import CausalSelfAttention
from model.config import PositionLayout
from model.data.batches import Batch, padded_batch
from model.distillation import recurrence as recurrence_module
from model.distillation.initialisation import student_of
from model.distillation.recurrence import LayerFit, Sample, imitate_recurrences, start_as_recurrence
from model.positions import position_codes
from model.ssru import SSRU
from model.transformer import Transformer

ModelMaker = Callable[..., Transformer]


@pytest.fixture(autouse=True)
def _small_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrence_module, "_SAMPLE_TOKENS", 2000)


NUM_POSITIONS = 40


def words_and_codes(d_model: int, layout: PositionLayout, *, loudness: float) -> Tensor:
    """Targets of 40 positions [64, 40, d]: codes and, much louder, words, which leave a few directions free.

    So it is in trained models: their encoders read positions from the same embeddings.
    """
    words = torch.randn(500, d_model) * loudness
    free = torch.linalg.qr(position_codes(NUM_POSITIONS, d_model, layout=layout).T)[0][:, :24]  # [d, 24]
    words = words - 0.9 * (words @ free) @ free.T
    spoken = words[torch.randint(0, 500, (64, NUM_POSITIONS))]  # [64, T, d]
    return spoken + position_codes(NUM_POSITIONS, d_model, layout=layout)


def recurrence(d_model: int, gates: Tensor) -> SSRU:
    """An SSRU whose forget gates are f32 [d], whatever comes in."""
    cell = SSRU(d_model)
    torch.nn.init.zeros_(cell.forget.weight)
    with torch.no_grad():
        cell.forget.bias.copy_(torch.logit(gates))
    return cell


def attention_weights(attention: CausalSelfAttention, inputs: Tensor) -> Tensor:
    """Over the positions so far, [B, H, T, T]."""
    keys, _ = attention.keys_values(inputs)
    queries = attention._split(attention.query(inputs))
    scores = queries @ keys.transpose(2, 3) / queries.shape[3] ** 0.5
    past = torch.ones(NUM_POSITIONS, NUM_POSITIONS, dtype=torch.bool).tril()
    return scores.masked_fill(~past, -torch.inf).softmax(dim=3)


def started(attention: CausalSelfAttention, cell: SSRU, inputs: Tensor) -> None:
    positions = torch.arange(NUM_POSITIONS).float().expand(inputs.shape[:2])
    start_as_recurrence(attention, cell, Sample(inputs.flatten(0, 1), positions.flatten()))


@pytest.mark.parametrize("layout", ["interleaved", "halves"])
@pytest.mark.parametrize(("d_model", "num_heads"), [(256, 8), (128, 4), (128, 8)])
def test_heads_look_about_as_far_back_as_their_channels_remember(
    d_model: int, num_heads: int, layout: PositionLayout
) -> None:
    torch.manual_seed(1)
    inputs = words_and_codes(d_model, layout, loudness=2.0)
    gates = torch.linspace(0.02, 0.95, d_model)[torch.randperm(d_model)]
    attention, cell = CausalSelfAttention(d_model, num_heads), recurrence(d_model, gates)
    started(attention, cell, inputs)
    weights = attention_weights(attention, inputs).detach().mean(dim=0)[:, 10:]  # [H, 30, T]
    distances = torch.arange(10, NUM_POSITIONS)[:, None] - torch.arange(NUM_POSITIONS)[None]
    mean_distance = (weights * distances).sum(dim=2).mean(dim=1)  # [H]
    assert 0 < mean_distance[0] < 3.0  # elsewhere than everywhere, which would be 12 back
    assert mean_distance[-1] > mean_distance[0]
    # Nobody sees itself alone however loud the words are: then no gradient would move the head.
    itself = weights.diagonal(offset=10, dim1=1, dim2=2).mean(dim=1)
    assert itself.max() < 0.9


def test_channels_of_like_memory_share_a_head_and_come_out_in_their_places() -> None:
    torch.manual_seed(1)
    gates = torch.linspace(0.1, 0.9, 64)[torch.randperm(64)]
    attention, cell = CausalSelfAttention(64, 8), recurrence(64, gates)
    started(attention, cell, words_and_codes(64, "halves", loudness=1.0))
    inputs = torch.randn(2, 1, 64)  # one position looks at itself alone
    outputs, _ = attention.advance(inputs, attention.start(2))
    torch.testing.assert_close(outputs, cell.candidate(inputs))
    of_heads = gates[attention.output.weight.argmax(dim=0)]
    assert torch.equal(of_heads, gates.sort().values)


def batches(num_words: int = 40) -> Iterator[Batch]:
    torch.manual_seed(5)
    while True:
        pairs = []
        for _ in range(16):
            source, target = (
                [*torch.randint(3, num_words, (int(length),)).tolist(), 0]
                for length in torch.randint(3, 14, (2,))
            )
            pairs.append((source, target))
        yield padded_batch(pairs)


def small_teacher(make_model: ModelMaker) -> Transformer:
    return make_model(decoder_cell="ssru", d_model=32, num_heads=4, vocabulary_size=40, positions="halves")


def errors(fits: Sequence[LayerFit]) -> list[float]:
    return [fit.unexplained for fit in fits]


def test_fitting_brings_every_layer_nearer_to_its_recurrence(make_model: ModelMaker) -> None:
    teacher = small_teacher(make_model)
    student = student_of(teacher)
    history: list[list[float]] = []
    imitate_recurrences(
        student, teacher, batches(), steps=120, on_step=lambda _, fits: history.append(errors(fits))
    )
    assert len(history) == 120
    for first, last in zip(history[0], history[-1], strict=True):
        assert last < 0.7 * first
    assert len(history[-1]) == len(student.decoder)


def test_fitting_changes_nothing_but_self_attentions_and_their_norms(make_model: ModelMaker) -> None:
    teacher = small_teacher(make_model)
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    student = student_of(teacher)
    copied = {name: tensor.clone() for name, tensor in student.state_dict().items()}
    imitate_recurrences(student, teacher, batches(), steps=3)
    changed = {name for name, tensor in student.state_dict().items() if not torch.equal(tensor, copied[name])}
    assert changed
    assert all(name.startswith("decoder.") and ".self_" in name for name in changed)
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.state_dict().items())
    assert all(parameter.grad is None for parameter in student.parameters())


def test_no_steps_leave_the_start(make_model: ModelMaker) -> None:
    teacher = small_teacher(make_model)
    torch.manual_seed(2)
    student = student_of(teacher)
    imitate_recurrences(student, teacher, batches(), steps=0)
    value = student.state_dict()["decoder.0.self_attention.value.weight"]
    candidate = teacher.state_dict()["decoder.0.cell.candidate.weight"]
    assert torch.equal(value.sort(dim=0).values, candidate.sort(dim=0).values)


def test_the_same_seed_gives_the_same_start(make_model: ModelMaker) -> None:
    teacher = small_teacher(make_model)
    made = []
    for _ in range(2):
        torch.manual_seed(2)
        student = student_of(teacher)
        imitate_recurrences(student, teacher, itertools.islice(batches(), 400), steps=5)
        made.append(student.state_dict())
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])


def test_padding_changes_nothing(make_model: ModelMaker) -> None:
    teacher = small_teacher(make_model)
    fits: list[list[LayerFit]] = []
    for num_more in (0, 9):
        torch.manual_seed(2)
        student = student_of(teacher)
        stream = batches()
        imitate_recurrences(
            student,
            teacher,
            (padded_further(next(stream), num_more) for _ in itertools.count()),
            steps=2,
            on_step=lambda _, found: fits.append(list(found)),
        )
    for plain, padded in zip(fits[:2], fits[2:], strict=True):
        for one, other in zip(plain, padded, strict=True):
            assert other.error == pytest.approx(one.error, rel=1e-3)
            assert other.variance == pytest.approx(one.variance, rel=1e-3)


def padded_further(batch: Batch, num_more: int) -> Batch:
    return replace(
        batch,
        target_ids=torch.nn.functional.pad(batch.target_ids, (0, num_more), value=7),
        target_mask=torch.nn.functional.pad(batch.target_mask, (0, num_more), value=False),
    )


def test_dropout_neither_disturbs_the_fit_nor_is_lost(make_model: ModelMaker) -> None:
    teacher = small_teacher(make_model)
    made = []
    for dropout in (0.0, 0.5):
        torch.manual_seed(2)
        student = student_of(teacher, dropout=dropout).train()
        imitate_recurrences(student, teacher, batches(), steps=5)
        made.append(student.state_dict())
        assert student.training
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])


def test_one_step_is_one_step(make_model: ModelMaker) -> None:
    teacher = small_teacher(make_model)
    made = []
    for steps in (0, 1):
        torch.manual_seed(2)
        student = student_of(teacher)
        imitate_recurrences(student, teacher, batches(), steps=steps)
        made.append(student.state_dict())
    assert any(not torch.equal(made[0][name], made[1][name]) for name in made[0])


def test_targets_of_one_token_and_heads_of_one_component_give_finite_weights(make_model: ModelMaker) -> None:
    teacher = make_model(decoder_cell="ssru", num_heads=16)  # as many as components
    student = student_of(teacher)
    ends = padded_batch([([3, 0], [0])] * 8)
    seen: list[list[LayerFit]] = []
    imitate_recurrences(
        student, teacher, itertools.repeat(ends), steps=2, on_step=lambda _, fits: seen.append(list(fits))
    )
    assert all(bool(tensor.isfinite().all()) for tensor in student.state_dict().values())
    assert seen[0][0].unexplained == 0.0
    other = student_of(make_model(decoder_cell="ssru"))
    imitate_recurrences(other, make_model(decoder_cell="ssru"), itertools.repeat(ends), steps=1)
    assert all(bool(tensor.isfinite().all()) for tensor in other.state_dict().values())
