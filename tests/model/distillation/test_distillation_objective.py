from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from app.errors import InvalidOption
from model.config import TransformerConfig
from model.data.batches import Batch, padded_batch
from model.distillation.initialisation import student_of
from model.distillation.objective import Distillation, LossWeights
from model.distillation.sampled_vocabulary import SampledVocabulary
from model.transformer import Transformer

ModelMaker = Callable[..., Transformer]
V = 23
EVERYTHING = SampledVocabulary(V, None, 0, 0, 2000, seed=1)
EACH = LossWeights(1.0, 1.0, 1.0)


def toy_batch(*, origins: list[int] | None = None) -> Batch:
    return padded_batch(
        [([3, 4, 5, 0], [6, 7, 0]), ([8, 0], [9, 10, 11, 12, 0]), ([2, 2, 0], [0])], origins=origins
    )


def frozen(model: Transformer, *prefixes: str) -> Transformer:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(prefixes) if prefixes else True)
    return model


@pytest.mark.parametrize("cell", ["attention", "ssru"])
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_a_student_that_is_its_teacher_has_nothing_to_learn_of_it(
    make_model: ModelMaker, cell: str, norm: str
) -> None:
    teacher = make_model(decoder_cell=cell, norm=norm)
    student = make_model(decoder_cell=cell, norm=norm)
    student.load_state_dict(teacher.state_dict())
    loss = Distillation(teacher, student, EVERYTHING, weights_of_source=[LossWeights(1.0, 0.0, 1.0)])(
        student, toy_batch(), step=1
    )
    assert loss.parts["divergence"] == pytest.approx(0.0, abs=1e-5)
    assert loss.parts["hidden"] == pytest.approx(0.0, abs=1e-8)
    assert loss.total.item() == pytest.approx(0.0, abs=1e-5)
    assert loss.num_tokens == 9
    loss.total.backward()  # type: ignore[no-untyped-call]
    assert all(
        parameter.grad is None or parameter.grad.abs().max() < 1e-4 for parameter in student.parameters()
    )


def test_over_the_whole_vocabulary_the_parts_are_those_written_out(make_model: ModelMaker) -> None:
    teacher, student = make_model(decoder_cell="ssru"), make_model()
    batch = toy_batch()
    ids = EVERYTHING.ids(batch, step=1, offered=EVERYTHING.offered(batch))
    assert ids.tolist() == list(range(V))
    loss = Distillation(teacher, student, EVERYTHING, weights_of_source=[EACH])(student, batch, step=1)
    with torch.no_grad():
        theirs, mine = (
            model(batch.source_ids, batch.source_mask, batch.target_ids)[batch.target_mask].log_softmax(dim=1)
            for model in (teacher, student)
        )
    divergence = functional.kl_div(mine, theirs, log_target=True, reduction="sum").item()
    assert loss.parts["divergence"] == pytest.approx(divergence, rel=1e-4)
    token = functional.nll_loss(mine, batch.target_ids[batch.target_mask], reduction="sum").item()
    assert loss.parts["cross_entropy"] == pytest.approx(token, rel=1e-4)
    assert loss.total.item() == pytest.approx(sum(loss.parts.values()), rel=1e-4)


def test_hidden_states_are_those_of_each_first_norm_and_the_last_layer(make_model: ModelMaker) -> None:
    teacher, student = make_model(decoder_layers=1, decoder_cell="ssru"), make_model(decoder_layers=1)
    batch = toy_batch()

    def states(model: Transformer) -> list[torch.Tensor]:
        layer = model.decoder[0]
        x = model.shift_right(batch.target_ids) + model.positions(0, batch.target_ids.shape[1])
        y, _ = layer.causal.advance(x, layer.causal.start(3))  # type: ignore[operator,union-attr]
        first = layer.self_norm(x + y)  # type: ignore[operator]
        memory = model.encode(batch.source_ids, batch.source_mask)
        last, _ = model.decode(
            model.shift_right(batch.target_ids),
            model.initial_state(3),
            model.cross_keys_values(memory),
            batch.source_mask,
        )
        return [first[batch.target_mask], last[batch.target_mask]]

    loss = Distillation(teacher, student, EVERYTHING, weights_of_source=[EACH])(student, batch, step=1)
    expected = sum(
        functional.mse_loss(mine, theirs, reduction="none").mean(dim=1).sum().item()
        for mine, theirs in zip(states(student), states(teacher), strict=True)
    )
    assert loss.parts["hidden"] == pytest.approx(expected, rel=1e-4)


