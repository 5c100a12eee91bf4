"""Multi-head scaled dot-product attention: Vaswani et al. 2017, section 3.2.

A mask is bool and True where a query may look: [B, 1, 1, S] for padding, [T, S] for causality, or
anything else that broadcasts to the scores [B, H, T, S].
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn


class KeysValues(NamedTuple):
    """What attention looks at: both [B, H, S, D], B rows of S positions."""

    keys: Tensor
    values: Tensor


def padding_mask(real: Tensor) -> Tensor:
    """Turn bool [B, S], True at real tokens, into the mask [B, 1, 1, S] for all heads and queries."""
    return real[:, None, None, :]


def causal_mask(num_queries: int, num_keys: int, *, device: torch.device) -> Tensor:
    """Let each query see the keys up to its own position (section 3.2.3).

    The queries are the last T of the S positions, so that cached decoding uses the same mask:
    query t stands at position S - T + t.

    Returns:
        bool [T, S], True where key s <= S - T + t.
    """
    everything = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)  # [T, S]
    return everything.tril(diagonal=num_keys - num_queries)  # [T, S]


def scaled_dot_product_attention(queries: Tensor, attended: KeysValues, mask: Tensor) -> Tensor:
    """Equation 1: ``softmax(Q K^T / sqrt(D)) V``, with -inf for illegal connections.

    Args:
        queries: [B, H, T, D].
        attended: keys and values, [B, H, S, D] each.
        mask: bool, broadcasts to [B, H, T, S]. A query that may look nowhere gets NaN, because a
            softmax over nothing is undefined.

    Returns:
        [B, H, T, D].
    """
    scores = queries @ attended.keys.transpose(2, 3) / math.sqrt(queries.shape[3])  # [B, H, T, S]
    weights = scores.masked_fill(~mask, -math.inf).softmax(dim=3)  # [B, H, T, S]
    return weights @ attended.values  # [B, H, T, D]


class MultiHeadAttention(nn.Module):
    """Section 3.2.2: ``MultiHead(Q, K, V) = Concat(head_1, ..., head_H) W^O``.

    The H projections of one kind are one d x d matrix (d = H * D); head h owns outputs h*D to
    (h+1)*D-1. All four have a bias, which the paper leaves open and both Marian and PyTorch have.

    There may be more queries than keys and values: then heads h*G to (h+1)*G-1 look at the h-th of those
    (Ainslie et al. 2023, "GQA: Training Generalized Multi-Query Transformer Models").

    With a gate, ``Concat(...) * sigmoid(W^G x + b^G)`` stands in the place of the concatenation, x being what
    the queries come from (Qiu et al. 2025, "Gated Attention for Large Language Models", element-wise at the
    position G1): each feature of each head passes as far as the looking position lets it.
    """

    def __init__(
        self, d_model: int, num_heads: int, *, num_query_heads: int | None = None, gated: bool = False
    ) -> None:
        """Make W^Q, W^K, W^V, W^O and, with a gate, W^G.

        Args:
            d_model: width of inputs and outputs, a multiple of ``num_heads``.
            num_heads: H, of keys and values.
            num_query_heads: G * H; None: H.
            gated: whether there is a gate.

        Raises:
            ValueError: the queries are no multiple of the keys.
        """
        super().__init__()
        if num_query_heads is None:
            num_query_heads = num_heads
        if num_query_heads < 1 or num_query_heads % num_heads:
            raise ValueError(f"{num_query_heads} queries are no multiple of {num_heads} keys and values")
        self.num_heads = num_heads
        self.group_size = num_query_heads // num_heads
        width = self.group_size * d_model
        self.query = nn.Linear(d_model, width)
        self.key = nn.Linear(d_model, d_model)
        self.value = nn.Linear(d_model, d_model)
        self.gate = nn.Linear(d_model, width) if gated else None
        self.output = nn.Linear(width, d_model)

    def keys_values(self, attended: Tensor) -> KeysValues:
        """Project what is looked at, [B, S, d], to keys and values [B, H, S, D]."""
        return KeysValues(
            self._split(self.key(attended), self.num_heads), self._split(self.value(attended), self.num_heads)
        )

    def queries(self, inputs: Tensor) -> Tensor:
        """Project what looks, [B, T, d], to queries [B, G*H, T, D]."""
        return self._split(self.query(inputs), self.group_size * self.num_heads)

    def for_every_query(self, attended: KeysValues) -> KeysValues:
        """Keys and values [B, H, S, D] repeated for each head that looks at them, [B, G*H, S, D]."""
        if self.group_size == 1:
            return attended
        return KeysValues(*(each.repeat_interleave(self.group_size, dim=1) for each in attended))

    def forward(self, inputs: Tensor, attended: KeysValues, mask: Tensor) -> Tensor:
        """Look from each input at the attended positions.

        Args:
            inputs: [B, T, d], the source of the queries.
            attended: keys and values, [B, H, S, D] each.
            mask: bool, broadcasts to [B, H, T, S].

        Returns:
            [B, T, d].
        """
        heads = scaled_dot_product_attention(
            self.queries(inputs), self.for_every_query(attended), mask
        )  # [B, G*H, T, D]
        concatenated = heads.transpose(1, 2).flatten(2)  # [B, T, G*H, D] -> [B, T, G*d]
        if self.gate is not None:
            concatenated = concatenated * torch.sigmoid(self.gate(inputs))  # [B, T, G*d]
        projected: Tensor = self.output(concatenated)  # [B, T, d]
        return projected

    @staticmethod
    def _split(projected: Tensor, num_heads: int) -> Tensor:
        """Cut [B, T, n * D] into n heads, [B, n, T, D]."""
        heads = projected.view(*projected.shape[:2], num_heads, -1)  # [B, T, n, D]
        return heads.transpose(1, 2)  # [B, n, T, D]


class CausalSelfAttention(MultiHeadAttention):
    """Self-attention that never looks ahead, continued from the positions before (section 3.2.3)."""

    def start(self, num_rows: int) -> KeysValues:
        """The cache before the first position: keys and values [R, H, 0, D]."""
        shape = (num_rows, self.num_heads, 0, self.key.out_features // self.num_heads)
        empty = self.key.weight.new_zeros(shape)  # [R, H, 0, D]
        return KeysValues(empty, empty)

    def advance(self, inputs: Tensor, past: tuple[Tensor, ...]) -> tuple[Tensor, KeysValues]:
        """Attend from T new positions to the P cached ones and causally to each other.

        Args:
            inputs: [R, T, d].
            past: keys and values of the positions before, [R, H, P, D] each.

        Returns:
            The outputs [R, T, d], and the keys and values [R, H, P+T, D] to continue from.
        """
        past_keys, past_values = past  # [R, H, P, D] each
        new = self.keys_values(inputs)  # [R, H, T, D] each
        present = KeysValues(
            torch.cat([past_keys, new.keys], dim=2),  # [R, H, P+T, D]
            torch.cat([past_values, new.values], dim=2),  # [R, H, P+T, D]
        )
        mask = causal_mask(inputs.shape[1], present.keys.shape[2], device=inputs.device)  # [T, P+T]
        return self(inputs, present, mask), present
