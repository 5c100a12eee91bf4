"""The linear layers of a graph in int8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from exporters.checkpoint import Checkpoint
from exporters.graph_builder import FLOAT, INT8, MICROSOFT, GraphBuilder
from exporters.linear import quantized_weight, side_by_side, vector
from exporters.quantization import MAX_PAIR_SUM, Int16Array, reduction_divisors

_ZERO_POINT = 128
"""Activations are stored as uint8 around 128, as Marian's "shifted" int8 does."""


class Int8Arithmetic:
    """Multiplies uint8 activations by int8 weights; no scale ever depends on the batch.

    A layer with a known activation scale (Marian's alphas, or calibration) quantises its input with
    that constant; any other layer scales each row by the row's own largest value.

    Weights are such that the CPU's fast kernel never saturates (`exporters.quantization`). Matrices that an
    importer brought as int8 may not be; they are stored as they came, for float32, and reduced when the
    graph is loaded.
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
        name, values, weight_scales, bias = side_by_side(self._checkpoint, names)
        divisors = reduction_divisors(values.T)
        return self._multiply(
            graph,
            x,
            _reduced(graph, name, graph.weight(f"{name}.weight", values), divisors, axis=1),
            _reduced_scale(graph, name, graph.weight(f"{name}.scale", weight_scales), divisors),
            None if bias is None else graph.weight(f"{name}.bias", bias),
            activation_scale=scales.pop(),
            after_relu=after_relu,
        )

    def output_projection(self, graph: GraphBuilder, x: str) -> str:
        """See `Arithmetic.output_projection`."""
        table, scale = self._embedding(graph)
        # Turned over once, when the runtime folds constants: the file keeps one copy of the table.
        return self._multiply(
            graph,
            x,
            graph.op("Transpose", table, perm=[1, 0]),
            scale,
            graph.weight("output_bias", vector(self._checkpoint, "output_bias")),
            activation_scale=self._activation_scales.get("embedding.weight"),
        )

    def candidate_inputs(self, graph: GraphBuilder) -> None:
        """See `Arithmetic.candidate_inputs`."""
        graph.input("candidate_weight", INT8, [self._checkpoint.config.d_model, "N"])
        graph.input("candidate_scale", FLOAT, ["N"])
        graph.input("candidate_output_bias", FLOAT, ["N"])

    def candidate_projection(self, graph: GraphBuilder, x: str) -> str:
        """See `Arithmetic.candidate_projection`."""
        return self._multiply(
            graph,
            x,
            "candidate_weight",
            "candidate_scale",
            "candidate_output_bias",
            activation_scale=self._activation_scales.get("embedding.weight"),
        )

    def candidate_outputs(self, graph: GraphBuilder, candidate_ids: str) -> None:
        """See `Arithmetic.candidate_outputs`."""
        table, scales = self._embedding(graph)
        bias = graph.weight("output_bias", vector(self._checkpoint, "output_bias"))
        weight = graph.op("Transpose", graph.op("Gather", table, candidate_ids), perm=[1, 0])
        graph.output(weight, "candidate_weight", INT8, [self._checkpoint.config.d_model, "N"])
        graph.output(graph.op("Gather", scales, candidate_ids), "candidate_scale", FLOAT, ["N"])
        graph.output(graph.op("Gather", bias, candidate_ids), "candidate_output_bias", FLOAT, ["N"])

    def _embedding(self, graph: GraphBuilder) -> tuple[str, str]:
        """The output projection's table int8 [V,d] and its scales f32 [V]."""
        embedding = quantized_weight(self._checkpoint, "embedding.weight")
        divisors = reduction_divisors(embedding.values)
        table = graph.weight("embedding.weight", embedding.values)
        scales = graph.weight("embedding.scale", embedding.scale)
        if not embedding.scale.ndim:
            scales = graph.op("Expand", scales, graph.ints(len(embedding.values)))
        return (
            _reduced(graph, "embedding", table, divisors, axis=0),
            _reduced_scale(graph, "embedding", scales, divisors),
        )

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
    ) -> str:
        if activation_scale is None:
            return self._multiply_by_row_scale(
                graph, graph.op("Relu", x) if after_relu else x, weight, weight_scale, bias
            )
        zero_point = _ZERO_POINT
        if after_relu:
            # relu(x) >= 0: with zero point 0 the same range has twice as many steps, and
            # quantisation itself clips the negative values.
            activation_scale, zero_point = activation_scale * 127 / 255, 0
        step = graph.constant(np.float32(activation_scale))
        zero = graph.constant(np.uint8(zero_point))
        quantized_x = graph.op("QuantizeLinear", x, step, zero)
        inputs = [quantized_x, weight, step, weight_scale, zero, "", *([bias] if bias else [])]
        return graph.op("MatMulIntegerToFloat", *inputs, domain=MICROSOFT)

    @staticmethod
    def _multiply_by_row_scale(
        graph: GraphBuilder, x: str, weight: str, weight_scale: str, bias: str | None
    ) -> str:
        largest = graph.op("ReduceMax", graph.op("Abs", x), graph.ints(-1), keepdims=1)
        row_scale = graph.op(
            "Mul",
            graph.op("Max", largest, graph.constant(np.float32(1e-9))),
            graph.constant(np.float32(1 / 127)),
        )
        one, zero = graph.constant(np.float32(1)), graph.constant(np.uint8(_ZERO_POINT))
        quantized_x = graph.op("QuantizeLinear", graph.op("Div", x, row_scale), one, zero)
        y = graph.op("MatMulIntegerToFloat", quantized_x, weight, one, weight_scale, zero, domain=MICROSOFT)
        y = graph.op("Mul", y, row_scale)
        return y if bias is None else graph.op("Add", y, bias)


def _reduced(graph: GraphBuilder, name: str, weight: str, divisors: Int16Array | None, *, axis: int) -> str:
    """`exporters.quantization.reduced` of a stored weight, whose outputs lie along `axis`, at load."""
    if divisors is None:
        return weight
    by_output = graph.op("Unsqueeze", _divisors(graph, name, divisors), graph.ints(1 - axis))
    scaled = graph.op("Mul", graph.op("Cast", weight, to=FLOAT), graph.constant(np.float32(MAX_PAIR_SUM)))
    return graph.op("Cast", graph.op("Round", graph.op("Div", scaled, by_output)), to=INT8)


def _reduced_scale(graph: GraphBuilder, name: str, scale: str, divisors: Int16Array | None) -> str:
    """The scale [out] that belongs to the reduced weight, at load."""
    if divisors is None:
        return scale
    share = graph.op("Div", _divisors(graph, name, divisors), graph.constant(np.float32(MAX_PAIR_SUM)))
    return graph.op("Mul", scale, share)


def _divisors(graph: GraphBuilder, name: str, divisors: Int16Array) -> str:
    """Stored as what they are above 128, in one byte each."""
    excess = graph.weight(f"{name}.reduction", (divisors - MAX_PAIR_SUM).astype(np.uint8))
    return graph.op("Add", graph.op("Cast", excess, to=FLOAT), graph.constant(np.float32(MAX_PAIR_SUM)))