def test_padding_adds_nothing(make_model: ModelMaker) -> None:
    teacher, student = make_model(decoder_cell="ssru"), make_model()
    objective = Distillation(teacher, student, EVERYTHING, weights_of_source=[EACH])
    pairs = [([3, 4, 5, 0], [6, 7, 0]), ([8, 0], [9, 10, 11, 12, 0]), ([2, 2, 0], [0])]
    alone = [objective(student, padded_batch([pair]), step=1).total.item() for pair in pairs]
    assert objective(student, padded_batch(pairs), step=1).total.item() == pytest.approx(sum(alone), rel=1e-4)


def test_the_sources_of_pairs_have_weights_of_their_own(make_model: ModelMaker) -> None:
    teacher, student = make_model(decoder_cell="ssru"), make_model()

    def total(origins: list[int], weights: list[LossWeights]) -> float:
        objective = Distillation(teacher, student, EVERYTHING, weights_of_source=weights)
        return objective(student, toy_batch(origins=origins), step=1).total.item()

    zero = LossWeights(0.0, 0.0, 0.0)
    for weights in (LossWeights(1.0, 0.0, 0.0), LossWeights(0.0, 0.2, 0.0), LossWeights(0.3, 1.0, 2.0)):
        parts = [total([int(row == chosen) for row in range(3)], [zero, weights]) for chosen in range(3)]
        assert sum(parts) == pytest.approx(total([0, 0, 0], [weights]), rel=1e-4)
        assert total([0, 1, 0], [weights, zero]) == pytest.approx(parts[0] + parts[2], rel=1e-4)
    assert total([0, 0, 0], [LossWeights(2.0, 0.4, 6.0)]) == pytest.approx(
        2 * total([0, 0, 0], [LossWeights(1.0, 0.2, 3.0)]), rel=1e-4
    )


def test_a_shared_encoder_gives_the_loss_and_gradients_of_one_that_runs_twice(make_model: ModelMaker) -> None:
    teacher = make_model(decoder_cell="ssru")
    losses, gradients = [], []
    for shares in (True, False):
        torch.manual_seed(4)
        student = frozen(student_of(teacher), "encoder", "embedding")
        objective = Distillation(teacher, student, EVERYTHING, weights_of_source=[EACH])
        assert objective._shares_encoder
        objective._shares_encoder = shares
        loss = objective(student.train(), toy_batch(), step=1)
        loss.total.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.total.item())
        gradients.append({name: p.grad for name, p in student.named_parameters() if p.grad is not None})
        assert not any(name.startswith(("encoder", "embedding")) for name in gradients[-1])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    torch.testing.assert_close(gradients[0], gradients[1])


def test_an_encoder_is_shared_only_where_it_can_be(
    make_model: ModelMaker, make_config: Callable[..., TransformerConfig]
) -> None:
    teacher = make_model(decoder_cell="ssru")

    def shares(student: Transformer, teacher: Transformer = teacher) -> bool:
        return Distillation(teacher, student, EVERYTHING, weights_of_source=[EACH])._shares_encoder

    assert shares(frozen(student_of(teacher), "encoder", "embedding"))
    assert not shares(frozen(student_of(teacher)))
    assert not shares(frozen(student_of(teacher), "encoder"))
    assert not shares(frozen(student_of(teacher, dropout=0.1), "encoder", "embedding"))
    changed = frozen(student_of(teacher), "encoder", "embedding")
    with torch.no_grad():
        changed.encoder[1].ffn.inner.bias[0] += 0.5  # type: ignore[union-attr,operator,index]
    assert not shares(changed)
    # Equal weights, another computation: fewer layers, more heads, other position codes.
    for changes in (
        {"encoder_layers": 1},
        {"num_heads": 8, "decoder_query_heads": 16},
        {"positions": "halves"},
        {"activation": "gelu"},
    ):
        other = Transformer(replace(student_of(teacher).config, **changes))  # type: ignore[arg-type]
        other.load_state_dict(
            {
                name: value
                for name, value in student_of(teacher).state_dict().items()
                if name in other.state_dict()
            }
        )
        assert not shares(frozen(other, "encoder", "embedding"))


def test_the_teacher_is_frozen_and_stays_in_evaluation_mode(
    make_config: Callable[..., TransformerConfig],
) -> None:
    teacher, student = Transformer(make_config(dropout=0.5)), Transformer(make_config(dropout=0.5))
    objective = Distillation(teacher, student, EVERYTHING, weights_of_source=[EACH])
    student.train()
    objective(student, toy_batch(), step=1).total.backward()  # type: ignore[no-untyped-call]
    assert not teacher.training
    assert all(p.grad is None and not p.requires_grad for p in teacher.parameters())
    assert student.output_bias.grad is not None


