"""What docs/transformer.md says about parallel training and the table of complexities, each a test.

Operations are counted, not timed: FlopCounterMode sees every matrix product, 2 for a multiplication and a
sum. What a step costs in time is in the figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from model.config import TransformerConfig
from model.figures.complexity import saved_bytes
from model.figures.layer_types import (
    LAYER_TYPES,
    LayerType,
    RecurrentLayer,
    RestrictedSelfAttentionLayer,
    SelfAttentionLayer,
    make_layer,
)
from model.greedy import greedy
from model.layers import EncoderLayer
from model.ssru import SSRU
from model.transformer import Transformer

ModelMaker = Callable[..., Transformer]
EACH_LAYER = pytest.mark.parametrize("layer_type", LAYER_TYPES)


def operations(layer: nn.Module, n: int, d: int) -> int:
    counter = FlopCounterMode(display=False)
    with counter:
        layer(torch.randn(1, n, d))
    return counter.get_total_flops()


def longest_chain(output: Tensor) -> int:
    """Operations that must follow one another: the longest path through the autograd graph."""
    assert output.grad_fn is not None
    depth: dict[object, int] = {}
    waiting: list[object] = [output.grad_fn]
    while waiting:
        node = waiting[-1]
        before = [each for each, _ in node.next_functions if each is not None]  # type: ignore[attr-defined]
        if missing := [each for each in before if each not in depth]:
            waiting.extend(missing)
            continue
        depth[node] = 1 + max((depth[each] for each in before), default=0)
        waiting.pop()
    return depth[output.grad_fn]


def test_self_attention_costs_n_squared_d_and_its_four_projections_n_d_squared() -> None:
    """The table leaves the projections out; below n = 2 d they are the larger part."""
    n, d = 96, 32
    assert operations(make_layer("self-attention", d), n, d) == 2 * (2 * n * n * d) + 4 * (2 * n * d * d)
    n = 2 * d
    assert operations(make_layer("self-attention", d), n, d) == 2 * 4 * (2 * n * d * d)


def test_a_recurrent_layer_costs_n_d_squared() -> None:
    n, d = 24, 32
    assert operations(make_layer("recurrent", d), n, d) == 2 * (2 * n * d * d)


def test_a_convolution_costs_k_n_d_squared() -> None:
    n, d = 24, 32
    for kernel in (3, 5):
        assert operations(make_layer("convolutional", d, kernel=kernel), n, d) == kernel * 2 * n * d * d


def test_restricted_self_attention_costs_n_r_d() -> None:
    """In blocks of w keys with both neighbours: 3 w keys for each query that reaches 2 w + 1."""
    n, d, w = 96, 32, 8
    layer = make_layer("restricted self-attention", d, reach=w)
    assert operations(layer, n, d) == 2 * (2 * n * 3 * w * d) + 4 * (2 * n * d * d)


@pytest.mark.parametrize(("n", "reach"), [(12, 4), (13, 4), (3, 5), (20, 1)])
def test_restricted_self_attention_is_self_attention_with_a_band_for_a_mask(n: int, reach: int) -> None:
    layer = RestrictedSelfAttentionLayer(16, 4, reach=reach)
    x = torch.randn(2, n, 16)
    near = (torch.arange(n)[:, None] - torch.arange(n)).abs() <= reach
    expected = layer.attention(x, layer.attention.keys_values(x), near)
    assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)


@EACH_LAYER
def test_twice_the_length_costs_twice_as_much_except_for_self_attention(layer_type: LayerType) -> None:
    d = 16
    layer = make_layer(layer_type, d)
    ratio = operations(layer, 1024, d) / operations(layer, 512, d)
    expected = 4.0 if layer_type == "self-attention" else 2.0
    assert ratio == pytest.approx(expected, rel=0.08)


def test_self_attention_beats_a_recurrence_below_n_equal_d_only_if_its_projections_are_left_out() -> None:
    """n^2 d < n d^2 while n < d, says the table; all products counted, a plain recurrence has fewer."""
    d = 64
    for n, is_cheaper in ((32, True), (128, False)):
        attention = operations(make_layer("self-attention", d), n, d)
        recurrent = operations(make_layer("recurrent", d), n, d)
        assert (attention - 4 * 2 * n * d * d < recurrent) == is_cheaper
        assert attention > recurrent


def test_self_attention_keeps_n_squared_weights_for_every_head_and_the_others_nothing_of_that_order() -> None:
    d = 16
    kept: dict[tuple[str, int], int] = {}
    for layer_type in LAYER_TYPES:
        layer = make_layer(layer_type, d)
        for n in (256, 512):
            x = torch.randn(1, n, d)
            kept[layer_type, n] = saved_bytes(lambda: layer(x), parameters=list(layer.parameters()))  # noqa: B023
    assert kept["self-attention", 512] >= 4 * 4 * 512**2
    assert kept["self-attention", 512] / kept["self-attention", 256] > 3.7
    for layer_type in LAYER_TYPES[1:]:
        assert kept[layer_type, 512] / kept[layer_type, 256] == pytest.approx(2.0, rel=0.05)


def test_only_the_recurrent_layer_waits_for_the_position_before() -> None:
    d = 8
    for layer_type in LAYER_TYPES:
        layer = make_layer(layer_type, d, reach=4)
        short, long = (longest_chain(layer(torch.randn(1, n, d))) for n in (8, 32))
        if layer_type == "recurrent":
            assert long - short >= 24
        else:
            assert long == short


def first_layer_that_connects(make: Callable[[], nn.Module], n: int, d: int) -> int:
    """How many layers it takes until the last position knows of the first."""
    for depth in range(1, n + 1):
        x = torch.randn(1, n, d, dtype=torch.float64, requires_grad=True)
        y: Tensor = x
        for _ in range(depth):
            y = make().double()(y)
        (gradient,) = torch.autograd.grad(y[0, -1].sum(), x)
        if gradient[0, 0].abs().amax() > 0:
            return depth
    raise AssertionError("never connected")


def test_one_self_attention_connects_any_two_positions() -> None:
    assert first_layer_that_connects(lambda: SelfAttentionLayer(8, 2), 33, 8) == 1


def test_restricted_self_attention_needs_n_over_r_layers() -> None:
    """r counts both sides: a layer carries r/2 further, so the path is 2 (n - 1) / r, of order n / r."""
    reach = 8
    layers = first_layer_that_connects(lambda: RestrictedSelfAttentionLayer(8, 2, reach=reach), 33, 8)
    assert layers == math.ceil(32 / reach)


@pytest.mark.parametrize("kernel", [3, 5])
def test_plain_convolutions_grow_their_view_by_k_minus_1_a_layer_and_not_k_fold(kernel: int) -> None:
    """The notes give k^m; that is for dilated convolutions only."""
    layers = first_layer_that_connects(lambda: make_layer("convolutional", 4, kernel=kernel), 33, 4)
    assert layers == math.ceil(32 / (kernel // 2))


class _Dilated(nn.Module):
    def __init__(self, dilation: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(2, 2, 3, padding=dilation, dilation=dilation)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.convolution(x.transpose(1, 2)).transpose(1, 2)
        return outputs


def test_dilated_convolutions_grow_their_view_k_fold_a_layer() -> None:
    x = torch.randn(1, 41, 2, dtype=torch.float64, requires_grad=True)
    y: Tensor = x
    for depth in range(1, 5):
        y = _Dilated(3 ** (depth - 1)).double()(y)
        (gradient,) = torch.autograd.grad(y[0, 40].sum(), x, retain_graph=True)
        # The last position sees one side, itself included, of a window of 3^depth.
        assert int((gradient[0].abs().amax(1) > 0).sum()) == (3**depth + 1) // 2


def test_a_recurrent_layer_carries_the_first_position_to_the_last_in_n_minus_1_steps_within_one_layer() -> (
    None
):
    n = 9
    layer = RecurrentLayer(4)
    x = torch.randn(1, n, 4)
    step_by_step = torch.zeros(1, 1, 4)
    for t in range(n):
        _, step_by_step = layer.recurrence(x[:, t : t + 1], step_by_step)
    assert_close(layer(x)[:, -1], step_by_step[0])
    assert first_layer_that_connects(lambda: RecurrentLayer(4), n, 4) == 1


def test_training_predicts_all_positions_in_one_pass_of_constant_depth(make_model: ModelMaker) -> None:
    depths = {}
    for cell in ("attention", "ssru"):
        model = make_model(decoder_cell=cell)
        source, real = torch.randint(1, 23, (1, 4)), torch.ones(1, 4, dtype=torch.bool)
        for length in (5, 20):
            logits = model(source, real, torch.randint(1, 23, (1, length)))
            assert logits.shape == (1, length, 23)
            depths[cell, length] = longest_chain(logits)
    assert depths["attention", 20] == depths["attention", 5]
    assert depths["ssru", 20] >= depths["ssru", 5] + 15


def test_the_ssru_waits_only_for_elementwise_sums_its_matrix_products_are_parallel() -> None:
    cell = SSRU(8)
    counter = FlopCounterMode(display=False)
    with counter:
        cell.advance(torch.randn(1, 20, 8), cell.start(1))
    products = counter.get_flop_counts()["Global"]
    assert sum(products.values()) == 2 * 2 * 20 * 8 * 8
    calls: list[str] = []

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if "mm" in str(function):
                calls.append(str(function))
            return function(*args, **(kwargs or {}))

    with Seen():
        cell.advance(torch.randn(1, 20, 8), cell.start(1))
    assert len(calls) == 2


def test_translating_is_still_one_step_after_another(
    make_model: ModelMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parallelism is training's: at inference the next token waits for the one before."""
    model = make_model()
    steps = []
    step = Transformer.step

    def counted(self: Transformer, *arguments: object) -> object:
        steps.append(1)
        return step(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Transformer, "step", counted)
    source, real = torch.randint(1, 23, (1, 4)), torch.ones(1, 4, dtype=torch.bool)
    result = greedy(model, source, real, max_steps=12)[0]
    assert len(steps) == len(result.token_ids) + result.ended


def test_in_a_base_encoder_layer_the_quadratic_part_overtakes_the_rest_only_at_3072_tokens() -> None:
    """Two counts give a and b of a n + b n^2; the crossing a / b is 2 d + d_ff."""
    layer = EncoderLayer(TransformerConfig(vocabulary_size=8))
    counts = {}
    for n in (8, 16):
        counter = FlopCounterMode(display=False)
        with counter:
            layer(torch.randn(1, n, 512), torch.ones(1, 1, 1, n, dtype=torch.bool))
        counts[n] = counter.get_total_flops()
    quadratic = (counts[16] - 2 * counts[8]) / (16**2 - 2 * 8**2)
    linear = (counts[8] - quadratic * 8**2) / 8
    assert linear / quadratic == 3072
