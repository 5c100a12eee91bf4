"""What docs/transformer.md says about heads, masks, feed-forward networks and residuals, each a test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from model.attention import (
    CausalSelfAttention,
    KeysValues,
    MultiHeadAttention,
    causal_mask,
    padding_mask,
    scaled_dot_product_attention,
)
from model.config import TransformerConfig
from model.figures.attention_weights import recorded_weights
from model.layers import EncoderLayer, FeedForward
from model.transformer import Transformer

ConfigMaker = Callable[..., TransformerConfig]
ModelMaker = Callable[..., Transformer]
ALL = torch.ones(1, 1, dtype=torch.bool)


def test_heads_are_slices_of_one_projection_not_projections_of_their_own() -> None:
    attention = MultiHeadAttention(16, 4)
    x = torch.randn(2, 5, 16)
    whole = attention.keys_values(x).keys  # [B, H, S, D]
    for head in range(4):
        rows = slice(4 * head, 4 * head + 4)
        own = nn.functional.linear(x, attention.key.weight[rows], attention.key.bias[rows])
        assert_close(whole[:, head], own)


def test_the_heads_are_computed_alone_and_joined_by_concatenation() -> None:
    attention = MultiHeadAttention(16, 4)
    x = torch.randn(2, 5, 16)
    keys, values = attention.keys_values(x)
    queries = attention.query(x).view(2, 5, 4, 4).transpose(1, 2)
    alone = [
        scaled_dot_product_attention(
            queries[:, h : h + 1], KeysValues(keys[:, h : h + 1], values[:, h : h + 1]), ALL
        )
        for h in range(4)
    ]
    joined = attention.output(torch.cat([head[:, 0] for head in alone], dim=2))
    assert_close(attention(x, KeysValues(keys, values), ALL), joined)


def test_eight_heads_cost_as_many_operations_and_parameters_as_one() -> None:
    costs = []
    for num_heads in (1, 8):
        attention = MultiHeadAttention(64, num_heads)
        x = torch.randn(1, 20, 64)
        counter = FlopCounterMode(display=False)
        with counter:
            attention(x, attention.keys_values(x), ALL)
        costs.append((counter.get_total_flops(), sum(p.numel() for p in attention.parameters())))
    assert costs[0] == costs[1]


def test_nothing_but_the_random_start_makes_heads_differ() -> None:
    """Two heads that start equal get equal gradients: what a head attends to is learnt, not assigned."""
    attention = MultiHeadAttention(16, 2)
    with torch.no_grad():
        for layer in (attention.query, attention.key, attention.value):
            layer.weight[8:] = layer.weight[:8]
            layer.bias[8:] = layer.bias[:8]
        attention.output.weight[:, 8:] = attention.output.weight[:, :8]
    x = torch.randn(2, 5, 16)
    attention(x, attention.keys_values(x), ALL).square().sum().backward()
    gradient = attention.query.weight.grad
    assert gradient is not None
    assert gradient.abs().amax() > 0
    assert_close(gradient[8:], gradient[:8])


def test_a_masked_position_gets_a_weight_of_exactly_zero() -> None:
    weights = (
        torch.randn(4, 4).masked_fill(~causal_mask(4, 4, device=torch.device("cpu")), -torch.inf).softmax(1)
    )
    assert torch.equal(weights.triu(diagonal=1), torch.zeros(4, 4))
    assert_close(weights.sum(1), torch.ones(4))


def test_a_target_token_is_predicted_from_those_before_it_and_never_from_itself(
    make_model: ModelMaker,
) -> None:
    """The mask lets a position see itself; that is no peeking, because the decoder's input is shifted."""
    model = make_model()
    source = torch.randint(1, 23, (1, 5))
    real = torch.ones(1, 5, dtype=torch.bool)
    target = torch.randint(1, 23, (1, 6))
    logits = model(source, real, target)
    for t in range(6):
        other = target.clone()
        other[0, t] = (other[0, t] + 7) % 23
        changed = (model(source, real, other) - logits).abs().amax(dim=(0, 2)) > 1e-4
        assert not changed[: t + 1].any()
        assert changed[t + 1 : t + 2].all()


