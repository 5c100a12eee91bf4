"""What every importer produces and the graph builder consumes: one model's weights, framework-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from app.decoding.shortlist import Shortlist
from model.config import TransformerConfig

Float32Array = npt.NDArray[np.float32]
Int8Array = npt.NDArray[np.int8]


@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix stored as int8: ``weight = values * scale``.

    Attributes:
        values: int8 [out, in] (embedding: [V, d]).
        scale: float32 scalar array [] (per tensor) or [out] (per output row).
    """

    values: Int8Array
    scale: Float32Array

    def to_float(self) -> Float32Array:
        """The float32 matrix [out, in] that every variant and the reference compute with."""
        scale = self.scale if self.scale.ndim == 0 else self.scale[:, None]
        return (self.values.astype(np.float32) * scale).astype(np.float32)


Weight = Float32Array | QuantizedWeight


@dataclass(frozen=True)
class AlignmentHeads:
    """Which cross-attention says what a target token was translated from.

    Attributes:
        layer: decoder layer; negative counts from the last.
        heads: heads whose weights are averaged, or None for all.
    """

    layer: int = -1
    heads: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Checkpoint:
    """One trained model, as its importer read it.

    Attributes:
        config: sizes and choices.
        weights: by the parameter names of ``model.transformer.Transformer.state_dict()``;
            a linear layer's weight is [out, in], as ``torch.nn.Linear`` keeps it.
        activation_scales: for an int8 linear layer, the static quantisation step of its input
            (real value of one integer step), by the name of its weight; may be empty.
        tokenizer: the bytes of the SentencePiece model.
        unknown_id: token of text the vocabulary cannot spell.
        shortlist: which target tokens a source can need, or None.
        alignment: the attention that is returned as the alignment.
        provenance: facts for the manifest and the model card (source file names, sha256, ...).
    """

    config: TransformerConfig
    weights: Mapping[str, Weight]
    tokenizer: bytes
    activation_scales: Mapping[str, float] = field(default_factory=dict)
    shortlist: Shortlist | None = None
    unknown_id: int = 1
    alignment: AlignmentHeads = field(default_factory=AlignmentHeads)
    provenance: Mapping[str, str] = field(default_factory=dict)
