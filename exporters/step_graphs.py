"""The CPU decoder step graphs of a bundle: greedy, beams, guided. Shapes as in docs/architecture.md.

B segments, K beams, R = B x K rows, S padded source length, H heads, D head size, d width, V vocabulary,
N candidates, T slots of the self cache, C continuations.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import onnx

from app.bundle.manifest import StateTensor
from exporters.checkpoint import Checkpoint
from exporters.graph_builder import FLOAT, INT32, INT64, MICROSOFT, Dims, GraphBuilder
from exporters.graphs import GraphContext
from exporters.rows import BeamRows, GreedyRows, Rows
from exporters.sublayers import (
    cached_self_attention,
    embed,
    feed_forward,
    next_cell,
    norm_of_rows,
    self_attention_inputs,
    sublayer,
)
from exporters.token_choice import (
    CANDIDATE_BLOCK,
    MAX_CANDIDATES,
    adjusted,
    best_continuations,
    block_size,
    choose,
    without_forbidden,
)


class StepKind(StrEnum):
    """What a step graph chooses; the value is its role in the manifest, less ``shortlist_``."""

    GREEDY = "step"
    """The best token of each row."""
    BEAMS = "beam_step"
    """The best continuations of each segment's K beams."""
    GUIDED = "guided_step"
    """As BEAMS, after the search has adjusted single logits; also tells what each row attended to."""


def step_role(kind: StepKind, *, shortlist: bool) -> str:
    """The step graph's name among the graphs of a variant."""
    return f"shortlist_{kind.value}" if shortlist else kind.value


def state_tensors(checkpoint: Checkpoint) -> tuple[StateTensor, ...]:
    """The decoder state of one row, in graph order."""
    config = checkpoint.config
    if config.decoder_cell == "ssru":
        return tuple(
            StateTensor(name=f"cell_{layer}", kind="cell", shape=(1, config.d_model))
            for layer in range(config.decoder_layers)
        )
    return tuple(
        StateTensor(name=f"self_{kind}_{layer}", kind="kv", shape=(config.num_heads, config.head_size))
        for layer in range(config.decoder_layers)
        for kind in ("key", "value")
    )


def state_dims(checkpoint: Checkpoint) -> dict[str, Dims]:
    """Names and dimensions of the state tensors of R rows: cell_l [R,1,d], or self_*_l [R,H,T,D]."""
    return {
        state.name: ["R", *state.shape]
        if state.kind == "cell"
        else ["R", state.shape[0], "T", state.shape[1]]
        for state in state_tensors(checkpoint)
    }


