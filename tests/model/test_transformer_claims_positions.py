"""What docs/transformer.md says about embeddings, position codes and tied weights, each a test."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.testing import assert_close

from model.config import TransformerConfig
from model.positions import position_codes
from model.transformer import Transformer

BASE_WIDTH = 512


def rms(x: Tensor) -> float:
    return float(x.detach().double().square().mean().sqrt())


def test_every_code_has_a_root_mean_square_of_exactly_one_over_root_two() -> None:
    """The values reach from -1 to 1, but sin^2 + cos^2 = 1 fixes their size at every position."""
    codes = position_codes(2000, BASE_WIDTH, layout="interleaved")
    assert codes.abs().amax() <= 1
    assert_close(codes.square().mean(1), torch.full((2000,), 0.5))


def test_embeddings_start_with_variance_one_over_d_and_enter_the_layers_with_variance_one() -> None:
    """Their deviation is 1/sqrt(d); the variance is 1/d, not 1/sqrt(d)."""
    model = Transformer(TransformerConfig(vocabulary_size=1000, encoder_layers=1, decoder_layers=1))
    stored = model.embedding.weight.detach()
    assert float(stored.var()) == pytest.approx(1 / BASE_WIDTH, rel=0.02)
    assert float(stored.std()) == pytest.approx(1 / math.sqrt(BASE_WIDTH), rel=0.02)
    entering = model._embed(torch.arange(1000)[None])
    assert rms(entering) == pytest.approx(1.0, rel=0.02)


def test_without_the_root_of_d_the_positions_would_drown_the_words() -> None:
    model = Transformer(TransformerConfig(vocabulary_size=1000, encoder_layers=1, decoder_layers=1))
    codes = rms(position_codes(50, BASE_WIDTH, layout="interleaved"))
    assert codes / rms(model.embedding.weight) == pytest.approx(16, rel=0.02)
    scaled = math.sqrt(BASE_WIDTH) * model.embedding.weight
    assert codes / rms(scaled) == pytest.approx(math.sqrt(0.5), rel=0.02)


def test_xavier_would_make_a_large_vocabularys_embeddings_smaller_still() -> None:
    """Xavier looks at both sides of the table: 2 / (V + d), which sqrt(d) does not bring to 1."""
    table = torch.empty(8000, BASE_WIDTH)
    torch.nn.init.xavier_uniform_(table)
    assert float(table.var()) == pytest.approx(2 / (8000 + BASE_WIDTH), rel=0.02)
    assert math.sqrt(BASE_WIDTH) * rms(table) < 0.4


def test_the_same_table_gives_logits_of_variance_one_so_sharing_fits_the_scaling() -> None:
    model = Transformer(TransformerConfig(vocabulary_size=1000, encoder_layers=1, decoder_layers=1))
    hidden = functional.layer_norm(torch.randn(20, BASE_WIDTH), (BASE_WIDTH,))
    assert rms(model.project(hidden)) == pytest.approx(1.0, rel=0.05)


def test_one_table_for_three_uses_saves_two_tables_of_parameters() -> None:
    config = TransformerConfig(vocabulary_size=32_000)
    with torch.device("meta"):
        model = Transformer(config)
    table = config.vocabulary_size * config.d_model
    total = sum(parameter.numel() for parameter in model.parameters())
    shaped_like_it = [
        p for p in model.parameters() if tuple(p.shape) == (config.vocabulary_size, config.d_model)
    ]
    assert len(shaped_like_it) == 1
    assert table == 16_384_000
    untied = total + 2 * table
    assert 2 * table / untied == pytest.approx(0.35, abs=0.01)


def test_source_target_and_output_really_share_the_table() -> None:
    model = Transformer(TransformerConfig(23, 16, 2, 1, 1, 24)).eval()
    ids, real, hidden = torch.tensor([[3, 4, 5]]), torch.ones(1, 3, dtype=torch.bool), torch.randn(1, 16)

    def three_uses() -> tuple[Tensor, Tensor, Tensor]:
        return model.encode(ids, real), model.shift_right(ids), model.project(hidden)[:, 4]

    before = three_uses()
    with torch.no_grad():
        model.embedding.weight[4] += torch.randn(16)
    for old, new in zip(before, three_uses(), strict=True):
        assert (new - old).abs().amax() > 1e-3


def test_low_dimensions_turn_fast_and_high_ones_slowly() -> None:
    """Like the digits of a number: the last one changes at every step."""
    codes = position_codes(4000, 64, layout="interleaved").double()
    speeds = codes.diff(dim=0).abs().mean(0)[0::2]  # of the sines
    assert (speeds.diff() < 0).all()


@pytest.mark.parametrize(("layout", "longest"), [("interleaved", 10_000 ** (62 / 64)), ("halves", 10_000.0)])
def test_the_wavelengths_form_a_geometric_series_from_2_pi_to_nearly_10000_times_2_pi(
    layout: str, longest: float
) -> None:
    codes = position_codes(2, 64, layout=layout).double()  # type: ignore[arg-type]
    sines = codes[1, 0::2] if layout == "interleaved" else codes[1, :32]
    frequencies = torch.asin(sines)  # at position 1 the angle is the frequency
    assert_close(frequencies[1:] / frequencies[:-1], (frequencies[1] / frequencies[0]).expand(31))
    assert float(frequencies[0]) == pytest.approx(1.0)
    assert float(1 / frequencies[-1]) == pytest.approx(longest, rel=1e-4)


def test_the_dot_product_of_two_codes_depends_on_their_distance_alone() -> None:
    """It is sum_k cos(w_k (t - s)): sin sin + cos cos = cos of the difference."""
    d = 64
    codes = position_codes(1000, d, layout="interleaved").double()
    for distance in (1, 7, 50):
        products = (codes[distance:] * codes[:-distance]).sum(1)
        frequencies = 10_000 ** -(torch.arange(0, d, 2, dtype=torch.float64) / d)
        assert_close(
            products, torch.cos(distance * frequencies).sum().expand(1000 - distance), rtol=0, atol=1e-4
        )


def test_it_needs_the_cosines_sines_alone_would_not_do() -> None:
    sines = position_codes(100, 64, layout="interleaved")[:, 0::2]
    products = (sines[7:] * sines[:-7]).sum(1)
    assert products.std() > 0.5


def test_the_dot_product_tells_how_far_but_not_in_which_direction() -> None:
    codes = position_codes(41, 64, layout="interleaved")
    products = codes @ codes[20]
    assert_close(products, products.flip(0), rtol=0, atol=1e-4)


def test_the_dot_product_falls_at_first_but_not_steadily() -> None:
    products = position_codes(60, 128, layout="interleaved") @ position_codes(1, 128, layout="interleaved")[0]
    assert (products[:7].diff() < 0).all()
    assert (products.diff() > 0).any()


def test_a_step_of_k_positions_is_the_same_rotation_wherever_it_starts() -> None:
    """Section 3.5: PE(t + k) is a linear function of PE(t), which learned projections can use."""
    d, k = 32, 5
    codes = position_codes(200, d, layout="interleaved").double()
    rotation = torch.zeros(d, d, dtype=torch.float64)
    for i in range(d // 2):
        angle = k / 10_000 ** (2 * i / d)
        sin, cos = math.sin(angle), math.cos(angle)
        rotation[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = torch.tensor([[cos, sin], [-sin, cos]])
    assert_close(codes[:-k] @ rotation.T, codes[k:], rtol=0, atol=1e-5)


def test_behind_the_projections_the_product_of_two_positions_is_no_longer_of_their_distance_alone() -> None:
    """Attention compares W_q p with W_k p: relative positions are something to learn, not a gift."""
    codes = position_codes(200, 64, layout="interleaved")
    plain = (codes[7:] * codes[:-7]).sum(1)
    projected = ((codes[7:] @ torch.randn(64, 64) / 8) * (codes[:-7] @ torch.randn(64, 64) / 8)).sum(1)
    assert plain.std() < 1e-3
    assert projected.std() > 1.0


def test_the_codes_need_no_training_and_exist_for_every_position() -> None:
    model = Transformer(TransformerConfig(23, 16, 2, 1, 1, 24))
    assert not any("position" in name for name, _ in model.named_parameters())
    far = model.positions(100_000, 1)
    assert torch.isfinite(far).all()
    assert rms(far) == pytest.approx(math.sqrt(0.5), rel=1e-4)


def test_a_model_trained_on_short_sentences_fails_on_longer_ones_though_their_codes_exist() -> None:
    """A small encoder learns to name the word before each word, in sentences of 4 to 16 words."""
    torch.manual_seed(0)
    config = TransformerConfig(12, 32, 2, 1, 1, 64, dropout=0.0, norm="pre")
    model = Transformer(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def words_before(num_rows: int, length: int) -> tuple[Tensor, Tensor]:
        words = torch.randint(1, 12, (num_rows, length))
        logits = model.project(model.encode(words, torch.ones_like(words, dtype=torch.bool)))
        return logits[:, 1:], words[:, :-1]

    for _ in range(120):
        logits, wanted = words_before(32, int(torch.randint(4, 17, ())))
        loss = functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        logits, wanted = words_before(64, 16)
        within = (logits.argmax(2) == wanted).float().mean()
        logits, wanted = words_before(64, 48)
        beyond = (logits.argmax(2) == wanted)[:, 16:].float().mean()
    assert within > 0.95
    assert beyond < 0.5
