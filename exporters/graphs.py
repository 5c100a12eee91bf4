"""The CPU graphs of a bundle that run once a segment: encoder, candidates. Shapes as in docs/architecture.md.

B newcomers, S padded source length, H heads, D head size, d width, V vocabulary, N candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx

from exporters.checkpoint import Checkpoint
from exporters.graph_builder import FLOAT, INT32, INT64, MICROSOFT, GraphBuilder
from exporters.linear import Arithmetic
from exporters.sublayers import embed, feed_forward, layer_norm, position_codes, started, sublayer
from exporters.weight_store import WeightStore


@dataclass(frozen=True, kw_only=True)
class ModelContext:
    """What every graph of a bundle is built from.

    Attributes:
        checkpoint: quantised weights and configuration.
        store: the bundle's shared weights.
        max_source_tokens: source positions.
        max_target_tokens: target positions.
    """

    checkpoint: Checkpoint
    store: WeightStore
    max_source_tokens: int
    max_target_tokens: int

    def positions(self, graph: GraphBuilder) -> str:
        """The position codes f32 [P, d] of the longest sequence."""
        return position_codes(graph, self.checkpoint, max(self.max_source_tokens, self.max_target_tokens))

    def started(self, graph: GraphBuilder) -> str:
        """0 for the first target position, 1 for the others, f32 [T,1]."""
        return started(graph, self.max_target_tokens)

    def cross_names(self) -> list[str]:
        """Names of the cross-attention cache tensors, keys and values by decoder layer."""
        layers = range(self.checkpoint.config.decoder_layers)
        return [f"cross_{kind}_{layer}" for layer in layers for kind in ("key", "value")]

    def cross_linears(self) -> list[str]:
        """The linear layers that compute them from the encoder's output, likewise."""
        layers = range(self.checkpoint.config.decoder_layers)
        return [f"decoder.{layer}.cross_attention.{kind}" for layer in layers for kind in ("key", "value")]

    @property
    def alignment_layer(self) -> int:
        """The decoder layer whose cross-attention is the alignment, counted from 0."""
        return range(self.checkpoint.config.decoder_layers)[self.checkpoint.alignment.layer]


@dataclass(frozen=True, kw_only=True)
class GraphContext(ModelContext):
    """What every graph of one CPU variant is built from.

    Attributes:
        arithmetic: the variant's linear layers.
    """

    arithmetic: Arithmetic


def encoder(context: GraphContext) -> onnx.ModelProto:
    """source_ids i64 [B,S], source_mask i32 [B,S] -> cross_key_l, cross_value_l f32 [B,H,S,D]."""
    checkpoint, arithmetic = context.checkpoint, context.arithmetic
    config = checkpoint.config
    graph = GraphBuilder("encoder", context.store)
    ids = graph.input("source_ids", INT64, ["B", "S"])
    mask = graph.input("source_mask", INT32, ["B", "S"])

    length = graph.op("Shape", ids, start=1, end=2)
    codes = graph.op("Slice", context.positions(graph), graph.ints(0), length, graph.ints(0))
    x = graph.op("Add", embed(graph, checkpoint, ids), codes)  # [B,S,d]
    for layer in range(config.encoder_layers):
        x = _encoder_layer(graph, context, x, layer, mask=mask)
    if config.norm == "pre":
        x = layer_norm(graph, checkpoint, x, "encoder_norm")

    # The cross-attention keys and values of every decoder layer, in one multiplication.
    names = context.cross_names()
    parts = graph.split(arithmetic.linear(graph, x, context.cross_linears()), len(names))
    for name, part in zip(names, parts, strict=True):
        heads = graph.op("Reshape", part, graph.ints(0, 0, config.num_heads, config.head_size))
        cross = graph.op("Transpose", heads, perm=[0, 2, 1, 3])
        graph.output(cross, name, FLOAT, ["B", config.num_heads, "S", config.head_size])
    return graph.build()


def candidates(context: GraphContext) -> onnx.ModelProto:
    """candidate_ids i64 [N] -> the output projection restricted to them, for the shortlist step."""
    graph = GraphBuilder("candidates", context.store)
    context.arithmetic.candidate_outputs(graph, graph.input("candidate_ids", INT64, ["N"]))
    return graph.build()


def _encoder_layer(graph: GraphBuilder, context: GraphContext, x: str, layer: int, *, mask: str) -> str:
    """One layer: x f32 [B,S,d] -> [B,S,d]."""
    checkpoint, arithmetic, config = context.checkpoint, context.arithmetic, context.checkpoint.config
    name = f"encoder.{layer}"

    def self_attention(x: str) -> str:
        qkv = arithmetic.linear(
            graph, x, [f"{name}.self_attention.{part}" for part in ("query", "key", "value")]
        )
        q, k, v = graph.split(qkv, 3)  # each [B,S,d]
        y = graph.op("MultiHeadAttention", q, k, v, "", mask, domain=MICROSOFT, num_heads=config.num_heads)
        return arithmetic.linear(graph, y, [f"{name}.self_attention.output"])

    for norm, body in (
        ("self_norm", self_attention),
        ("ffn_norm", lambda x: feed_forward(graph, checkpoint, arithmetic, x, f"{name}.ffn")),
    ):
        x = sublayer(graph, checkpoint, x, f"{name}.{norm}", body, normalise=layer_norm)
    return x