def decoder_step(context: GraphContext, kind: StepKind, *, shortlist: bool) -> onnx.ModelProto:
    """One step over the R rows of B segments: last tokens and caches in, chosen tokens and state out.

    Inputs: last_ids i64 [R,1], positions i32 [R] (target tokens decoded so far), source_mask i32
    [B,S], cross_key_l/cross_value_l f32 [B,H,S,D], and the state: cell_l f32 [R,1,d], or
    self_key_l/self_value_l f32 [R,H,T,D] whose outputs next_* must be bound to the same memory.
    With a shortlist also candidate_ids i64 [N], candidate_mask f32 [B,N] (0 allowed, -1e9 not) and
    what the candidates graph returned; N a multiple of 64.

    Greedy (R = B): outputs token_ids i64 [R], log_probs f32 [R], next_*.

    Beams (R = B x K, the rows of a segment side by side; its beams are queries to one cross cache):
    inputs also row_scores f32 [R], summed log-probabilities so far, and num_candidates i64 [1], C.
    Outputs token_ids i64 [B,C], beams i64 [B,C], scores f32 [B,C]: of each segment the C best
    continuations of any of its beams, best first; and next_*. A sum below -1e8 stands for a
    continuation that is not allowed.

    Guided: as beams, with M adjustments of logits before they become probabilities (`adjusted`):
    adjusted_columns i64 [M,2] (row, column), adjusted_divisors f32 [M], adjusted_addends f32 [M]; M may
    be 0. Also outputs attention f32 [B,K,S], the weights of the alignment heads.
    """
    config = context.checkpoint.config
    graph = GraphBuilder(step_role(kind, shortlist=shortlist), context.store)
    decoder = _Decoder(graph, context, kind)
    decoder.declare_state()
    x = decoder.hidden()  # [R,1,d]
    x = graph.op("Squeeze", x, graph.ints(1))  # [R,d]

    candidate_ids = None
    if shortlist:
        candidate_ids = graph.input("candidate_ids", INT64, ["N"])
        candidate_mask = graph.input("candidate_mask", FLOAT, [decoder.segments, "N"])
        context.arithmetic.candidate_inputs(graph)
        logits = context.arithmetic.candidate_projection(graph, x)
        logits = decoder.rows.add_by_segment(logits, candidate_mask)
        block: int | None = CANDIDATE_BLOCK
    else:
        logits = context.arithmetic.output_projection(graph, x)  # [R,V]
        min_blocks = 1 if kind is StepKind.GREEDY else MAX_CANDIDATES
        block = block_size(config.vocabulary_size, min_blocks=min_blocks)
    if kind is StepKind.GUIDED:
        logits = adjusted(
            graph,
            logits,
            columns=graph.input("adjusted_columns", INT64, ["M", 2]),
            divisors=graph.input("adjusted_divisors", FLOAT, ["M"]),
            addends=graph.input("adjusted_addends", FLOAT, ["M"]),
        )
        graph.output(decoder.attention(), "attention", FLOAT, ["B", "K", "S"])
    log_probs = graph.op("LogSoftmax", logits, axis=-1)
    if kind is StepKind.GUIDED:
        log_probs = without_forbidden(graph, logits, log_probs)
    if kind is StepKind.GREEDY:
        index, chosen_log_probs = choose(graph, log_probs, block)
        token_ids = index if candidate_ids is None else graph.op("Gather", candidate_ids, index)
        graph.output(token_ids, "token_ids", INT64, ["R"])
        graph.output(chosen_log_probs, "log_probs", FLOAT, ["R"])
    else:
        row_scores = graph.input("row_scores", FLOAT, ["R"])
        num_candidates = graph.input("num_candidates", INT64, [1])
        best = best_continuations(
            graph, log_probs, row_scores, num_candidates, decoder.rows.num_segments, block
        )
        token_ids = best.indices if candidate_ids is None else graph.op("Gather", candidate_ids, best.indices)
        graph.output(token_ids, "token_ids", INT64, ["B", "C"])
        graph.output(best.beams, "beams", INT64, ["B", "C"])
        graph.output(best.scores, "scores", FLOAT, ["B", "C"])
    for name, dims in state_dims(context.checkpoint).items():
        graph.output(f"next_{name}", f"next_{name}", FLOAT, dims)
    return graph.build()


