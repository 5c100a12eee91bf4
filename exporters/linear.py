"""The linear layers of a graph: what every arithmetic must offer, and float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from exporters.checkpoint import Checkpoint, Float32Array, Int8Array, QuantizedWeight
from exporters.graph_builder import GraphBuilder


def quantized_weight(checkpoint: Checkpoint, name: str) -> QuantizedWeight:
    """A matrix of a checkpoint that went through `exporters.quantization.quantized`."""
    weight = checkpoint.weights[name]
    if not isinstance(weight, QuantizedWeight):
        raise TypeError(f"{name} is not quantised; pass the checkpoint through quantized() first")
    return weight


def vector(checkpoint: Checkpoint, name: str) -> Float32Array:
    """A bias or LayerNorm vector of a checkpoint."""
    weight = checkpoint.weights[name]
    if isinstance(weight, QuantizedWeight):
        raise TypeError(f"{name} is a matrix")
    return weight


class Arithmetic(Protocol):
    """How a variant multiplies by a weight matrix."""

    def linear(self, graph: GraphBuilder, x: str, names: Sequence[str], *, after_relu: bool = False) -> str:
        """``x @ W.T + b`` for layers that share their input, outputs side by side.

        Args:
            graph: graph to extend.
            x: float32 [..., in].
            names: layer names; ``NAME.weight`` [out, in] and, if it exists, ``NAME.bias`` [out].
            after_relu: the layer's input is ``relu(x)``; the variant applies it.

        Returns:
            float32 [..., sum of out].
        """
        ...

    def output_projection(self, graph: GraphBuilder, x: str) -> str:
        """Logits float32 [R, V] of x float32 [R, d] over the whole vocabulary, bias included."""
        ...

    def candidate_inputs(self, graph: GraphBuilder) -> None:
        """Declare the inputs that carry the projection restricted to N candidates."""
        ...

    def candidate_projection(self, graph: GraphBuilder, x: str) -> str:
        """Logits float32 [R, N] of x float32 [R, d] over the candidates, bias included."""
        ...

    def candidate_outputs(self, graph: GraphBuilder, candidate_ids: str) -> None:
        """In the candidates graph: gather what `candidate_inputs` declares."""
        ...


def side_by_side(
    checkpoint: Checkpoint, names: Sequence[str]
) -> tuple[str, Int8Array, Float32Array, Float32Array | None]:
    """Layers sharing an input as one: stored name, int8 [in, out], scales [out], bias [out] or None."""
    weights = [quantized_weight(checkpoint, f"{name}.weight") for name in names]
    values = np.concatenate([weight.values for weight in weights]).T
    scales = np.concatenate([np.broadcast_to(weight.scale, weight.values.shape[0]) for weight in weights])
    biases: list[Float32Array] = []
    for name, weight in zip(names, weights, strict=True):
        has_bias = f"{name}.bias" in checkpoint.weights
        biases.append(
            vector(checkpoint, f"{name}.bias") if has_bias else np.zeros(len(weight.values), np.float32)
        )
    bias = np.concatenate(biases)
    # Names are half of a graph's bytes: the first layer's, and how many more.
    stored_name = names[0] if len(names) == 1 else f"{names[0]}+{len(names) - 1}"
    return stored_name, values, scales.astype(np.float32), bias if bias.any() else None


class Float32Arithmetic:
    """Multiplies in float32 with ``int8 * scale`` weights, unpacked once when the graph is loaded."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Take the weights of a quantised checkpoint."""
        self._checkpoint = checkpoint

    def linear(self, graph: GraphBuilder, x: str, names: Sequence[str], *, after_relu: bool = False) -> str:
        """See `Arithmetic.linear`."""
        name, values, scales, bias = side_by_side(self._checkpoint, names)
        if after_relu:
            x = graph.op("Relu", x)
        weight = graph.op(
            "DequantizeLinear",
            graph.weight(f"{name}.weight", values),
            graph.weight(f"{name}.scale", scales),
            axis=1,
        )
        y = graph.op("MatMul", x, weight)
        return y if bias is None else graph.op("Add", y, graph.weight(f"{name}.bias", bias))

    def output_projection(self, graph: GraphBuilder, x: str) -> str:
        """See `Arithmetic.output_projection`."""
        embedding = quantized_weight(self._checkpoint, "embedding.weight")
        table = graph.op(
            "DequantizeLinear",
            graph.weight("embedding.weight", embedding.values),
            graph.weight("embedding.scale", embedding.scale),
            axis=0,
        )
        logits = graph.op("MatMul", x, graph.op("Transpose", table, perm=[1, 0]))
        return graph.op("Add", logits, graph.weight("output_bias", vector(self._checkpoint, "output_bias")))

    def candidate_inputs(self, graph: GraphBuilder) -> None:
        """See `Arithmetic.candidate_inputs`."""
        graph.input("candidate_weight", 1, [self._checkpoint.config.d_model, "N"])
        graph.input("candidate_output_bias", 1, ["N"])

    def candidate_projection(self, graph: GraphBuilder, x: str) -> str:
        """See `Arithmetic.candidate_projection`."""
        return graph.op("Add", graph.op("MatMul", x, "candidate_weight"), "candidate_output_bias")

    def candidate_outputs(self, graph: GraphBuilder, candidate_ids: str) -> None:
        """See `Arithmetic.candidate_outputs`."""
        values, scale, bias = gather_embedding_rows(graph, self._checkpoint, candidate_ids)
        rows = graph.op("DequantizeLinear", values, scale, axis=0)
        d_model = self._checkpoint.config.d_model
        graph.output(graph.op("Transpose", rows, perm=[1, 0]), "candidate_weight", 1, [d_model, "N"])
        graph.output(bias, "candidate_output_bias", 1, ["N"])


def gather_embedding_rows(graph: GraphBuilder, checkpoint: Checkpoint, ids: str) -> tuple[str, str, str]:
    """Rows of the tied embedding: int8 [..., d], scale [] or [...], output bias [...]."""
    embedding = quantized_weight(checkpoint, "embedding.weight")
    values = graph.op("Gather", graph.weight("embedding.weight", embedding.values), ids)
    scale = graph.weight("embedding.scale", embedding.scale)
    if embedding.scale.ndim:
        scale = graph.op("Gather", scale, ids)
    bias = graph.weight("output_bias", vector(checkpoint, "output_bias"))
    return values, scale, graph.op("Gather", bias, ids)
