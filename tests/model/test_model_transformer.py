from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

from model.config import TransformerConfig
from model.greedy import greedy
from model.transformer import Transformer

ConfigMaker = Callable[..., TransformerConfig]
ModelMaker = Callable[..., Transformer]

CELLS = pytest.mark.parametrize("decoder_cell", ["attention", "gated_attention", "ssru"])
NORMS = pytest.mark.parametrize("norm", ["post", "pre"])
POSITIONS = pytest.mark.parametrize("positions", ["interleaved", "halves"])
STARTS = pytest.mark.parametrize("start_id", [None, 3])

REAL = torch.tensor([[True] * 6, [True] * 4 + [False] * 2, [True] + [False] * 5])  # [B=3, S=6]


def ids(*shape: int) -> Tensor:
    return torch.randint(1, 23, shape)


def attention_names(prefix: str) -> set[str]:
    kinds = ("query", "key", "value", "output")
    return {f"{prefix}.{kind}.{part}" for kind in kinds for part in ("weight", "bias")}


def pair(prefix: str) -> set[str]:
    return {f"{prefix}.weight", f"{prefix}.bias"}


@CELLS
@NORMS
def test_parameters_have_the_names_that_exporters_address(
    decoder_cell: str, norm: str, make_model: ModelMaker
) -> None:
    expected = {"embedding.weight", "output_bias"}
    for i in range(2):
        expected |= attention_names(f"encoder.{i}.self_attention") | pair(f"encoder.{i}.self_norm")
        expected |= (
            pair(f"encoder.{i}.ffn.inner") | pair(f"encoder.{i}.ffn.outer") | pair(f"encoder.{i}.ffn_norm")
        )
        if decoder_cell == "ssru":
            expected |= {f"decoder.{i}.cell.candidate.weight"} | pair(f"decoder.{i}.cell.forget")
        else:
            expected |= attention_names(f"decoder.{i}.self_attention")
            if decoder_cell == "gated_attention":
                expected |= pair(f"decoder.{i}.self_attention.gate")
        expected |= pair(f"decoder.{i}.self_norm")
        expected |= attention_names(f"decoder.{i}.cross_attention") | pair(f"decoder.{i}.cross_norm")
        expected |= (
            pair(f"decoder.{i}.ffn.inner") | pair(f"decoder.{i}.ffn.outer") | pair(f"decoder.{i}.ffn_norm")
        )
    if norm == "pre":
        expected |= pair("encoder_norm") | pair("decoder_norm")
    model = make_model(decoder_cell=decoder_cell, norm=norm)
    assert set(model.state_dict()) == expected
    assert {name for name, _ in model.named_parameters()} == expected


@CELLS
@NORMS
@POSITIONS
@STARTS
def test_cached_steps_equal_the_full_forward_pass(
    decoder_cell: str, norm: str, positions: str, start_id: int | None, make_model: ModelMaker
) -> None:
    model = make_model(decoder_cell=decoder_cell, norm=norm, positions=positions, start_id=start_id)
    source_ids, target_ids = ids(3, 6), ids(3, 7)
    expected = model(source_ids, REAL, target_ids)

    cross = model.cross_keys_values(model.encode(source_ids, REAL))
    state = model.initial_state(3)
    last_ids = None
    for t in range(7):
        assert state.position == t
        logits, state = model.step(last_ids, state, cross, REAL)
        assert logits.shape == (3, 23)
        assert_close(logits, expected[:, t], rtol=1e-5, atol=1e-5)
        last_ids = target_ids[:, t]


@CELLS
def test_a_padded_source_token_changes_no_output(decoder_cell: str, make_model: ModelMaker) -> None:
    model = make_model(decoder_cell=decoder_cell)
    source_ids, target_ids = ids(3, 6), ids(3, 5)
    other_padding = torch.where(REAL, source_ids, (source_ids + 7) % 23)
    assert torch.equal(model(source_ids, REAL, target_ids), model(other_padding, REAL, target_ids))
    other_real = torch.where(REAL, (source_ids + 7) % 23, source_ids)
    difference = model(source_ids, REAL, target_ids) - model(other_real, REAL, target_ids)
    assert difference.abs().amax(dim=(1, 2)).gt(1e-3).all()


