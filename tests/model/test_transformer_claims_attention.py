"""What docs/transformer.md says about attention, each sentence a test: retrieval, dot products, scaling."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from model.attention import KeysValues, MultiHeadAttention, scaled_dot_product_attention
from model.figures.complexity import saved_bytes
from model.figures.scaling import jacobian_norm, measure_saturation

ALL = torch.ones(1, 1, dtype=torch.bool)


def look(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One head: queries [T, D], keys [S, D], values [S, D] -> [T, D]."""
    attended = KeysValues(keys[None, None], values[None, None])
    return scaled_dot_product_attention(queries[None, None], attended, ALL)[0, 0]


def products_of(function: object) -> int:
    """Floating point operations of the matrix products in a computation, 2 for a multiplication and sum."""
    counter = FlopCounterMode(display=False)
    with counter:
        function()  # type: ignore[operator]
    return counter.get_total_flops()


def test_attention_is_similarity_then_softmax_then_a_weighted_sum() -> None:
    queries, keys, values = torch.randn(3, 8), torch.randn(5, 8), torch.randn(5, 8)
    for t in range(3):
        scores = [float(queries[t] @ keys[s]) / math.sqrt(8) for s in range(5)]
        total = sum(math.exp(score) for score in scores)
        expected = sum((math.exp(scores[s]) / total) * values[s] for s in range(5))
        assert_close(look(queries, keys, values)[t], expected)


def test_the_answer_is_a_mixture_of_all_values_and_not_the_best_one() -> None:
    """A search engine returns documents; attention returns a point between them."""
    queries, keys, values = torch.randn(4, 8), torch.randn(6, 8), torch.randn(6, 8)
    answer = look(queries, keys, values)
    assert (answer >= values.amin(0) - 1e-6).all()
    assert (answer <= values.amax(0) + 1e-6).all()
    assert torch.cdist(answer, values).amin() > 0.1


def test_attention_becomes_a_lookup_as_the_scores_grow() -> None:
    keys = torch.eye(6)
    values = torch.randn(6, 6)
    sharp = look(1000.0 * keys, keys, values)
    assert_close(sharp, values)


def test_equal_scores_give_the_plain_average() -> None:
    values = torch.randn(5, 8)
    assert_close(look(torch.zeros(1, 8), torch.randn(5, 8), values)[0], values.mean(0))


def test_softmax_weights_are_positive_and_sum_to_one() -> None:
    weights = torch.randn(100, 7).mul(5).softmax(1)
    assert (weights > 0).all()
    assert_close(weights.sum(1), torch.ones(100))


def test_softmax_sees_only_differences_so_99_and_100_are_as_far_apart_as_0_and_1() -> None:
    """The size of the scores is no harm; the size of their differences is."""
    low, high = torch.tensor([0.0, 1.0]).softmax(0), torch.tensor([99.0, 100.0]).softmax(0)
    assert_close(low, high)
    assert high[1] / high[0] == pytest.approx(math.e, rel=1e-4)


def test_equal_directions_have_a_large_orthogonal_ones_no_and_opposite_ones_a_negative_product() -> None:
    query = torch.tensor([1.0, 2.0])
    assert query @ query == 5.0
    assert query @ torch.tensor([-2.0, 1.0]) == 0.0
    assert query @ -query == -5.0


def test_a_long_key_beats_a_better_directed_one() -> None:
    """The dot product is the cosine times both lengths: similarity of direction is not all of it."""
    query, aligned = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.0])
    askew = 3.0 * torch.tensor([math.cos(math.pi / 3), math.sin(math.pi / 3)])
    assert query @ askew > query @ aligned
    assert torch.cosine_similarity(query, askew, dim=0) < torch.cosine_similarity(query, aligned, dim=0)


def test_cosine_and_euclid_need_the_same_matrix_product_and_only_n_norms_more() -> None:
    """All three are O(D) a pair: the dot product is simpler, not of a lower order."""
    n, d = 64, 32
    queries, keys = torch.randn(n, d), torch.randn(n, d)
    products = queries @ keys.T
    query_norms, key_norms = queries.norm(dim=1), keys.norm(dim=1)
    cosine = torch.cosine_similarity(queries[:, None], keys[None], dim=2)
    assert_close(products / query_norms[:, None] / key_norms, cosine)
    squared = query_norms[:, None].square() + key_norms.square() - 2 * products
    assert_close(squared, torch.cdist(queries, keys).square(), rtol=1e-4, atol=1e-3)
    assert products_of(lambda: queries @ keys.T) == 2 * n * n * d  # for each of the three


def test_softmax_over_negative_half_squared_distances_is_dot_product_attention_with_a_fine_on_long_keys() -> (
    None
):
    queries, keys = torch.randn(4, 8), torch.randn(6, 8)
    by_distance = (-torch.cdist(queries, keys).square() / 2).softmax(1)
    by_product = (queries @ keys.T - keys.square().sum(1) / 2).softmax(1)
    assert_close(by_distance, by_product, rtol=1e-4, atol=1e-5)


def additive_scores(queries: Tensor, keys: Tensor, direction: Tensor) -> Tensor:
    """Bahdanau et al. 2015 after the projections: v . tanh(q + k), [T, S]."""
    return torch.tanh(queries[:, None] + keys[None]) @ direction


def test_additive_attention_keeps_d_times_as_much_memory() -> None:
    n, d = 64, 32
    queries, keys = torch.randn(n, d, requires_grad=True), torch.randn(n, d, requires_grad=True)
    direction = torch.randn(d, requires_grad=True)
    leaves = [queries, keys, direction]
    dot = saved_bytes(lambda: (queries @ keys.T).softmax(1), parameters=leaves)
    additive = saved_bytes(lambda: additive_scores(queries, keys, direction).softmax(1), parameters=leaves)
    assert dot == 4 * n * n
    assert additive == 4 * n * n * (d + 1)


