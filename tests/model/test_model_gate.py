"""The gate on a self-attention's heads, and several queries for each key."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.testing import assert_close

from model.attention import CausalSelfAttention
from model.config import TransformerConfig

ConfigMaker = Callable[..., TransformerConfig]


def test_each_feature_of_each_head_passes_as_far_as_its_gate_is_open() -> None:
    attention = CausalSelfAttention(12, 3, num_query_heads=6, gated=True)
    assert attention.gate is not None
    inputs = torch.randn(2, 5, 12)
    outputs, _ = attention.advance(inputs, attention.start(2))
    for row in range(2):
        for t in range(5):
            seen, heads = inputs[row, : t + 1], []
            for head in range(6):
                query = attention.query(inputs[row, t])[4 * head : 4 * head + 4]
                shared = slice(4 * (head // 2), 4 * (head // 2) + 4)  # two queries for each key and value
                weights = (attention.key(seen)[:, shared] @ query / 2.0).softmax(dim=0)  # sqrt(4)
                heads.append(weights @ attention.value(seen)[:, shared])
            opened = 1 / (1 + torch.exp(-attention.gate(inputs[row, t])))
            assert_close(outputs[row, t], attention.output(torch.cat(heads) * opened))


def test_a_gate_that_is_wide_open_is_no_gate() -> None:
    gated = CausalSelfAttention(12, 3, gated=True)
    assert gated.gate is not None
    torch.nn.init.zeros_(gated.gate.weight)
    torch.nn.init.constant_(gated.gate.bias, 100.0)
    plain = CausalSelfAttention(12, 3)
    plain.load_state_dict({k: v for k, v in gated.state_dict().items() if not k.startswith("gate")})
    inputs = torch.randn(2, 5, 12)
    assert_close(gated.advance(inputs, gated.start(2))[0], plain.advance(inputs, plain.start(2))[0])


def test_the_cache_does_not_grow_with_the_queries() -> None:
    attention = CausalSelfAttention(12, 3, num_query_heads=6, gated=True)
    _, present = attention.advance(torch.randn(3, 5, 12), attention.start(3))
    assert [tuple(each.shape) for each in present] == [(3, 3, 5, 4)] * 2


@pytest.mark.parametrize("num_query_heads", [0, 2, 6])
def test_queries_that_no_key_can_share_are_refused(num_query_heads: int) -> None:
    with pytest.raises(ValueError, match=f"{num_query_heads} queries are no multiple of 4 keys"):
        CausalSelfAttention(12, 4, num_query_heads=num_query_heads)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder_query_heads": 0}, "decoder_query_heads is 0 with num_heads 4"),
        ({"decoder_query_heads": 6}, "it must be a multiple of num_heads"),
        ({"decoder_query_heads": 4, "decoder_cell": "ssru"}, "a recurrence has none: leave it out there"),
    ],
)
def test_heads_that_cannot_be_are_refused(
    make_config: ConfigMaker, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(**changes)
    assert make_config().num_query_heads == make_config().num_heads
    assert make_config(decoder_query_heads=8).num_query_heads == 8
