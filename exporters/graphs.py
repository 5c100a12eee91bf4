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
from exporters.rows import BeamRows, GreedyRows, Rows
from exporters.sublayers import embed, feed_forward, layer_norm, position_codes, sublayer
from exporters.token_choice import CANDIDATE_BLOCK, MAX_CANDIDATES, best_continuations, block_size, choose
from exporters.weight_store import WeightStore


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


def step_role(*, shortlist: bool, beams: bool) -> str:
    """The step graph's name among the graphs of a variant."""
    return ("shortlist_" if shortlist else "") + ("beam_step" if beams else "step")


def decoder_step(context: GraphContext, *, shortlist: bool, beams: bool) -> onnx.ModelProto:
    """One step over the R rows of B segments: last tokens and caches in, chosen tokens and state out.

    Inputs: last_ids i64 [R], positions i64 [R] (target tokens decoded so far), source_mask i32
    [B,S], cross_key_l/cross_value_l f32 [B,H,S,D], and the state: cell_l f32 [R,d], or
    self_key_l/self_value_l f32 [R,H,T,D] whose outputs next_* must be bound to the same memory.
    With a shortlist also candidate_ids i64 [N], candidate_mask f32 [B,N] (0 allowed, -1e9 not) and
    what the candidates graph returned; N a multiple of 64.

    Greedy (R = B): outputs token_ids i64 [R], log_probs f32 [R], next_*.

    Beams (R = B x K, the rows of a segment side by side; its beams are queries to one cross cache):
    inputs also row_scores f32 [R], summed log-probabilities so far, and num_candidates i64 [1], C.
    Outputs token_ids i64 [B,C], beams i64 [B,C], scores f32 [B,C]: of each segment the C best
    continuations of any of its beams, best first; and next_*.
    """
    checkpoint, config = context.checkpoint, context.checkpoint.config
    graph = GraphBuilder(step_role(shortlist=shortlist, beams=beams), context.store)
    segments = "B" if beams else "R"
    last_ids = graph.input("last_ids", INT64, ["R"])
    positions = graph.input("positions", INT64, ["R"])
    mask = graph.input("source_mask", INT32, [segments, "S"])
    for name in context.cross_names():
        graph.input(name, FLOAT, [segments, config.num_heads, "S", config.head_size])
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
    rows = BeamRows(graph, config.d_model) if beams else GreedyRows(graph)
    for layer in range(config.decoder_layers):
        x = _decoder_layer(graph, context, x, layer, rows=rows, mask=mask, positions=positions)
    if config.norm == "pre":
        x = layer_norm(graph, checkpoint, x, "decoder_norm")

    candidate_ids = None
    if shortlist:
        candidate_ids = graph.input("candidate_ids", INT64, ["N"])
        candidate_mask = graph.input("candidate_mask", FLOAT, [segments, "N"])
        context.arithmetic.candidate_inputs(graph)
        logits = rows.add_by_segment(context.arithmetic.candidate_projection(graph, x), candidate_mask)
        block: int | None = CANDIDATE_BLOCK
    else:
        logits = context.arithmetic.output_projection(graph, x)  # [R,V]
        block = block_size(config.vocabulary_size, min_blocks=MAX_CANDIDATES if beams else 1)
    if beams:
        row_scores = graph.input("row_scores", FLOAT, ["R"])
        num_candidates = graph.input("num_candidates", INT64, [1])
        best = best_continuations(graph, logits, row_scores, num_candidates, rows.num_segments, block)
        token_ids = best.indices if candidate_ids is None else graph.op("Gather", candidate_ids, best.indices)
        graph.output(token_ids, "token_ids", INT64, ["B", "C"])
        graph.output(best.beams, "beams", INT64, ["B", "C"])
        graph.output(best.scores, "scores", FLOAT, ["B", "C"])
    else:
        index, log_probs = choose(graph, logits, block)
        token_ids = index if candidate_ids is None else graph.op("Gather", candidate_ids, index)
        graph.output(token_ids, "token_ids", INT64, ["R"])
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
    graph: GraphBuilder, context: GraphContext, x: str, layer: int, *, rows: Rows, mask: str, positions: str
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
        query = rows.by_segment(arithmetic.linear(graph, x, [f"{name}.cross_attention.query"]))  # [B,K,d]
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
        return arithmetic.linear(graph, rows.flat(y), [f"{name}.cross_attention.output"])

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