def test_a_decoder_layer_that_forgets_the_mask_sees_the_future() -> None:
    """One of the notes' listings calls its masked attention without a mask."""
    theirs = nn.MultiheadAttention(16, 4, batch_first=True)
    ours = CausalSelfAttention(16, 4)
    x = torch.randn(1, 5, 16)
    later = x.clone()
    later[0, 4] += 1.0
    with torch.no_grad():
        unmasked = theirs(later, later, later)[0] - theirs(x, x, x)[0]
        masked = ours.advance(later, ours.start(1))[0] - ours.advance(x, ours.start(1))[0]
    assert unmasked[0, 0].abs().amax() > 1e-4
    assert torch.equal(masked[0, :4], torch.zeros(4, 16))


def test_torchs_attention_mixes_the_sentences_of_a_batch_unless_it_is_told_batch_first() -> None:
    """The notes' listings feed [batch, length, width] to a module that expects [length, batch, width]."""
    x = torch.randn(2, 5, 16)
    other = x.clone()
    other[1] += 1.0
    differences = {}
    for batch_first in (False, True):
        torch.manual_seed(0)
        attention = nn.MultiheadAttention(16, 4, batch_first=batch_first)
        with torch.no_grad():
            differences[batch_first] = (
                (attention(other, other, other)[0] - attention(x, x, x)[0])[0].abs().amax()
            )
    assert differences[False] > 1e-3
    assert differences[True] == 0


def test_queries_keys_and_values_come_from_where_each_attention_says(make_model: ModelMaker) -> None:
    """Encoder: source, source; decoder: target, target; cross: queries of the target, keys of the source."""
    model = make_model()
    source, target = torch.randint(1, 23, (1, 5)), torch.randint(1, 23, (1, 7))
    with recorded_weights(model) as weights, torch.no_grad():
        model(source, torch.ones(1, 5, dtype=torch.bool), target)
    shapes = {name: tuple(found.shape) for name, found in weights.items()}
    for layer in range(2):
        assert shapes[f"encoder.{layer}.self_attention"] == (1, 4, 5, 5)
        assert shapes[f"decoder.{layer}.self_attention"] == (1, 4, 7, 7)
        assert shapes[f"decoder.{layer}.cross_attention"] == (1, 4, 7, 5)


def test_cross_attention_gets_its_keys_and_values_from_the_encoders_last_layer_alone(
    make_model: ModelMaker,
) -> None:
    """Not from the decoder's output: no target token can change them, so they are computed once."""
    model = make_model()
    source, real = torch.randint(1, 23, (1, 5)), torch.ones(1, 5, dtype=torch.bool)
    memory = model.encode(source, real)
    for layer, found in zip(model.decoder, model.cross_keys_values(memory), strict=True):
        expected = layer.cross_attention.key(memory).view(1, 5, 4, 4).transpose(1, 2)
        assert_close(found.keys, expected)


def test_a_feed_forward_network_acts_on_every_position_alone_with_the_same_weights(
    make_config: ConfigMaker,
) -> None:
    ffn = FeedForward(make_config())
    x = torch.randn(1, 3, 16)
    together = ffn(x)
    for position in range(3):
        assert_close(together[:, position], ffn(x[:, position : position + 1])[:, 0])
    swapped = ffn(x[:, [2, 1, 0]])
    assert_close(swapped, together[:, [2, 1, 0]])


def test_a_feed_forward_network_expands_fourfold_and_shrinks_back() -> None:
    ffn = FeedForward(TransformerConfig(vocabulary_size=8))
    assert ffn.inner.weight.shape == (2048, 512)
    assert ffn.outer.weight.shape == (512, 2048)


def test_without_a_non_linearity_expanding_would_be_worth_nothing(make_config: ConfigMaker) -> None:
    """Two linear layers are one matrix of the small size."""
    ffn = FeedForward(make_config())
    x = torch.randn(4, 16)
    one = nn.Linear(16, 16)
    with torch.no_grad():
        one.weight.copy_(ffn.outer.weight @ ffn.inner.weight)
        one.bias.copy_(ffn.outer.weight @ ffn.inner.bias + ffn.outer.bias)
    assert_close(ffn.outer(ffn.inner(x)), one(x), rtol=1e-4, atol=1e-5)
    assert (ffn(x) - one(x)).abs().amax() > 0.05


def test_a_wider_inner_layer_fits_what_a_narrow_one_cannot() -> None:
    """d inputs, d hidden units: too few folds for a function that 4 d units draw."""
    errors = {}
    x = torch.linspace(-2, 2, 256)[:, None].expand(-1, 2).contiguous()
    wanted = torch.sin(3 * x)
    for ffn_size in (2, 8, 32):
        torch.manual_seed(1)
        ffn = FeedForward(TransformerConfig(vocabulary_size=8, d_model=2, num_heads=1, ffn_size=ffn_size))
        optimizer = torch.optim.Adam(ffn.parameters(), lr=0.03)
        for _ in range(200):
            optimizer.zero_grad()
            loss = (ffn(x) - wanted).square().mean()
            loss.backward()
            optimizer.step()
        errors[ffn_size] = float(loss.detach())
    assert errors[32] < 0.1 * errors[2]
    assert errors[32] < errors[8] < errors[2]


