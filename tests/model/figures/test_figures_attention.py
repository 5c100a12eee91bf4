"""Attention weights taken from outside are those the model computed; every kind of decoder can be drawn."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sentencepiece
import torch
from tiny_models import VOCABULARY_SIZE, tiny_texts, tiny_tokenizer
from torch import Tensor, nn
from torch.testing import assert_close

from app.text import Tokenizer
from model.attention import KeysValues, MultiHeadAttention
from model.figures.attention_heatmaps import draw_attention, num_columns, panel_order
from model.figures.attention_weights import attention_of, attention_weights, recorded_weights
from model.transformer import Transformer

ModelMaker = Callable[..., Transformer]


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer(sentencepiece.SentencePieceProcessor(model_proto=tiny_tokenizer()), eos_id=0)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_the_weights_times_the_values_give_the_modules_own_output(norm: str, make_model: ModelMaker) -> None:
    model = make_model(norm=norm)
    real = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    compared = []

    def compare(module: nn.Module, arguments: tuple[Tensor, KeysValues, Tensor], output: Tensor) -> None:
        assert isinstance(module, MultiHeadAttention)
        weights = attention_weights(module, *arguments)
        heads = weights @ arguments[1].values
        assert_close(module.output(heads.transpose(1, 2).flatten(2)), output)
        assert_close(weights.sum(3), torch.ones_like(weights[..., 0]))
        compared.append(module)

    for module in model.modules():
        if isinstance(module, MultiHeadAttention):
            module.register_forward_hook(compare)
    model(torch.randint(1, 23, (2, 6)), real, torch.randint(1, 23, (2, 5)))
    assert len(compared) == 2 + 2 * 2


def test_padding_and_the_future_get_no_weight(make_model: ModelMaker) -> None:
    model = make_model()
    real = torch.tensor([[True] * 4 + [False] * 2])
    with recorded_weights(model) as found:
        model(torch.randint(1, 23, (1, 6)), real, torch.randint(1, 23, (1, 5)))
    for layer in range(2):
        assert (found[f"encoder.{layer}.self_attention"][..., 4:] == 0).all()
        assert (found[f"decoder.{layer}.cross_attention"][..., 4:] == 0).all()
        assert (found[f"decoder.{layer}.self_attention"].triu(diagonal=1) == 0).all()


def test_nothing_is_recorded_afterwards(make_model: ModelMaker) -> None:
    model = make_model()
    with recorded_weights(model) as found:
        pass
    model(torch.ones(1, 3, dtype=torch.int64), torch.ones(1, 3, dtype=torch.bool), torch.ones(1, 2).long())
    assert found == {}


def test_a_sentences_maps_have_a_row_for_each_chosen_piece(
    make_model: ModelMaker, tokenizer: Tokenizer
) -> None:
    model = make_model(vocabulary_size=VOCABULARY_SIZE)
    text = tiny_texts()[4]
    maps = attention_of(model, tokenizer, text)
    s, t = len(maps.source_pieces), len(maps.target_pieces)
    assert maps.source_pieces == tuple(tokenizer.pieces(tokenizer.encode_source(text)))
    assert maps.input_pieces[1:] == maps.target_pieces[:-1]
    assert maps.encoder.shape == (2, 4, s, s)
    assert maps.cross.shape == (2, 4, t, s)
    assert maps.decoder is not None
    assert maps.decoder.shape == (2, 4, t, t)
    assert maps.ended or t == 3 * s + 8


def test_each_query_of_a_gated_decoder_has_its_map(make_model: ModelMaker, tokenizer: Tokenizer) -> None:
    model = make_model(vocabulary_size=VOCABULARY_SIZE, decoder_cell="gated_attention", decoder_query_heads=8)
    maps = attention_of(model, tokenizer, tiny_texts()[4])
    assert maps.decoder is not None
    assert maps.decoder.shape[:2] == (2, 8)
    # Four of the eight share nothing: with one and the same query, heads of a group alone look alike.
    with torch.no_grad():
        for layer in model.decoder:
            query = layer.self_attention.query  # type: ignore[union-attr]
            query.weight.copy_(query.weight[:4].repeat(8, 1))  # type: ignore[operator,index]
            query.bias.copy_(query.bias[:4].repeat(8))  # type: ignore[operator,index]
    drawn = attention_of(model, tokenizer, tiny_texts()[4]).decoder
    assert drawn is not None
    assert torch.equal(drawn[:, ::2], drawn[:, 1::2])
    assert not torch.allclose(drawn[:, 0], drawn[:, 2])


def test_a_recurrent_decoder_has_no_self_attention_to_draw(
    make_model: ModelMaker, tokenizer: Tokenizer
) -> None:
    model = make_model(vocabulary_size=VOCABULARY_SIZE, decoder_cell="ssru")
    maps = attention_of(model, tokenizer, tiny_texts()[0])
    assert maps.decoder is None
    with pytest.raises(ValueError, match="SSRU"):
        draw_attention(maps, "decoder")


@pytest.mark.parametrize("kind", ["encoder", "decoder", "cross"])
def test_a_figure_has_a_panel_for_each_layer_and_head(
    kind: str, make_model: ModelMaker, tokenizer: Tokenizer
) -> None:
    maps = attention_of(make_model(vocabulary_size=VOCABULARY_SIZE), tokenizer, tiny_texts()[0])
    figure = draw_attention(maps, kind)  # type: ignore[arg-type]
    titles = [axis.get_title() for axis in figure.axes if axis.get_title()]
    assert titles == [f"layer {layer}, head {head}" for layer in (1, 2) for head in (1, 2, 3, 4)]
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    rows = {"encoder": maps.source_pieces, "decoder": maps.input_pieces, "cross": maps.target_pieces}[kind]
    assert labels == [piece.replace("\u2581", "·") for piece in rows]


@pytest.mark.parametrize("num_layers", [1, 2, 4, 6, 7, 12])
@pytest.mark.parametrize("num_heads", [1, 3, 8, 16])
def test_every_panel_has_its_place_for_any_number_of_layers_and_heads(
    num_layers: int, num_heads: int
) -> None:
    order = panel_order(num_layers, num_heads)
    assert sorted(order) == [(layer, head) for layer in range(num_layers) for head in range(num_heads)]
    assert len(order) % num_columns(num_layers, num_heads) == 0
