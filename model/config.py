"""The sizes and choices that define one Transformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["relu", "gelu", "silu"]
NormPlacement = Literal["post", "pre"]
PositionLayout = Literal["interleaved", "halves"]
DecoderCell = Literal["attention", "gated_attention", "ssru"]


@dataclass(frozen=True)
class TransformerConfig:
    """Hyperparameters of an encoder-decoder Transformer.

    The defaults are the base model of Vaswani et al. 2017, table 3.

    Attributes:
        vocabulary_size: V, joint for source, target and the tied output projection.
        d_model: width of every layer's input and output.
        num_heads: H; ``d_model`` must be a multiple of it.
        encoder_layers: number of encoder layers.
        decoder_layers: number of decoder layers, L in the cache's shapes.
        ffn_size: inner width of the position-wise feed-forward network.
        activation: non-linearity of the feed-forward network.
        norm: LayerNorm after the residual sum ("post", the paper) or before the sub-layer ("pre").
        positions: sine and cosine interleaved (the paper) or as two halves (Marian).
        decoder_cell: causal self-attention (the paper), the same with a gate on its heads (Qiu et al. 2025),
            or the SSRU recurrence (Kim et al. 2019).
        decoder_query_heads: queries of the decoder's self-attention, a multiple of ``num_heads``; each of its
            ``num_heads`` keys and values is for a group of them (Ainslie et al. 2023). None: ``num_heads``.
        dropout: probability, applied to embeddings and to every sub-layer's output.
        layer_norm_epsilon: added to the variance.
        eos_id: token that ends source and target.
        start_id: token the decoder starts from; None starts from a zero embedding (Marian).
    """

    vocabulary_size: int
    d_model: int = 512
    num_heads: int = 8
    encoder_layers: int = 6
    decoder_layers: int = 6
    ffn_size: int = 2048
    activation: Activation = "relu"
    norm: NormPlacement = "post"
    positions: PositionLayout = "interleaved"
    decoder_cell: DecoderCell = "attention"
    decoder_query_heads: int | None = None
    dropout: float = 0.1
    layer_norm_epsilon: float = 1e-6
    eos_id: int = 0
    start_id: int | None = None

    def __post_init__(self) -> None:
        """Refuse sizes no model can have."""
        for name in (
            "vocabulary_size",
            "d_model",
            "num_heads",
            "encoder_layers",
            "decoder_layers",
            "ffn_size",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.d_model % self.num_heads or self.d_model % 2:
            raise ValueError(
                f"d_model is {self.d_model}; it must be even and a multiple of num_heads ({self.num_heads})"
            )
        heads = self.decoder_query_heads
        if heads is not None and (heads < 1 or heads % self.num_heads or self.decoder_cell == "ssru"):
            raise ValueError(
                f"decoder_query_heads is {heads} with num_heads {self.num_heads} and decoder_cell "
                f"{self.decoder_cell!r}; it must be a multiple of num_heads, and a recurrence has none: "
                "leave it out there"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is {self.dropout}; it must be in [0, 1)")

    @property
    def head_size(self) -> int:
        """D, the width of one attention head."""
        return self.d_model // self.num_heads

    @property
    def num_query_heads(self) -> int:
        """Of the decoder's self-attention."""
        return self.num_heads if self.decoder_query_heads is None else self.decoder_query_heads