@dataclass(frozen=True)
class _Decoder:
    """The decoder's layers in one step graph; rows are [R,1,d] throughout, a sequence of one position."""

    graph: GraphBuilder
    context: GraphContext
    kind: StepKind

    @property
    def segments(self) -> str:
        """Name of the axis B; greedy steps have one row a segment."""
        return "R" if self.kind is StepKind.GREEDY else "B"

    @property
    def rows(self) -> Rows:
        if self.kind is StepKind.GREEDY:
            return GreedyRows(self.graph)
        return BeamRows(self.graph, self.context.checkpoint.config.d_model)

    def declare_state(self) -> None:
        """The graph's inputs but those of the token choice."""
        graph, config = self.graph, self.context.checkpoint.config
        graph.input("last_ids", INT64, ["R", 1])
        graph.input("positions", INT32, ["R"])
        graph.input("source_mask", INT32, [self.segments, "S"])
        for name in self.context.cross_names():
            graph.input(name, FLOAT, [self.segments, config.num_heads, "S", config.head_size])
        for name, dims in state_dims(self.context.checkpoint).items():
            graph.input(name, FLOAT, dims)

    def hidden(self) -> str:
        """What the output projection sees, f32 [R,1,d]; writes next_* of every layer."""
        graph, context = self.graph, self.context
        checkpoint, config = context.checkpoint, context.checkpoint.config
        x = embed(graph, checkpoint, "last_ids")  # [R,1,d]
        position = graph.op("Unsqueeze", "positions", graph.ints(1))  # [R,1]
        if config.start_id is None:
            # The decoder starts from a zero embedding: multiply by min(position, 1).
            x = graph.op("Mul", x, graph.op("Gather", context.started(graph), position))
        x = graph.op("Add", x, graph.op("Gather", context.positions(graph), position))
        for layer in range(config.decoder_layers):
            x = self._layer(x, layer)
        return norm_of_rows(graph, checkpoint, x, "decoder_norm") if config.norm == "pre" else x

    def attention(self) -> str:
        """The alignment heads' attention of each row, averaged, f32 [B,K,S]."""
        graph, heads = self.graph, self.context.checkpoint.alignment.heads
        weights = graph.op("Softmax", f"cross_scores_{self.context.alignment_layer}", axis=-1)  # [B,H,K,S]
        if heads is not None:
            weights = graph.op("Gather", weights, graph.ints(*heads), axis=1)
        return graph.op("ReduceMean", weights, graph.ints(1), keepdims=0)

    def _layer(self, x: str, layer: int) -> str:
        graph, checkpoint = self.graph, self.context.checkpoint
        name = f"decoder.{layer}"
        first = self._cell if checkpoint.config.decoder_cell == "ssru" else self._self_attention
        for norm, body in (
            ("self_norm", lambda x: first(x, layer)),
            ("cross_norm", lambda x: self._cross_attention(x, layer)),
            (
                "ffn_norm",
                lambda x: feed_forward(graph, checkpoint, self.context.arithmetic, x, f"{name}.ffn"),
            ),
        ):
            x = sublayer(graph, checkpoint, x, f"{name}.{norm}", body, normalise=norm_of_rows)
        return x

    def _cell(self, x: str, layer: int) -> str:
        graph, name = self.graph, f"decoder.{layer}.cell"
        both = self.context.arithmetic.linear(graph, x, [f"{name}.candidate", f"{name}.forget"])  # [R,1,2d]
        return graph.op("Relu", next_cell(graph, both, layer))

    def _self_attention(self, x: str, layer: int) -> str:
        graph, arithmetic, config = self.graph, self.context.arithmetic, self.context.checkpoint.config
        name = f"decoder.{layer}.self_attention"
        packed = arithmetic.linear(graph, x, self_attention_inputs(config.decoder_cell, name))
        y = cached_self_attention(
            graph, config, packed, layer, max_target_tokens=self.context.max_target_tokens
        )
        return arithmetic.linear(graph, y, [f"{name}.output"])

    def _cross_attention(self, x: str, layer: int) -> str:
        graph, arithmetic = self.graph, self.context.arithmetic
        name = f"decoder.{layer}.cross_attention"
        query = self.rows.by_segment(arithmetic.linear(graph, x, [f"{name}.query"]))  # [B,K,d]
        outputs = [f"cross_attention_{layer}"]
        if self.kind is StepKind.GUIDED and layer == self.context.alignment_layer:
            # Before the softmax, mask included.
            outputs += ["", "", f"cross_scores_{layer}"]
            num_heads = self.context.checkpoint.config.num_heads
            graph.declare(f"cross_scores_{layer}", FLOAT, ["B", num_heads, "K", "S"])
        y = graph.ops(
            "MultiHeadAttention",
            query,
            f"cross_key_{layer}",
            f"cross_value_{layer}",
            "",
            "source_mask",
            num_outputs=len(outputs),
            names=outputs,
            domain=MICROSOFT,
            num_heads=self.context.checkpoint.config.num_heads,
        )[0]
        return arithmetic.linear(graph, self.rows.flat(y), [f"{name}.output"])
