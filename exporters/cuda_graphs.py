"""The graphs of cuda-fp16 that run once a segment, or move rows. Shapes as in docs/architecture.md.

B newcomers, S padded source length, H heads, D head size, d width, M rows to be copied.

Every node must have a CUDA kernel for its operator version and types (a test holds them against the list in
tests/exporters/cuda_kernels.py), or the runtime would move its tensors to the CPU and back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import onnx

from exporters.float16 import (
    Product,
    Sublayer,
    embedding_table,
    feed_forward,
    half,
    linear,
    multiply,
    residual_layers,
)
from exporters.graph_builder import FLOAT, FLOAT16, INT32, INT64, MICROSOFT, Dims, GraphBuilder
from exporters.graphs import ModelContext
from exporters.step_graphs import state_dims

CUDA_OPSET = 19
"""onnxruntime finds a kernel that is registered for "19 and later" only for an operator that was last defined
in 19: what opset 21 or 23 defined anew would run on the CPU wherever the CUDA kernels have not followed."""


def cuda_encoder(context: ModelContext) -> onnx.ModelProto:
    """source_ids i64 [B,S], source_mask i32 [B,S] -> cross_key_l, cross_value_l f16 [B,H,S,D]."""
    checkpoint, config = context.checkpoint, context.checkpoint.config
    graph = GraphBuilder("encoder", context.store, opset=CUDA_OPSET)
    ids = graph.input("source_ids", INT64, ["B", "S"])
    graph.input("source_mask", INT32, ["B", "S"])

    rows = graph.op("Gather", embedding_table(graph, checkpoint), ids)
    x = graph.op("Mul", rows, graph.constant(np.float16(math.sqrt(config.d_model))))
    # The host knows every tensor's shape: nothing is read back from the device here.
    length = graph.op("Shape", ids, start=1, end=2)
    codes = half(graph, context.positions(graph))
    x = graph.op("Add", x, graph.op("Slice", codes, graph.ints(0), length, graph.ints(0)))  # [B,S,d]
    sublayers = []
    for layer in range(config.encoder_layers):
        sublayers += _encoder_layer(graph, context, f"encoder.{layer}")
    x = residual_layers(graph, checkpoint, x, sublayers, last_norm="encoder_norm")

    names = context.cross_names()
    parts = graph.split(linear(graph, checkpoint, x, context.cross_linears()), len(names))
    for name, part in zip(names, parts, strict=True):
        heads = graph.op("Reshape", part, graph.ints(0, 0, config.num_heads, config.head_size))
        graph.op("Transpose", heads, name=name, perm=[0, 2, 1, 3])
        graph.output(name, name, FLOAT16, ["B", config.num_heads, "S", config.head_size])
    return graph.build()


def copy_state(context: ModelContext) -> onnx.ModelProto:
    """The state [R,...], from_rows i64 [M], to_rows i64 [M,1] -> next_*: some rows copied onto others.

    Self caches are f16 [R,H,T,D], cells f32 [R,1,d]. Bound to the same memory, each next_* changes the M rows
    alone; all of them are read before any is written.
    """
    dtype = FLOAT if context.checkpoint.config.decoder_cell == "ssru" else FLOAT16
    return _copy_rows(context, "copy_state", state_dims(context.checkpoint), dtype)


def copy_cross(context: ModelContext) -> onnx.ModelProto:
    """cross_key_l, cross_value_l f16 [B,H,S,D], from_rows, to_rows -> next_cross_*; as `copy_state`."""
    config = context.checkpoint.config
    dims: dict[str, Dims] = {
        name: ["B", config.num_heads, "S", config.head_size] for name in context.cross_names()
    }
    return _copy_rows(context, "copy_cross", dims, FLOAT16)


def _copy_rows(context: ModelContext, name: str, tensors: Mapping[str, Dims], dtype: int) -> onnx.ModelProto:
    graph = GraphBuilder(name, context.store, opset=CUDA_OPSET)
    inputs = [graph.input(tensor, dtype, dims) for tensor, dims in tensors.items()]
    from_rows = graph.input("from_rows", INT64, ["M"])
    to_rows = graph.input("to_rows", INT64, ["M", 1])
    for tensor, dims in zip(inputs, tensors.values(), strict=True):
        copied = graph.op("Gather", tensor, from_rows)
        graph.op("ScatterND", tensor, to_rows, copied, name=f"next_{tensor}")
        graph.output(f"next_{tensor}", f"next_{tensor}", dtype, dims)
    return graph.build()


def _encoder_layer(graph: GraphBuilder, context: ModelContext, name: str) -> list[Sublayer]:
    checkpoint = context.checkpoint

    def self_attention(x: str) -> Product:
        inputs = [f"{name}.self_attention.{part}" for part in ("query", "key", "value")]
        packed = multiply(graph, checkpoint, x, inputs)
        y = graph.op(
            "MultiHeadAttention",
            *graph.split(packed.value, 3),  # each [B,S,d]
            packed.bias or "",
            "source_mask",
            domain=MICROSOFT,
            num_heads=checkpoint.config.num_heads,
        )
        return multiply(graph, checkpoint, y, [f"{name}.self_attention.output"])

    return [
        Sublayer(f"{name}.self_norm", self_attention),
        Sublayer(f"{name}.ffn_norm", lambda x: feed_forward(graph, checkpoint, x, f"{name}.ffn")),
    ]
