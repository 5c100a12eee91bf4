"""The graphs of a bundle: encoder, decoder step, candidates. Shapes as in docs/architecture.md.

B newcomers or R rows, S padded source length, H heads, D head size, d width, V vocabulary,
N candidates, T slots of the self cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx

from app.bundle.manifest import StateTensor
from exporters.checkpoint import Checkpoint
from exporters.graph_builder import FLOAT, INT32, INT64, MICROSOFT, Dims, GraphBuilder
from exporters.linear import Arithmetic
from exporters.sublayers import embed, feed_forward, layer_norm, position_codes, sublayer
from exporters.weight_store import WeightStore

_CANDIDATE_BLOCK = 64
_DISALLOWED = np.float32(-1e9)


@dataclass(frozen=True)
class GraphContext:
    """What every graph of one variant is built from.

    Attributes:
        checkpoint: quantised weights and configuration.
        arithmetic: the variant's linear layers.
        store: the bundle's shared weights.
        max_source_tokens: source positions.
        max_target_tokens: target positions.
    """

    checkpoint: Checkpoint
    arithmetic: Arithmetic
    store: WeightStore
    max_source_tokens: int
    max_target_tokens: int

    def positions(self, graph: GraphBuilder) -> str:
        """The position codes f32 [P, d] of the longest sequence."""
        return position_codes(graph, self.checkpoint, max(self.max_source_tokens, self.max_target_tokens))

    def cross_names(self) -> list[str]:
        """Names of the cross-attention cache tensors, keys and values by decoder layer."""
        layers = range(self.checkpoint.config.decoder_layers)
        return [f"cross_{kind}_{layer}" for layer in layers for kind in ("key", "value")]


def state_tensors(checkpoint: Checkpoint) -> tuple[StateTensor, ...]:
    """The decoder state of one row, in graph order."""
    config = checkpoint.config
    if config.decoder_cell == "ssru":
        return tuple(
            StateTensor(name=f"cell_{layer}", kind="cell", shape=(config.d_model,))
            for layer in range(config.decoder_layers)
        )
    return tuple(
        StateTensor(name=f"self_{kind}_{layer}", kind="kv", shape=(config.num_heads, config.head_size))
        for layer in range(config.decoder_layers)
        for kind in ("key", "value")
    )


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
    linears = [
        f"decoder.{layer}.cross_attention.{kind}"
        for layer in range(config.decoder_layers)
        for kind in ("key", "value")
    ]
    parts = graph.split(arithmetic.linear(graph, x, linears), len(names))
    for name, part in zip(names, parts, strict=True):
        heads = graph.op("Reshape", part, graph.ints(0, 0, config.num_heads, config.head_size))
        cross = graph.op("Transpose", heads, perm=[0, 2, 1, 3])
        graph.output(cross, name, FLOAT, ["B", config.num_heads, "S", config.head_size])
    return graph.build()


def decoder_step(context: GraphContext, *, shortlist: bool) -> onnx.ModelProto:
    """One step over R rows: last tokens and caches in, chosen tokens and next state out.

    Inputs: last_ids i64 [R], positions i64 [R] (target tokens decoded so far), source_mask i32
    [R,S], cross_key_l/cross_value_l f32 [R,H,S,D], and the state: cell_l f32 [R,d], or
    self_key_l/self_value_l f32 [R,H,T,D] whose outputs next_* must be bound to the same memory.
    With a shortlist also candidate_ids i64 [N], candidate_mask f32 [R,N] (0 allowed, -1e9 not) and
    what the candidates graph returned; N a multiple of 64.

    Outputs: token_ids i64 [R], log_probs f32 [R], next_*.
    """
    checkpoint, config = context.checkpoint, context.checkpoint.config
    graph = GraphBuilder("shortlist_step" if shortlist else "step", context.store)
    last_ids = graph.input("last_ids", INT64, ["R"])
    positions = graph.input("positions", INT64, ["R"])
    mask = graph.input("source_mask", INT32, ["R", "S"])
    for name in context.cross_names():
        graph.input(name, FLOAT, ["R", config.num_heads, "S", config.head_size])
    state_dims: dict[str, Dims] = {
        state.name: ["R", *state.shape]
        if state.kind == "cell"
        else ["R", state.shape[0], "T", state.shape[1]]
        for state in state_tensors(checkpoint)
    }
    for name, dims in state_dims.items():
        graph.input(name, FLOAT, dims)

    x = embed(graph, checkpoint, last_ids)  # [R,d]
    if config.start_id is None:
        # The decoder starts from a zero embedding: multiply by min(position, 1).
        started = graph.op("Cast", graph.op("Min", positions, graph.ints(1)), to=FLOAT)
        x = graph.op("Mul", x, graph.op("Unsqueeze", started, graph.ints(1)))
    x = graph.op("Add", x, graph.op("Gather", context.positions(graph), positions))
    for layer in range(config.decoder_layers):
        x = _decoder_layer(graph, context, x, layer, mask=mask, positions=positions)
    if config.norm == "pre":
        x = layer_norm(graph, checkpoint, x, "decoder_norm")

    if shortlist:
        candidate_ids = graph.input("candidate_ids", INT64, ["N"])
        candidate_mask = graph.input("candidate_mask", FLOAT, ["R", "N"])
        context.arithmetic.candidate_inputs(graph)
        logits = graph.op("Add", context.arithmetic.candidate_projection(graph, x), candidate_mask)  # [R,N]
        index, log_probs = _choose(graph, logits, _CANDIDATE_BLOCK)
        graph.output(graph.op("Gather", candidate_ids, index), "token_ids", INT64, ["R"])
    else:
        logits = context.arithmetic.output_projection(graph, x)  # [R,V]
        index, log_probs = _choose(graph, logits, _block_size(config.vocabulary_size))
        graph.output(index, "token_ids", INT64, ["R"])
    graph.output(log_probs, "log_probs", FLOAT, ["R"])
    for name, dims in state_dims.items():
        graph.output(f"next_{name}", f"next_{name}", FLOAT, dims)
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

    x = sublayer(graph, checkpoint, x, f"{name}.self_norm", self_attention)
    return sublayer(
        graph,
        checkpoint,
        x,
        f"{name}.ffn_norm",
        lambda x: feed_forward(graph, checkpoint, arithmetic, x, f"{name}.ffn"),
    )


def _decoder_layer(
    graph: GraphBuilder, context: GraphContext, x: str, layer: int, *, mask: str, positions: str
) -> str:
    """X f32 [R,d] -> [R,d]; writes next_* of this layer."""
    checkpoint, arithmetic, config = context.checkpoint, context.arithmetic, context.checkpoint.config
    name = f"decoder.{layer}"

    def cell(x: str) -> str:
        # SSRU (Kim et al. 2019, eq. 3): f = sigmoid(Wf x + b); c' = f * c + (1 - f) * W x; relu(c')
        both = arithmetic.linear(graph, x, [f"{name}.cell.candidate", f"{name}.cell.forget"])  # [R,2d]
        candidate, forget = graph.split(both, 2)  # each [R,d]
        kept = graph.op("Mul", graph.op("Sigmoid", forget), graph.op("Sub", f"cell_{layer}", candidate))
        return graph.op("Relu", graph.op("Add", candidate, kept, name=f"next_cell_{layer}"))

    def self_attention(x: str) -> str:
        qkv = arithmetic.linear(
            graph, x, [f"{name}.self_attention.{part}" for part in ("query", "key", "value")]
        )
        packed = graph.op("Unsqueeze", qkv, graph.ints(1))  # [R,1,3d]
        num_cached = graph.op("Cast", positions, to=INT32)
        longest = graph.op("ReduceMax", num_cached, graph.ints(0), keepdims=0)
        total_length = graph.op("Add", longest, graph.constant(np.int32(1)))
        y, _, _ = graph.ops(
            "GroupQueryAttention",
            packed,
            "",
            "",
            f"self_key_{layer}",
            f"self_value_{layer}",
            num_cached,
            total_length,
            num_outputs=3,
            domain=MICROSOFT,
            names=[f"self_attention_{layer}", f"next_self_key_{layer}", f"next_self_value_{layer}"],
            num_heads=config.num_heads,
            kv_num_heads=config.num_heads,
        )
        return arithmetic.linear(
            graph, graph.op("Squeeze", y, graph.ints(1)), [f"{name}.self_attention.output"]
        )

    def cross_attention(x: str) -> str:
        query = graph.op(
            "Unsqueeze", arithmetic.linear(graph, x, [f"{name}.cross_attention.query"]), graph.ints(1)
        )
        y = graph.op(
            "MultiHeadAttention",
            query,
            f"cross_key_{layer}",
            f"cross_value_{layer}",
            "",
            mask,
            domain=MICROSOFT,
            num_heads=config.num_heads,
        )
        return arithmetic.linear(
            graph, graph.op("Squeeze", y, graph.ints(1)), [f"{name}.cross_attention.output"]
        )

    recurrent = cell if config.decoder_cell == "ssru" else self_attention
    x = sublayer(graph, checkpoint, x, f"{name}.self_norm", recurrent)
    x = sublayer(graph, checkpoint, x, f"{name}.cross_norm", cross_attention)
    return sublayer(
        graph,
        checkpoint,
        x,
        f"{name}.ffn_norm",
        lambda x: feed_forward(graph, checkpoint, arithmetic, x, f"{name}.ffn"),
    )


def _choose(graph: GraphBuilder, logits: str, block: int | None) -> tuple[str, str]:
    """The first largest of logits [R,V]: its index i64 [R] and its log-probability f32 [R].

    ArgMax over a long row is slow on the CPU provider: the maximum of every block is taken first
    (vectorised), then the first block that holds the largest, then the first index in that block.
    """
    largest = graph.op("ReduceMax", logits, graph.ints(-1), keepdims=1)  # [R,1]
    if block is None:
        index = graph.op("ArgMax", logits, axis=-1, keepdims=0)
    else:
        blocks = graph.op("Reshape", logits, graph.ints(0, -1, block))  # [R,V/b,b]
        block_index = graph.op(
            "ArgMax", graph.op("ReduceMax", blocks, graph.ints(-1), keepdims=0), axis=-1, keepdims=1
        )  # [R,1]
        winners = graph.op("GatherND", blocks, block_index, batch_dims=1)  # [R,b]
        within = graph.op("ArgMax", winners, axis=-1, keepdims=0)  # [R]
        first = graph.op("Mul", graph.op("Squeeze", block_index, graph.ints(1)), graph.ints(block))
        index = graph.op("Add", first, within)
    # log softmax at the maximum: -log sum exp(logits - max)
    exponentials = graph.op("Exp", graph.op("Sub", logits, largest))
    total = graph.op("ReduceSum", exponentials, graph.ints(-1), keepdims=0)
    return index, graph.op("Neg", graph.op("Log", total))


def _block_size(vocabulary_size: int) -> int | None:
    """The divisor of V nearest to its square root, or None when V has none worth the detour."""
    root = vocabulary_size**0.5
    divisors = [b for b in range(16, 1025) if vocabulary_size % b == 0]
    return min(divisors, key=lambda b: abs(b - root)) if divisors else None