def test_additive_attention_has_only_one_vector_more_than_multi_head_attention() -> None:
    """W_q and W_k are no extra: the Transformer projects queries and keys too."""
    d = 32
    additive = 2 * d * d + d  # W_q, W_k, v
    attention = MultiHeadAttention(d, 1)
    assert additive - attention.query.weight.numel() - attention.key.weight.numel() == d


def test_additive_scores_do_not_grow_with_the_width_as_unscaled_dot_products_do() -> None:
    """Why additive attention was the better one until the division by sqrt(D) came (section 3.2.1)."""
    deviations = {}
    for d in (4, 1024):
        queries, keys = torch.randn(200, d), torch.randn(200, d)
        direction = torch.randn(d) / math.sqrt(d)
        deviations[d] = (
            float(additive_scores(queries, keys, direction).std()),
            float((queries @ keys.T).std()),
        )
    assert deviations[1024][0] < 2 * deviations[4][0]
    assert deviations[1024][1] > 12 * deviations[4][1]


@pytest.mark.parametrize("head_size", [16, 64, 256])
def test_a_dot_product_has_mean_zero_and_variance_d_and_the_division_makes_it_one(head_size: int) -> None:
    products = (torch.randn(40_000, head_size) * torch.randn(40_000, head_size)).sum(1)
    assert products.mean().abs() < 0.05 * math.sqrt(head_size)
    assert float(products.var()) == pytest.approx(head_size, rel=0.05)
    assert float((products / math.sqrt(head_size)).var()) == pytest.approx(1.0, rel=0.05)


def test_without_the_division_the_softmax_saturates_and_its_gradient_fades() -> None:
    raw = {d: measure_saturation(d, scaled=False) for d in (64, 1024)}
    scaled = {d: measure_saturation(d, scaled=True) for d in (64, 1024)}
    assert raw[64].largest_weight > 0.75
    assert raw[1024].largest_weight > 0.9
    assert raw[1024].gradient_norm < 0.5 * raw[64].gradient_norm
    assert raw[1024].gradient_norm < 0.33 * scaled[1024].gradient_norm
    for row in scaled.values():
        assert row.largest_weight < 0.25
    assert scaled[1024].gradient_norm == pytest.approx(scaled[64].gradient_norm, rel=0.05)


def test_the_jacobian_of_softmax_is_what_autograd_says_and_never_large() -> None:
    """Nothing explodes behind a softmax: its Jacobian's norm is at most 1/2 for two keys, below 1 for any."""
    scores = torch.randn(50, 6, dtype=torch.float64) * 4
    for row in scores:
        jacobian = torch.autograd.functional.jacobian(lambda x: x.softmax(0), row)
        expected = torch.linalg.matrix_norm(jacobian)
        assert_close(jacobian_norm(row.softmax(0)), expected)
        assert expected <= 0.5 + 1e-9


def test_softmax_does_not_overflow_however_large_the_scores() -> None:
    """Overflow is not the reason for the division: softmax subtracts the largest score first."""
    scores = torch.tensor([1e30, 0.0, -1e30])
    assert torch.exp(scores)[0] == math.inf
    assert scores.softmax(0).tolist() == [1.0, 0.0, 0.0]
    half = torch.tensor([6e4, 0.0], dtype=torch.float16)
    assert half.softmax(0).tolist() == [1.0, 0.0]


def test_what_is_divided_by_is_the_head_size_and_not_the_models_width() -> None:
    """512 is d_model; a head of the base model has D = 512 / 8 = 64."""
    d_model, num_heads = 64, 8
    attention = MultiHeadAttention(d_model, num_heads)
    x = torch.randn(1, 5, d_model)
    keys, values = (part[0] for part in attention.keys_values(x))  # [H, S, D]
    queries = attention.query(x)[0].view(5, num_heads, 8).transpose(0, 1)  # [H, T, D]
    outputs = {}
    for divisor in (8, 64):
        heads = (queries @ keys.transpose(1, 2) / math.sqrt(divisor)).softmax(2) @ values  # [H, T, D]
        outputs[divisor] = attention.output(heads.transpose(0, 1).flatten(1))
    actual = attention(x, attention.keys_values(x), ALL)[0]
    assert_close(actual, outputs[8])
    assert (actual - outputs[64]).abs().amax() > 1e-3


def test_at_initialisation_the_scores_of_normalised_inputs_really_have_variance_one() -> None:
    d_model, num_heads = 256, 4
    attention = MultiHeadAttention(d_model, num_heads)
    torch.nn.init.xavier_uniform_(attention.query.weight)
    torch.nn.init.xavier_uniform_(attention.key.weight)
    x = torch.nn.functional.layer_norm(torch.randn(1, 200, d_model), (d_model,))
    queries = attention.query(x).view(1, 200, num_heads, 64).transpose(1, 2)
    scores = queries @ attention.keys_values(x).keys.transpose(2, 3) / math.sqrt(64)
    assert float(scores.detach().var()) == pytest.approx(1.0, rel=0.1)


def test_without_positions_attention_treats_a_sentence_as_a_bag_of_words() -> None:
    attention = MultiHeadAttention(16, 4)
    x = torch.randn(1, 6, 16)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    shuffled = x[:, order]
    straight = attention(x, attention.keys_values(x), ALL)
    assert_close(attention(shuffled, attention.keys_values(shuffled), ALL), straight[:, order])
