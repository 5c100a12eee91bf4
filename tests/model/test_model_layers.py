"""Our layers against torch.nn's, an independent implementation of the same formulas."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from model.attention import CausalSelfAttention, MultiHeadAttention, causal_mask, padding_mask
from model.config import TransformerConfig
from model.layers import DecoderLayer, EncoderLayer, FeedForward
from model.positions import position_codes
from model.transformer import Transformer

Randomise = Callable[[nn.Module], None]
ConfigMaker = Callable[..., TransformerConfig]

NORMS = pytest.mark.parametrize("norm", ["post", "pre"])
ACTIVATIONS = pytest.mark.parametrize("activation", ["relu", "gelu"])
REAL = torch.tensor([[True] * 6, [True] * 4 + [False] * 2, [True] + [False] * 5])  # [B=3, S=6]


def close(actual: Tensor, expected: Tensor) -> None:
    assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def copy_linear(ours: nn.Linear, theirs: nn.Module) -> None:
    theirs.load_state_dict(ours.state_dict())


def copy_attention(ours: MultiHeadAttention, theirs: nn.MultiheadAttention) -> None:
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([ours.query.weight, ours.key.weight, ours.value.weight]))
        theirs.in_proj_bias.copy_(torch.cat([ours.query.bias, ours.key.bias, ours.value.bias]))
    copy_linear(ours.output, theirs.out_proj)


def torch_encoder_layer(ours: EncoderLayer, config: TransformerConfig) -> nn.TransformerEncoderLayer:
    theirs = nn.TransformerEncoderLayer(
        config.d_model,
        config.num_heads,
        config.ffn_size,
        dropout=0.0,
        activation=config.activation,
        layer_norm_eps=config.layer_norm_epsilon,
        batch_first=True,
        norm_first=config.norm == "pre",
    )
    copy_attention(ours.self_attention, theirs.self_attn)
    copy_linear(ours.ffn.inner, theirs.linear1)
    copy_linear(ours.ffn.outer, theirs.linear2)
    theirs.norm1.load_state_dict(ours.self_norm.state_dict())
    theirs.norm2.load_state_dict(ours.ffn_norm.state_dict())
    return theirs


def torch_decoder_layer(ours: DecoderLayer, config: TransformerConfig) -> nn.TransformerDecoderLayer:
    theirs = nn.TransformerDecoderLayer(
        config.d_model,
        config.num_heads,
        config.ffn_size,
        dropout=0.0,
        activation=config.activation,
        layer_norm_eps=config.layer_norm_epsilon,
        batch_first=True,
        norm_first=config.norm == "pre",
    )
    copy_attention(ours.self_attention, theirs.self_attn)
    copy_attention(ours.cross_attention, theirs.multihead_attn)
    copy_linear(ours.ffn.inner, theirs.linear1)
    copy_linear(ours.ffn.outer, theirs.linear2)
    theirs.norm1.load_state_dict(ours.self_norm.state_dict())
    theirs.norm2.load_state_dict(ours.cross_norm.state_dict())
    theirs.norm3.load_state_dict(ours.ffn_norm.state_dict())
    return theirs


def test_attention_to_a_padded_source_equals_torch(randomise: Randomise) -> None:
    ours, theirs = MultiHeadAttention(16, 4), nn.MultiheadAttention(16, 4, batch_first=True)
    randomise(ours)
    copy_attention(ours, theirs)
    inputs, source = torch.randn(3, 5, 16), torch.randn(3, 6, 16)
    actual = ours(inputs, ours.keys_values(source), padding_mask(REAL))
    expected, _ = theirs(inputs, source, source, key_padding_mask=~REAL, need_weights=False)
    close(actual, expected)


def test_causal_self_attention_equals_torch(randomise: Randomise) -> None:
    ours, theirs = CausalSelfAttention(16, 4), nn.MultiheadAttention(16, 4, batch_first=True)
    randomise(ours)
    copy_attention(ours, theirs)
    inputs = torch.randn(3, 5, 16)
    actual, present = ours.advance(inputs, ours.start(3))
    future = torch.ones(5, 5, dtype=torch.bool).triu(diagonal=1)
    expected, _ = theirs(inputs, inputs, inputs, attn_mask=future, need_weights=False)
    close(actual, expected)
    assert present.keys.shape == (3, 4, 5, 4)


def test_the_causal_mask_lets_a_query_see_the_cache_and_itself_but_nothing_later() -> None:
    mask = causal_mask(2, 5, device=torch.device("cpu"))
    assert mask.tolist() == [[True, True, True, True, False], [True, True, True, True, True]]


@NORMS
@ACTIVATIONS
def test_an_encoder_layer_equals_torch(
    norm: str, activation: str, make_config: ConfigMaker, randomise: Randomise
) -> None:
    config = make_config(norm=norm, activation=activation)
    ours = EncoderLayer(config)
    randomise(ours)
    inputs = torch.randn(3, 6, 16)
    actual = ours(inputs, padding_mask(REAL))
    expected = torch_encoder_layer(ours, config)(inputs, src_key_padding_mask=~REAL)
    close(actual[REAL], expected[REAL])


@NORMS
@ACTIVATIONS
def test_a_decoder_layer_equals_torch(
    norm: str, activation: str, make_config: ConfigMaker, randomise: Randomise
) -> None:
    config = make_config(norm=norm, activation=activation)
    ours = DecoderLayer(config)
    randomise(ours)
    inputs, memory = torch.randn(3, 5, 16), torch.randn(3, 6, 16)
    cross = ours.cross_attention.keys_values(memory)
    actual, _ = ours(inputs, ours.causal.start(3), cross, padding_mask(REAL))
    future = torch.ones(5, 5, dtype=torch.bool).triu(diagonal=1)
    expected = torch_decoder_layer(ours, config)(
        inputs, memory, tgt_mask=future, memory_key_padding_mask=~REAL
    )
    close(actual, expected)


@pytest.mark.parametrize(
    ("activation", "function"), [("relu", nn.ReLU()), ("gelu", nn.GELU()), ("silu", nn.SiLU())]
)
def test_the_feed_forward_network_applies_the_chosen_activation(
    activation: str, function: nn.Module, make_config: ConfigMaker
) -> None:
    ours = FeedForward(make_config(activation=activation))
    inputs = torch.randn(2, 3, 16)
    close(ours(inputs), nn.Sequential(ours.inner, function, ours.outer)(inputs))


@NORMS
@pytest.mark.parametrize("start_id", [None, 5])
def test_the_whole_model_equals_one_built_of_torchs_layers(
    norm: str, start_id: int | None, make_config: ConfigMaker, randomise: Randomise
) -> None:
    config = make_config(norm=norm, start_id=start_id)
    ours = Transformer(config)
    randomise(ours)
    source_ids, target_ids = torch.randint(23, (3, 6)), torch.randint(23, (3, 5))

    encoder_layers = [torch_encoder_layer(layer, config) for layer in ours.encoder]
    decoder_layers = [torch_decoder_layer(layer, config) for layer in ours.decoder]
    # The final norm, where there is one, is the same nn.LayerNorm in both; here its use is compared.
    final = norm == "pre"
    embeddings = ours.embedding.weight
    codes = position_codes(6, 16, layout="interleaved")
    x = embeddings[source_ids] * 4.0 + codes  # 4 = sqrt(16)
    for encoder_layer in encoder_layers:
        x = encoder_layer(x, src_key_padding_mask=~REAL)
    memory = ours.encoder_norm(x) if final else x
    first = torch.zeros(3, 1, 16) if start_id is None else embeddings[start_id].expand(3, 1, 16) * 4.0
    y = torch.cat([first, embeddings[target_ids[:, :4]] * 4.0], dim=1) + codes[:5]
    future = torch.ones(5, 5, dtype=torch.bool).triu(diagonal=1)
    for decoder_layer in decoder_layers:
        y = decoder_layer(y, memory, tgt_mask=future, memory_key_padding_mask=~REAL)
    expected = (ours.decoder_norm(y) if final else y) @ embeddings.T + ours.output_bias

    assert_close(ours(source_ids, REAL, target_ids), expected, rtol=1e-5, atol=1e-5)
