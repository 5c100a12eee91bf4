"""Encoder and decoder layers: Vaswani et al. 2017, sections 3.1 and 3.3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn
from torch.nn import functional

from model.attention import CausalSelfAttention, KeysValues, MultiHeadAttention
from model.config import Activation, TransformerConfig
from model.ssru import SSRU

# gelu is the exact one (Hendrycks and Gimpel 2016), not its tanh approximation.
_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "silu": functional.silu,
}


class CausalSubLayer(Protocol):
    """The decoder's view of what came before: `CausalSelfAttention` or `SSRU`."""

    def start(self, num_rows: int) -> tuple[Tensor, ...]:
        """The state before the first position."""
        ...

    def advance(self, inputs: Tensor, past: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Outputs [R, T, d] of T new positions [R, T, d], and the state after them."""
        ...


class FeedForward(nn.Module):
    """Equation 2, ``FFN(x) = max(0, x W_1 + b_1) W_2 + b_2``, with a choice of non-linearity."""

    def __init__(self, config: TransformerConfig) -> None:
        """Make W_1, b_1 (``inner``) and W_2, b_2 (``outer``)."""
        super().__init__()
        self.inner = nn.Linear(config.d_model, config.ffn_size)
        self.outer = nn.Linear(config.ffn_size, config.d_model)
        self.activation = _ACTIVATIONS[config.activation]

    def forward(self, inputs: Tensor) -> Tensor:
        """Transform each position alone: [B, T, d] -> [B, T, d]."""
        hidden = self.activation(self.inner(inputs))  # [B, T, ffn_size]
        outputs: Tensor = self.outer(hidden)  # [B, T, d]
        return outputs


class ResidualLayer(nn.Module):
    """The frame around every sub-layer F, with dropout on its output (sections 3.1 and 5.4).

    Post-norm, the paper's: ``x <- LayerNorm(x + F(x))``.
    Pre-norm (Xiong et al. 2020): ``x <- x + F(LayerNorm(x))``; a stack of such layers ends with one
    more LayerNorm, which the Transformer owns.
    """

    def __init__(self, config: TransformerConfig) -> None:
        """Note where the norm goes."""
        super().__init__()
        self.pre_norm = config.norm == "pre"
        self.dropout = nn.Dropout(config.dropout)

    def enter(self, inputs: Tensor, norm: nn.LayerNorm) -> Tensor:
        """What the sub-layer sees of [B, T, d]."""
        entering: Tensor = norm(inputs) if self.pre_norm else inputs  # [B, T, d]
        return entering

    def leave(self, inputs: Tensor, outputs: Tensor, norm: nn.LayerNorm) -> Tensor:
        """Add the sub-layer's outputs [B, T, d] to what entered, [B, T, d]."""
        total: Tensor = inputs + self.dropout(outputs)  # [B, T, d]
        leaving: Tensor = total if self.pre_norm else norm(total)  # [B, T, d]
        return leaving


class EncoderLayer(ResidualLayer):
    """Self-attention, then a feed-forward network."""

    def __init__(self, config: TransformerConfig) -> None:
        """Make the two sub-layers and their norms."""
        super().__init__(config)
        self.self_attention = MultiHeadAttention(config.d_model, config.num_heads)
        self.self_norm = layer_norm(config)
        self.ffn = FeedForward(config)
        self.ffn_norm = layer_norm(config)

    def forward(self, inputs: Tensor, mask: Tensor) -> Tensor:
        """Encode [B, S, d] to [B, S, d]; the mask is bool [B, 1, 1, S], True at real tokens."""
        x = inputs  # [B, S, d]

        y = self.enter(x, self.self_norm)  # [B, S, d]
        y = self.self_attention(y, self.self_attention.keys_values(y), mask)  # [B, S, d]
        x = self.leave(x, y, self.self_norm)  # [B, S, d]

        y = self.ffn(self.enter(x, self.ffn_norm))  # [B, S, d]
        return self.leave(x, y, self.ffn_norm)  # [B, S, d]


class DecoderLayer(ResidualLayer):
    """Causal self-attention (or SSRU), attention to the source, then a feed-forward network."""

    def __init__(self, config: TransformerConfig) -> None:
        """Make the three sub-layers and their norms."""
        super().__init__(config)
        self.has_cell = config.decoder_cell == "ssru"
        # Two names for one role, because an imported checkpoint calls them so.
        if self.has_cell:
            self.cell = SSRU(config.d_model)
        else:
            self.self_attention = CausalSelfAttention(
                config.d_model,
                config.num_heads,
                num_query_heads=config.num_query_heads,
                gated=config.decoder_cell == "gated_attention",
            )
        self.self_norm = layer_norm(config)
        self.cross_attention = MultiHeadAttention(config.d_model, config.num_heads)
        self.cross_norm = layer_norm(config)
        self.ffn = FeedForward(config)
        self.ffn_norm = layer_norm(config)

    @property
    def causal(self) -> CausalSubLayer:
        """The first sub-layer, whichever it is."""
        return self.cell if self.has_cell else self.self_attention

    def forward(
        self, inputs: Tensor, past: tuple[Tensor, ...], cross: KeysValues, mask: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Decode T positions that follow those in the cache: all of a target, or one.

        Args:
            inputs: [R, T, d].
            past: this layer's cache: keys and values [R, H, P, D] each, or one cell [R, d].
            cross: keys and values of the encoded source, [R, H, S, D] each.
            mask: bool [R, 1, 1, S], True at real source tokens.

        Returns:
            The outputs [R, T, d], and the cache after the T positions.
        """
        x = inputs  # [R, T, d]

        y, present = self.causal.advance(self.enter(x, self.self_norm), past)  # [R, T, d]
        x = self.leave(x, y, self.self_norm)  # [R, T, d]

        y = self.cross_attention(self.enter(x, self.cross_norm), cross, mask)  # [R, T, d]
        x = self.leave(x, y, self.cross_norm)  # [R, T, d]

        y = self.ffn(self.enter(x, self.ffn_norm))  # [R, T, d]
        return self.leave(x, y, self.ffn_norm), present  # [R, T, d]


def layer_norm(config: TransformerConfig) -> nn.LayerNorm:
    """LayerNorm over d (Ba et al. 2016) with the model's epsilon."""
    return nn.LayerNorm(config.d_model, eps=config.layer_norm_epsilon)