@CELLS
def test_padding_makes_a_source_no_different_from_itself_alone(
    decoder_cell: str, make_model: ModelMaker
) -> None:
    model = make_model(decoder_cell=decoder_cell)
    source_ids, target_ids = ids(3, 6), ids(3, 5)
    together = model(source_ids, REAL, target_ids)
    alone = model(source_ids[1:2, :4], REAL[1:2, :4], target_ids[1:2])
    assert_close(together[1:2], alone, rtol=1e-5, atol=1e-5)


@CELLS
@NORMS
def test_a_target_token_changes_the_outputs_after_it_and_none_before(
    decoder_cell: str, norm: str, make_model: ModelMaker
) -> None:
    model = make_model(decoder_cell=decoder_cell, norm=norm)
    source_ids, target_ids = ids(3, 6), ids(3, 7)
    original = model(source_ids, REAL, target_ids)
    for t in range(7):
        changed = target_ids.clone()
        changed[:, t] = (changed[:, t] + 5) % 23
        difference = (model(source_ids, REAL, changed) - original).abs().amax(dim=2)  # [B, T]
        assert torch.equal(difference[:, : t + 1], torch.zeros(3, t + 1))
        assert difference[:, t + 1 :].gt(1e-4).all()


@CELLS
@NORMS
@STARTS
def test_gradients_reach_every_parameter(
    decoder_cell: str, norm: str, start_id: int | None, make_model: ModelMaker
) -> None:
    model = make_model(decoder_cell=decoder_cell, norm=norm, start_id=start_id).train()
    target_ids = ids(3, 5)
    logits = model(ids(3, 6), REAL, target_ids)
    functional.cross_entropy(logits.flatten(0, 1), target_ids.flatten()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        # A key's bias adds the same number to all scores of a query; the softmax takes it out again.
        if not name.endswith("key.bias"):
            assert parameter.grad.abs().max() > 1e-7, name


def test_source_target_and_output_share_one_embedding(make_model: ModelMaker) -> None:
    model = make_model()
    same_size = [name for name, parameter in model.named_parameters() if parameter.numel() == 23 * 16]
    assert same_size == ["embedding.weight"]

    with torch.no_grad():
        hidden = torch.randn(2, 16)
        before_encoder = model.encode(torch.tensor([[9]]), torch.tensor([[True]]))
        before_target = model.shift_right(torch.tensor([[9, 1]]))
        before_output = model.project(hidden)
        model.embedding.weight[9] += 1.0
        assert not torch.equal(model.encode(torch.tensor([[9]]), torch.tensor([[True]])), before_encoder)
        assert_close(model.shift_right(torch.tensor([[9, 1]]))[0, 1], before_target[0, 1] + math.sqrt(16))
        assert_close(model.project(hidden)[:, 9], before_output[:, 9] + hidden.sum(dim=1))


def test_without_a_start_token_the_first_input_is_a_zero_embedding(make_model: ModelMaker) -> None:
    inputs = make_model(start_id=None).shift_right(torch.tensor([[4, 8]]))
    assert torch.equal(inputs[:, 0], torch.zeros(1, 16))
    model = make_model(start_id=7)
    inputs = model.shift_right(torch.tensor([[4, 8]]))
    assert_close(inputs[0, 0], model.embedding.weight[7] * 4.0)
    assert_close(inputs[0, 1], model.embedding.weight[4] * 4.0)


@CELLS
def test_selected_rows_decode_as_they_would_have_in_their_old_place(
    decoder_cell: str, make_model: ModelMaker
) -> None:
    model = make_model(decoder_cell=decoder_cell)
    cross = model.cross_keys_values(model.encode(ids(3, 6), REAL))
    state = model.initial_state(3)
    _, state = model.step(None, state, cross, REAL)
    _, state = model.step(ids(3), state, cross, REAL)
    last_ids = ids(3)
    expected, _ = model.step(last_ids, state, cross, REAL)

    rows = torch.tensor([2, 0, 0, 1])
    selected = state.select(rows)
    assert selected.position == 2
    selected_cross = tuple(type(layer)(layer.keys[rows], layer.values[rows]) for layer in cross)
    actual, _ = model.step(last_ids[rows], selected, selected_cross, REAL[rows])
    assert_close(actual, expected[rows], rtol=1e-5, atol=1e-5)
    assert expected[0].sub(expected[2]).abs().max() > 1e-3  # else any order would have passed


def test_a_step_without_a_token_is_only_the_first(make_model: ModelMaker) -> None:
    model = make_model()
    cross = model.cross_keys_values(model.encode(ids(3, 6), REAL))
    start = model.initial_state(3)
    with pytest.raises(ValueError, match="last_ids is given at position 0"):
        model.step(ids(3), start, cross, REAL)
    _, state = model.step(None, start, cross, REAL)
    with pytest.raises(ValueError, match="last_ids is None at position 1"):
        model.step(None, state, cross, REAL)


def test_a_target_without_positions_is_refused(make_model: ModelMaker) -> None:
    with pytest.raises(ValueError, match="0 positions"):
        make_model()(ids(3, 6), REAL, ids(3, 0))


def test_a_source_without_real_tokens_gives_nan_in_its_row_alone(make_model: ModelMaker) -> None:
    real = REAL.clone()
    real[1] = False
    logits = make_model()(ids(3, 6), real, ids(3, 4))
    assert logits.isnan().all(dim=2).all(dim=1).tolist() == [False, True, False]
    assert logits[[0, 2]].isfinite().all()


def test_dropout_acts_on_embeddings_and_on_every_sub_layers_output(make_model: ModelMaker) -> None:
    model = make_model(dropout=0.5, encoder_layers=3, decoder_layers=2).train()
    seen = []
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda module, args, output: seen.append(output))
    source_ids, target_ids = ids(3, 6), ids(3, 5)
    first, second = model(source_ids, REAL, target_ids), model(source_ids, REAL, target_ids)
    assert not torch.equal(first, second)
    assert len(seen) == 2 * ((1 + 2 * 3) + (1 + 3 * 2))
    assert all((output == 0).float().mean() > 0.2 for output in seen)

    model.eval()
    assert torch.equal(model(source_ids, REAL, target_ids), model(source_ids, REAL, target_ids))


