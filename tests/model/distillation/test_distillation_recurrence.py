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
    keys, _ = attention.for_every_query(attention.keys_values(inputs))
    queries = attention.queries(inputs)
    scores = queries @ keys.transpose(2, 3) / queries.shape[3] ** 0.5
    past = torch.ones(NUM_POSITIONS, NUM_POSITIONS, dtype=torch.bool).tril()
    return scores.masked_fill(~past, -torch.inf).softmax(dim=3)


def started(cell: SSRU, inputs: Tensor, *, num_heads: int) -> CausalSelfAttention:
    """An attention that begins as a recurrence, two queries for each of `num_heads` keys."""
    attention = CausalSelfAttention(inputs.shape[2], num_heads, num_query_heads=2 * num_heads, gated=True)
    positions = torch.arange(NUM_POSITIONS).float().expand(inputs.shape[:2])
    start_as_recurrence(attention, cell, Sample(inputs.flatten(0, 1), positions.flatten()))
    return attention


@pytest.mark.parametrize("layout", ["interleaved", "halves"])
@pytest.mark.parametrize(("d_model", "num_heads"), [(256, 8), (128, 4), (128, 8)])
def test_heads_look_about_as_far_back_as_their_channels_remember(
    d_model: int, num_heads: int, layout: PositionLayout
) -> None:
    torch.manual_seed(1)
    inputs = words_and_codes(d_model, layout, loudness=2.0)
    gates = torch.linspace(0.02, 0.95, d_model)[torch.randperm(d_model)]
    attention = started(recurrence(d_model, gates), inputs, num_heads=num_heads)
    weights = attention_weights(attention, inputs).detach().mean(dim=0)[:, 10:]  # [2 H, 30, T]
    distances = torch.arange(10, NUM_POSITIONS)[:, None] - torch.arange(NUM_POSITIONS)[None]
    mean_distance = (weights * distances).sum(dim=2).mean(dim=1)  # [2 H]
    before, own = mean_distance[::2], mean_distance[1::2]
    assert 0.5 < before[0] < 4.0  # elsewhere than everywhere, which would be 12 back
    assert before[-1] > before[0]
    assert own.max() < before.min()
    # Nobody sees itself alone however loud the words are: then no gradient would move the head.
    itself = weights.diagonal(offset=10, dim1=1, dim2=2).mean(dim=1)
    assert itself.max() < 0.95


def test_a_channel_comes_out_in_its_place_gated_as_the_recurrence_does() -> None:
    torch.manual_seed(1)
    cell = SSRU(64)
    inputs = words_and_codes(64, "halves", loudness=1.0)
    attention = started(cell, inputs, num_heads=8)
    assert attention.gate is not None
    sizes = torch.sigmoid(cell.forget(inputs.flatten(0, 1))).mean(dim=0)
    places = attention.output.weight.argmax(dim=0).view(8, 2, 8)  # [keys, queries of each, D]
    assert torch.equal(places[:, 0], places[:, 1])
    assert torch.equal(sizes[places[:, 0].flatten()], sizes.sort().values)  # of like memory, one head
    # With every head looking at one and the same position, f_t c + (1 - f_t) c is left of it.
    one = torch.randn(2, 1, 64)
    outputs, _ = attention.advance(one, attention.start(2))
    torch.testing.assert_close(outputs, cell.candidate(one))
    # And with what comes before silenced, what an SSRU makes of its first position, but for the rectifier.
    with torch.no_grad():
        attention.output.weight.view(64, 8, 2, 8)[:, :, 0] = 0.0
    outputs, _ = attention.advance(one, attention.start(2))
    expected, _ = cell.advance(one, cell.start(2))
    torch.testing.assert_close(outputs.relu(), expected)


def test_an_attention_of_another_form_is_refused() -> None:
    cell, inputs = SSRU(64), words_and_codes(64, "halves", loudness=1.0)
    positions = torch.arange(NUM_POSITIONS).float().expand(inputs.shape[:2])
    sample = Sample(inputs.flatten(0, 1), positions.flatten())
    with pytest.raises(ValueError, match="without a gate and with 2 queries"):
        start_as_recurrence(CausalSelfAttention(64, 8, num_query_heads=16), cell, sample)
    with pytest.raises(ValueError, match="with a gate and with 1 queries"):
        start_as_recurrence(CausalSelfAttention(64, 8, gated=True), cell, sample)


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


def test_how_near_it_came_is_judged_on_text_that_it_did_not_learn_from(
    make_model: ModelMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrence_module, "_KEPT_BYTES", 1)  # one batch, again and again
    teacher = small_teacher(make_model)
    seen: list[list[float]] = []
    judged = imitate_recurrences(
        student_of(teacher),
        teacher,
        batches(),
        steps=300,
        on_step=lambda _, fits: seen.append(errors(fits)),
    )
    for learnt, other in zip(seen[-1], errors(judged), strict=True):
        assert other > 1.2 * learnt


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


def test_when_the_memory_is_full_the_same_lessons_come_again(
    make_model: ModelMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = small_teacher(make_model)
    taken: list[Batch] = []

    def counted() -> Iterator[Batch]:
        for batch in batches():
            taken.append(batch)
            yield batch

    steps: list[int] = []
    for kept_bytes in (1 << 30, 1):
        monkeypatch.setattr(recurrence_module, "_KEPT_BYTES", kept_bytes)
        taken.clear()
        imitate_recurrences(
            student_of(teacher), teacher, counted(), steps=9, on_step=lambda step, _: steps.append(step)
        )
        if kept_bytes > 1:
            num_others = len(taken) - 9  # for the samples, and for the judgement
    assert steps == [*range(1, 10)] * 2
    assert len(taken) == num_others + 1


def test_kept_lessons_come_again_in_their_order(
    make_model: ModelMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrence_module, "_KEPT_BYTES", 200_000)
    teacher = small_teacher(make_model)
    seen: list[list[float]] = []
    # Nothing is learnt at a rate of 0, so that an error tells its batch.
    imitate_recurrences(
        student_of(teacher),
        teacher,
        batches(),
        steps=30,
        learning_rate=0.0,
        on_step=lambda _, fits: seen.append(errors(fits)),
    )
    period = seen.index(seen[0], 1)
    assert 1 < period < 15
    assert len({tuple(each) for each in seen}) == period
    assert seen[period:] == seen[:-period]


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
