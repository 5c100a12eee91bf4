"""The four layers of table 1 of Vaswani et al. 2017, all [B, n, d] -> [B, n, d], to be measured side by side.

Self-attention is the model's own; the other three are the plainest ones of their kind.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from model.attention import MultiHeadAttention

LayerType = Literal["self-attention", "restricted self-attention", "recurrent", "convolutional"]
LAYER_TYPES: tuple[LayerType, ...] = get_args(LayerType)


class SelfAttentionLayer(nn.Module):
    """Everyone looks at everyone: n^2 d for the attention, and n d^2 for its four projections."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        """Take the model's own attention."""
        super().__init__()
        self.attention = MultiHeadAttention(d_model, num_heads)

    def forward(self, inputs: Tensor) -> Tensor:
        """[B, n, d] -> [B, n, d]."""
        mask = torch.ones(1, 1, dtype=torch.bool, device=inputs.device)  # [1, 1], all may look
        outputs: Tensor = self.attention(inputs, self.attention.keys_values(inputs), mask)  # [B, n, d]
        return outputs


class RestrictedSelfAttentionLayer(SelfAttentionLayer):
    """Everyone looks at the ``reach`` positions on either side: n r d, r = 2 * reach + 1.

    Queries go in blocks of ``reach``; the keys of a block are its own and those of the blocks beside it
    (Beltagy et al. 2020, "Longformer", section 3.2). No n x n matrix is ever made.
    """

    def __init__(self, d_model: int, num_heads: int, *, reach: int) -> None:
        """Take the model's own projections and note the reach, at least 1."""
        super().__init__(d_model, num_heads)
        self.reach = reach

    def forward(self, inputs: Tensor) -> Tensor:
        """[B, n, d] -> [B, n, d]."""
        attention, w, n = self.attention, self.reach, inputs.shape[1]
        num_blocks = math.ceil(n / w)  # N
        padded = functional.pad(attention.query(inputs), (0, 0, 0, num_blocks * w - n))  # [B, N*w, d]
        queries = padded.view(inputs.shape[0], num_blocks, w, -1)  # [B, N, w, d]
        keys = self._windows(attention.key(inputs), num_blocks)  # [B, N, 3w, d]
        values = self._windows(attention.value(inputs), num_blocks)  # [B, N, 3w, d]

        queries, keys, values = (self._split(x) for x in (queries, keys, values))  # [B, N, H, w or 3w, D]
        scores = queries @ keys.transpose(3, 4) / math.sqrt(queries.shape[4])  # [B, N, H, w, 3w]
        weights = scores.masked_fill(~self._mask(num_blocks, n), -math.inf).softmax(4)  # [B, N, H, w, 3w]
        heads = weights @ values  # [B, N, H, w, D]
        outputs: Tensor = attention.output(heads.transpose(2, 3).flatten(3).flatten(1, 2)[:, :n])  # [B, n, d]
        return outputs

    def _windows(self, projected: Tensor, num_blocks: int) -> Tensor:
        """Each block with its neighbours: [B, n, d] -> [B, N, 3w, d], zeros beyond the ends."""
        w, n = self.reach, projected.shape[1]
        padded = functional.pad(projected, (0, 0, w, (num_blocks + 1) * w - n))  # [B, (N+2)*w, d]
        return padded.unfold(1, 3 * w, w).transpose(2, 3)  # [B, N, 3w, d]

    def _mask(self, num_blocks: int, n: int) -> Tensor:
        """Bool [N, 1, w, 3w]: True where a key exists and is in reach; a padded query sees itself."""
        w = self.reach
        blocks = torch.arange(num_blocks)[:, None, None] * w  # [N, 1, 1]
        query_at = blocks + torch.arange(w)[:, None]  # [N, w, 1]
        key_at = blocks - w + torch.arange(3 * w)  # [N, 1, 3w]
        near = (query_at - key_at).abs() <= w  # [N, w, 3w]
        exists = (key_at >= 0) & (key_at < n)  # [N, 1, 3w]
        return ((near & exists) | (query_at == key_at))[:, None]  # [N, 1, w, 3w]

    def _split(self, projected: Tensor) -> Tensor:
        """Cut [B, N, w, d] into heads, [B, N, H, w, D]."""
        heads = projected.reshape(*projected.shape[:3], self.attention.num_heads, -1)  # [B, N, w, H, D]
        return heads.transpose(2, 3)


class RecurrentLayer(nn.Module):
    """h_t = tanh(W x_t + U h_{t-1} + b), one position after another: n d^2."""

    def __init__(self, d_model: int) -> None:
        """Take PyTorch's, whose loop over positions is not in Python."""
        super().__init__()
        self.recurrence = nn.RNN(d_model, d_model, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        """[B, n, d] -> [B, n, d]."""
        outputs: Tensor = self.recurrence(inputs)[0]  # [B, n, d]
        return outputs


class ConvolutionalLayer(nn.Module):
    """A kernel of k neighbours slides over the sequence: k n d^2."""

    def __init__(self, d_model: int, *, kernel: int) -> None:
        """Make the convolution; ``kernel`` is odd, so that the length stays n."""
        super().__init__()
        self.convolution = nn.Conv1d(d_model, d_model, kernel, padding=kernel // 2)

    def forward(self, inputs: Tensor) -> Tensor:
        """[B, n, d] -> [B, n, d]."""
        outputs: Tensor = self.convolution(inputs.transpose(1, 2)).transpose(1, 2)  # [B, n, d]
        return outputs


def make_layer(
    layer_type: LayerType, d_model: int, *, num_heads: int = 4, reach: int = 16, kernel: int = 3
) -> nn.Module:
    """Make a layer of one type.

    Args:
        layer_type: which of the four.
        d_model: d.
        num_heads: H of both self-attentions.
        reach: positions on either side that restricted self-attention sees.
        kernel: k of the convolution, odd.
    """
    if layer_type == "self-attention":
        return SelfAttentionLayer(d_model, num_heads)
    if layer_type == "restricted self-attention":
        return RestrictedSelfAttentionLayer(d_model, num_heads, reach=reach)
    if layer_type == "recurrent":
        return RecurrentLayer(d_model)
    return ConvolutionalLayer(d_model, kernel=kernel)
