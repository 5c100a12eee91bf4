"""The linear layers of a graph, in the arithmetic of the variant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from exporters.checkpoint import Checkpoint, Float32Array, Int8Array, QuantizedWeight
from exporters.graph_builder import INT32, MICROSOFT, UINT8, GraphBuilder

_ZERO_POINT = 128
"""Activations are stored as uint8 around 128, as Marian's "shifted" int8 does."""


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


def _side_by_side(
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
    return "+".join(names), values, scales.astype(np.float32), bias if bias.any() else None


class Float32Arithmetic:
    """Multiplies in float32 with ``int8 * scale`` weights, unpacked once when the graph is loaded."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Take the weights of a quantised checkpoint."""
        self._checkpoint = checkpoint

    def linear(self, graph: GraphBuilder, x: str, names: Sequence[str], *, after_relu: bool = False) -> str:
        """See `Arithmetic.linear`."""
        name, values, scales, bias = _side_by_side(self._checkpoint, names)
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


class Int8Arithmetic:
    """Multiplies uint8 activations by int8 weights; no scale ever depends on the batch.

    A layer with a known activation scale (Marian's alphas, or calibration) quantises its input with
    that constant; any other layer scales each row by the row's own largest value.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Take the weights and activation scales of a quantised checkpoint."""
        self._checkpoint = checkpoint
        self._activation_scales: Mapping[str, float] = checkpoint.activation_scales

    def linear(self, graph: GraphBuilder, x: str, names: Sequence[str], *, after_relu: bool = False) -> str:
        """See `Arithmetic.linear`; layers whose activation scales differ are multiplied one by one."""
        scales = {self._activation_scales.get(f"{name}.weight") for name in names}
        if len(scales) > 1:
            parts = [self.linear(graph, x, [name], after_relu=after_relu) for name in names]
            return graph.op("Concat", *parts, axis=-1)
        name, values, weight_scales, bias = _side_by_side(self._checkpoint, names)
        return self._multiply(
            graph,
            x,
            graph.weight(f"{name}.weight", values),
            graph.weight(f"{name}.scale", weight_scales),
            None if bias is None else graph.weight(f"{name}.bias", bias),
            activation_scale=scales.pop(),
            after_relu=after_relu,
        )

    def output_projection(self, graph: GraphBuilder, x: str) -> str:
        """See `Arithmetic.output_projection`."""
        embedding = quantized_weight(self._checkpoint, "embedding.weight")
        # Turned over once, when the runtime folds constants: the file keeps one copy of the table.
        weight = graph.op("Transpose", graph.weight("embedding.weight", embedding.values), perm=[1, 0])
        return self._multiply(
            graph,
            x,
            weight,
            graph.weight("embedding.scale", embedding.scale),
            graph.weight("output_bias", vector(self._checkpoint, "output_bias")),
            activation_scale=self._activation_scales.get("embedding.weight"),
        )

    def candidate_inputs(self, graph: GraphBuilder) -> None:
        """See `Arithmetic.candidate_inputs`."""
        graph.input("candidate_weight", UINT8, [self._checkpoint.config.d_model, "N"])
        if quantized_weight(self._checkpoint, "embedding.weight").scale.ndim:
            graph.input("candidate_scale", 1, ["N"])
        graph.input("candidate_output_bias", 1, ["N"])

    def candidate_projection(self, graph: GraphBuilder, x: str) -> str:
        """See `Arithmetic.candidate_projection`."""
        scale = quantized_weight(self._checkpoint, "embedding.weight").scale
        return self._multiply(
            graph,
            x,
            "candidate_weight",
            "candidate_scale" if scale.ndim else graph.constant(scale),
            "candidate_output_bias",
            activation_scale=self._activation_scales.get("embedding.weight"),
            weight_zero_point=_ZERO_POINT,
        )

    def candidate_outputs(self, graph: GraphBuilder, candidate_ids: str) -> None:
        """See `Arithmetic.candidate_outputs`.

        The weight leaves as uint8 around 128. Without VNNI the CPU's uint8 x int8 kernel saturates; for
        weights known at load the session option in app/runtime/onnx_model.py makes them unsigned, but
        these are not.
        """
        values, scale, bias = gather_embedding_rows(graph, self._checkpoint, candidate_ids)
        d_model = self._checkpoint.config.d_model
        shifted = graph.op("Add", graph.op("Cast", values, to=INT32), graph.constant(np.int32(_ZERO_POINT)))
        weight = graph.op("Transpose", graph.op("Cast", shifted, to=UINT8), perm=[1, 0])
        graph.output(weight, "candidate_weight", UINT8, [d_model, "N"])
        if quantized_weight(self._checkpoint, "embedding.weight").scale.ndim:
            graph.output(scale, "candidate_scale", 1, ["N"])
        graph.output(bias, "candidate_output_bias", 1, ["N"])

    def _multiply(
        self,
        graph: GraphBuilder,
        x: str,
        weight: str,
        weight_scale: str,
        bias: str | None,
        *,
        activation_scale: float | None,
        after_relu: bool = False,
        weight_zero_point: int | None = None,
    ) -> str:
        """``x @ weight`` with int8 weights, or uint8 ones around `weight_zero_point`."""
        weight_zero = "" if weight_zero_point is None else graph.constant(np.uint8(weight_zero_point))
        if activation_scale is None:
            return self._multiply_by_row_scale(
                graph, graph.op("Relu", x) if after_relu else x, weight, weight_scale, bias, weight_zero
            )
        zero_point = _ZERO_POINT
        if after_relu:
            # relu(x) >= 0: with zero point 0 the same range has twice as many steps, and
            # quantisation itself clips the negative values.
            activation_scale, zero_point = activation_scale * 127 / 255, 0
        step = graph.constant(np.float32(activation_scale))
        zero = graph.constant(np.uint8(zero_point))
        quantized_x = graph.op("QuantizeLinear", x, step, zero)
        inputs = [quantized_x, weight, step, weight_scale, zero, weight_zero, *([bias] if bias else [])]
        return graph.op("MatMulIntegerToFloat", *inputs, domain=MICROSOFT)

    @staticmethod
    def _multiply_by_row_scale(
        graph: GraphBuilder, x: str, weight: str, weight_scale: str, bias: str | None, weight_zero: str
    ) -> str:
        largest = graph.op("ReduceMax", graph.op("Abs", x), graph.ints(-1), keepdims=1)
        row_scale = graph.op(
            "Mul",
            graph.op("Max", largest, graph.constant(np.float32(1e-9))),
            graph.constant(np.float32(1 / 127)),
        )
        one, zero = graph.constant(np.float32(1)), graph.constant(np.uint8(_ZERO_POINT))
        quantized_x = graph.op("QuantizeLinear", graph.op("Div", x, row_scale), one, zero)
        y = graph.op(
            "MatMulIntegerToFloat",
            quantized_x,
            weight,
            one,
            weight_scale,
            zero,
            weight_zero,
            domain=MICROSOFT,
        )
        y = graph.op("Mul", y, row_scale)
        return y if bias is None else graph.op("Add", y, bias)


def gather_embedding_rows(graph: GraphBuilder, checkpoint: Checkpoint, ids: str) -> tuple[str, str, str]:
    """Rows of the tied embedding: int8 [..., d], scale [] or [...], output bias [...]."""
    embedding = quantized_weight(checkpoint, "embedding.weight")
    values = graph.op("Gather", graph.weight("embedding.weight", embedding.values), ids)
    scale = graph.weight("embedding.scale", embedding.scale)
    if embedding.scale.ndim:
        scale = graph.op("Gather", scale, ids)
    bias = graph.weight("output_bias", vector(checkpoint, "output_bias"))
    return values, scale, graph.op("Gather", bias, ids)