def test_a_new_model_has_embeddings_of_unit_variance_after_scaling_and_no_biases(
    make_config: ConfigMaker,
) -> None:
    model = Transformer(make_config(vocabulary_size=500, d_model=64))
    scaled = model.shift_right(torch.arange(500)[None])[0, 1:]
    assert scaled.std().item() == pytest.approx(1.0, rel=0.05)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert torch.equal(parameter, torch.zeros_like(parameter)), name


@CELLS
def test_a_model_learns_to_copy_and_greedy_decoding_shows_it(
    decoder_cell: str, make_config: ConfigMaker
) -> None:
    model = Transformer(make_config(decoder_cell=decoder_cell, d_model=32, ffn_size=64, encoder_layers=1))
    sequences = [[5, 9, 2, 14], [3, 3], [20, 1, 7], [8, 15, 8, 8]]
    source_ids = torch.tensor([[*sequence, *[0] * (5 - len(sequence))] for sequence in sequences])
    source_mask = torch.tensor([[t <= len(sequence) for t in range(5)] for sequence in sequences])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(80):
        optimizer.zero_grad()
        logits = model(source_ids, source_mask, source_ids)
        functional.cross_entropy(logits[source_mask], source_ids[source_mask]).backward()
        optimizer.step()
    results = greedy(model.eval(), source_ids, source_mask, max_steps=10)
    assert [list(result.token_ids) for result in results] == sequences
    assert all(result.ended for result in results)