def test_hooks_do_not_stay_behind(make_model: ModelMaker) -> None:
    teacher, student = make_model(decoder_cell="ssru"), make_model()
    objective = Distillation(teacher, student, EVERYTHING, weights_of_source=[EACH])
    objective(student, toy_batch(), step=1)
    broken = replace(toy_batch(), source_ids=torch.full((3, 4), V))
    with pytest.raises(IndexError):
        objective(student, broken, step=2)
    assert not any(module._forward_hooks for model in (teacher, student) for module in model.modules())


def test_a_toy_teacher_is_learned(make_model: ModelMaker) -> None:
    teacher = make_model(decoder_cell="ssru")
    student = student_of(teacher)
    objective = Distillation(teacher, student, EVERYTHING, weights_of_source=[LossWeights(1.0, 0.0, 1.0)])
    optimizer = torch.optim.AdamW([p for p in student.parameters() if p.requires_grad], lr=3e-3)
    history = []
    for step in range(1, 41):
        loss = objective(student, toy_batch(), step=step)
        optimizer.zero_grad()
        (loss.total / loss.num_tokens).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        history.append(loss.parts)
    assert history[-1]["divergence"] < 0.2 * history[0]["divergence"]
    assert history[-1]["hidden"] < 0.2 * history[0]["hidden"]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("d_model", {"d_model": 24}),
        ("decoder_layers", {"decoder_layers": 1}),
        ("vocabulary_size", {"vocabulary_size": 22}),
        ("norm", {"norm": "pre"}),
    ],
)
def test_a_teacher_of_another_size_is_refused(
    make_model: ModelMaker, name: str, changes: dict[str, object]
) -> None:
    with pytest.raises(InvalidOption, match=f"the teacher's {name} is"):
        Distillation(make_model(**changes), make_model(), EVERYTHING, weights_of_source=[EACH])


def test_the_targets_alone_are_enough(make_model: ModelMaker) -> None:
    teacher, student = make_model(decoder_cell="ssru"), make_model()
    objective = Distillation(
        teacher, student, SampledVocabulary(V, None, 0, 0, 0, seed=1), weights_of_source=[EACH]
    )
    loss = objective(student, toy_batch(), step=1)
    assert loss.parts["divergence"] >= 0
    assert torch.isfinite(loss.total)


def counted_encoder(teacher: Transformer, calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    encode = teacher.encode

    def counting(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        calls.append(len(ids))
        return encode(ids, mask)

    monkeypatch.setattr(teacher, "encode", counting)


@pytest.mark.parametrize("is_shared", [True, False])
def test_lessons_are_kept_while_their_chunk_lasts_and_change_no_loss(
    make_model: ModelMaker, monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    teacher = make_model(decoder_cell="ssru")
    student = frozen(student_of(teacher), *(("encoder", "embedding") if is_shared else ()))
    vocabulary = SampledVocabulary(V, None, 2, 3, 2, seed=1)
    forgetful = Distillation(teacher, student, vocabulary, weights_of_source=[EACH])
    keeping = Distillation(teacher, student, vocabulary, weights_of_source=[EACH], keeps=True)
    batches = [replace(toy_batch(), place=place) for place in [(0, 0), (0, 1), (0, 0), (1, 0), (0, 0)]]
    expected = [forgetful(student, batch, step=step) for step, batch in enumerate(batches)]
    calls: list[int] = []
    counted_encoder(teacher, calls, monkeypatch)
    found = [keeping(student, batch, step=step) for step, batch in enumerate(batches)]
    assert [loss.parts for loss in found] == [loss.parts for loss in expected]
    assert [float(loss.total.detach()) for loss in found] == [float(loss.total.detach()) for loss in expected]
    assert len(calls) == 4  # all but the second time of (0, 0) in its chunk
    assert set(keeping._lessons) == {(0, 0)}


def test_a_batch_that_no_stream_gave_is_not_kept(make_model: ModelMaker) -> None:
    teacher = make_model(decoder_cell="ssru")
    student = student_of(teacher)
    keeping = Distillation(teacher, student, EVERYTHING, weights_of_source=[EACH], keeps=True)
    keeping(student, toy_batch(), step=1)
    assert not keeping._lessons