def test_the_feed_forward_network_holds_two_thirds_of_an_encoder_layers_parameters() -> None:
    """It is the larger part, not the thrifty one: 8 d^2 beside the attention's 4 d^2."""
    layer = EncoderLayer(TransformerConfig(vocabulary_size=8))
    total = sum(parameter.numel() for parameter in layer.parameters())
    ffn = sum(parameter.numel() for parameter in layer.ffn.parameters())
    assert ffn / total == pytest.approx(2 / 3, abs=0.002)


def test_a_layers_output_has_its_inputs_shape_so_layers_can_be_stacked(make_config: ConfigMaker) -> None:
    x = torch.randn(2, 5, 16)
    mask = padding_mask(torch.ones(2, 5, dtype=torch.bool))
    for _ in range(3):
        x = EncoderLayer(make_config())(x, mask)
        assert x.shape == (2, 5, 16)


def test_layer_norm_gives_every_position_mean_zero_and_variance_one(make_config: ConfigMaker) -> None:
    layer = EncoderLayer(make_config())
    x = layer(100 * torch.randn(2, 5, 16) + 7, padding_mask(torch.ones(2, 5, dtype=torch.bool)))
    assert_close(x.mean(2), torch.zeros(2, 5), rtol=0, atol=1e-5)
    assert_close(x.var(2, unbiased=False), torch.ones(2, 5), rtol=1e-3, atol=1e-3)


@dataclass(frozen=True)
class StackReport:
    """What a gradient of norm 1 and 10 random words become in a stack of layers."""

    gradient_norm: float
    similarity: float  # mean cosine between the outputs of two words; 1: all words became the same


def report_on_stack(depth: int, *, residual: bool, norm: bool) -> StackReport:
    config = TransformerConfig(vocabulary_size=8, d_model=32, num_heads=4, ffn_size=128, dropout=0.0)

    class Layer(EncoderLayer):
        def leave(self, inputs: Tensor, outputs: Tensor, layer_norm: nn.LayerNorm) -> Tensor:
            total = inputs + outputs if residual else outputs
            return layer_norm(total) if norm else total

    torch.manual_seed(0)
    x = torch.randn(1, 10, 32, requires_grad=True)
    y: Tensor = x
    for _ in range(depth):
        layer = Layer(config)
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        y = layer(y, padding_mask(torch.ones(1, 10, dtype=torch.bool)))
    words = y[0].detach()
    cosines = torch.cosine_similarity(words[:, None], words[None], dim=2)
    direction = torch.randn(y.shape)
    (y * direction / direction.norm()).sum().backward()
    assert x.grad is not None
    return StackReport(float(x.grad.norm()), float(cosines.sum() - 10) / 90)


def test_the_altered_layer_with_both_parts_is_the_models_own() -> None:
    torch.manual_seed(0)
    config = TransformerConfig(vocabulary_size=8, d_model=32, num_heads=4, ffn_size=128, dropout=0.0)
    layer = EncoderLayer(config)
    x = torch.randn(1, 10, 32)
    assert_close(layer.leave(x, 2 * x, layer.ffn_norm), layer.ffn_norm(3 * x))


def test_residual_and_norm_together_keep_the_gradient_of_24_layers_near_one() -> None:
    assert 0.1 < report_on_stack(24, residual=True, norm=True).gradient_norm < 10


def test_without_both_the_gradient_vanishes() -> None:
    assert report_on_stack(24, residual=False, norm=False).gradient_norm < 1e-5


def test_with_the_residual_but_no_norm_the_gradient_explodes() -> None:
    assert report_on_stack(24, residual=True, norm=False).gradient_norm > 1e5


def test_with_the_norm_but_no_residual_the_gradient_lives_but_all_words_become_the_same() -> None:
    """It is the norm that guards the gradient's size; the residual guards what tells the words apart."""
    alone = report_on_stack(2, residual=False, norm=True)
    assert alone.gradient_norm > 0.1
    assert alone.similarity > 0.95
    assert report_on_stack(2, residual=True, norm=True).similarity < 0.1
