"""The decoder step graphs of cuda-fp16: greedy, beams, guided. Shapes as in docs/architecture.md.

B segments, K beams, R = B x K rows, S padded source length, H heads, D head size, d width, V vocabulary,
T slots of the self cache, C continuations.

Activations, keys and values are float16; softmax, logits from their bias on, scores and the cells of a
recurrent decoder are float32. What a step reads on the host are constants and two shapes, so that it can be
recorded as a CUDA graph and replayed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx

from exporters.cuda_graphs import CUDA_OPSET
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
from exporters.graph_builder import FLOAT, FLOAT16, INT32, INT64, MICROSOFT, GraphBuilder
from exporters.graphs import ModelContext
from exporters.linear import vector
from exporters.step_graphs import StepKind, state_dims
from exporters.sublayers import cached_self_attention, next_cell, self_attention_inputs
from exporters.token_choice import MAX_CANDIDATES, adjusted, without_forbidden


def cuda_decoder_step(context: ModelContext, kind: StepKind) -> onnx.ModelProto:
    """One step over the R rows of B segments, as `exporters.step_graphs.decoder_step` without a shortlist.

    What differs: cross_* and self_* are f16 (cells stay f32). Beam and guided steps always return
    C = min(MAX_CANDIDATES, V) continuations instead of taking num_candidates, and take two shapes that are
    read on the host: hidden_shape i64 [3], which is (B,K,d), and scores_shape i64 [2], which is (B,-1). A
    beam that must not go on gets -1e30 for -inf.
    """
    checkpoint = context.checkpoint
    graph = GraphBuilder(kind.value, context.store, opset=CUDA_OPSET)
    decoder = _Decoder(graph, context, kind)
    decoder.declare_inputs()
    table = embedding_table(graph, checkpoint)
    x = graph.op("Squeeze", decoder.hidden(table), graph.ints(1))  # [R,d]

    # The products come in float16; whatever is added to them afterwards is not rounded again.
    logits = graph.op("Cast", graph.op("Gemm", x, table, transB=1), to=FLOAT)  # [R,V]
    logits = graph.op("Add", logits, graph.weight("output_bias", vector(checkpoint, "output_bias")))
    if kind is StepKind.GUIDED:
        logits = adjusted(
            graph,
            logits,
            columns=graph.input("adjusted_columns", INT64, ["M", 2]),
            divisors=graph.input("adjusted_divisors", FLOAT, ["M"]),
            addends=graph.input("adjusted_addends", FLOAT, ["M"]),
        )
    log_probs = graph.op("LogSoftmax", logits, axis=-1)
    if kind is StepKind.GUIDED:
        log_probs = without_forbidden(graph, logits, log_probs)
        decoder.attention()
    if kind is StepKind.GREEDY:
        _choose(graph, log_probs)
    else:
        _best_continuations(graph, log_probs, min(MAX_CANDIDATES, checkpoint.config.vocabulary_size))
    for name, dims in state_dims(checkpoint).items():
        graph.output(f"next_{name}", f"next_{name}", decoder.state_dtype, dims)
    return graph.build()


def _choose(graph: GraphBuilder, log_probs: str) -> None:
    """Outputs of a greedy step: the largest log-probability of each row and its index."""
    # TopK has kernels of its own for a small K; ArgMax goes through cuDNN and would not tell the value.
    values, indices = graph.ops("TopK", log_probs, graph.ints(1), num_outputs=2, axis=-1)  # [R,1]
    graph.op("Squeeze", indices, graph.ints(1), name="token_ids")
    graph.op("Squeeze", values, graph.ints(1), name="log_probs")
    graph.output("token_ids", "token_ids", INT64, ["R"])
    graph.output("log_probs", "log_probs", FLOAT, ["R"])


def _best_continuations(graph: GraphBuilder, log_probs: str, num_candidates: int) -> None:
    """Outputs of a beam step: the C best of all beams' continuations, by summed log-probability.

    Each row's C best are found first: the C best of a segment are among them.
    """
    row_scores = graph.input("row_scores", FLOAT, ["R"])
    shape = graph.input("scores_shape", INT64, [2])
    count = graph.ints(num_candidates)
    values, columns = graph.ops("TopK", log_probs, count, num_outputs=2, axis=-1)  # [R,C]
    summed = graph.op("Add", values, graph.op("Unsqueeze", row_scores, graph.ints(1)))
    # The kernel fills a row up to a power of two with the lowest finite number, which would come before -inf
    # and be continued as a beam that does not exist.
    summed = graph.op("Max", summed, graph.constant(np.float32(-1e30)))
    by_segment = graph.op("Reshape", summed, shape)  # [B,K*C]
    _, order = graph.ops(
        "TopK", by_segment, count, num_outputs=2, axis=-1, names=["scores", "order"]
    )  # [B,C] of [B,K*C]
    graph.op("GatherElements", graph.op("Reshape", columns, shape), order, axis=1, name="token_ids")
    graph.op("Div", order, count, name="beams")
    for name, dtype in (("token_ids", INT64), ("beams", INT64), ("scores", FLOAT)):
        graph.output(name, name, dtype, ["B", num_candidates])


@dataclass(frozen=True)
class _Decoder:
    """The decoder's layers in one step graph; rows are [R,1,d] throughout, a sequence of one position."""

    graph: GraphBuilder
    context: ModelContext
    kind: StepKind

    @property
    def state_dtype(self) -> int:
        return FLOAT if self.context.checkpoint.config.decoder_cell == "ssru" else FLOAT16

    def declare_inputs(self) -> None:
        """The graph's inputs but those of the token choice."""
        graph, config = self.graph, self.context.checkpoint.config
        segments = "R" if self.kind is StepKind.GREEDY else "B"
        graph.input("last_ids", INT64, ["R", 1])
        graph.input("positions", INT32, ["R"])
        graph.input("source_mask", INT32, [segments, "S"])
        for name in self.context.cross_names():
            graph.input(name, FLOAT16, [segments, config.num_heads, "S", config.head_size])
        for name, dims in state_dims(self.context.checkpoint).items():
            graph.input(name, self.state_dtype, dims)
        if self.kind is not StepKind.GREEDY:
            graph.input("hidden_shape", INT64, [3])

    def hidden(self, table: str) -> str:
        """What the output projection sees, f16 [R,1,d]; writes next_* of every layer."""
        graph, context = self.graph, self.context
        checkpoint, config = context.checkpoint, context.checkpoint.config
        position = graph.op("Unsqueeze", "positions", graph.ints(1))  # [R,1]
        root = math.sqrt(config.d_model)
        if config.start_id is None:
            # The decoder starts from a zero embedding.
            factors = graph.op("Mul", context.started(graph), graph.constant(np.float32(root)))  # [T,1]
            factor = graph.op("Gather", half(graph, factors), position)  # [R,1,1]
        else:
            factor = graph.constant(np.float16(root))
        x = graph.op("Mul", graph.op("Gather", table, "last_ids"), factor)  # [R,1,d]
        x = graph.op("Add", x, graph.op("Gather", half(graph, context.positions(graph)), position))
        sublayers = []
        for layer in range(config.decoder_layers):
            sublayers += self._layer(layer)
        return residual_layers(graph, checkpoint, x, sublayers, last_norm="decoder_norm")

    def attention(self) -> None:
        """Output of a guided step: the alignment heads' attention of each row, averaged, f32 [B,K,S].

        Computed beside the cross-attention, because MultiHeadAttention with a mask leaves its scores
        unwritten on a GPU (onnxruntime, contrib_ops/cuda/bert/attention_impl.cu, UnfusedAttention).
        """
        graph, config = self.graph, self.context.checkpoint.config
        layer, heads = self.context.alignment_layer, self.context.checkpoint.alignment.heads
        query = graph.op(
            "Reshape", f"cross_query_{layer}", graph.ints(0, 0, config.num_heads, config.head_size)
        )
        scores = graph.op(
            "FusedMatMul",
            graph.op("Transpose", query, perm=[0, 2, 1, 3]),  # [B,H,K,D]
            f"cross_key_{layer}",
            domain=MICROSOFT,
            transB=1,
            alpha=config.head_size**-0.5,
        )  # [B,H,K,S]
        if heads is not None:
            scores = graph.op("Gather", scores, graph.ints(*heads), axis=1)
        one, hidden = graph.constant(np.float32(1)), graph.constant(np.float32(1e4))
        is_padding = graph.op("Sub", graph.op("Cast", "source_mask", to=FLOAT), one)  # 0 or -1
        mask = graph.op("Unsqueeze", graph.op("Mul", is_padding, hidden), graph.ints(1, 2))  # [B,1,1,S]
        masked = graph.op("Add", graph.op("Cast", scores, to=FLOAT), mask)
        weights = graph.op("Softmax", masked, axis=-1)
        graph.op("ReduceMean", weights, graph.ints(1), keepdims=0, name="attention")
        graph.output("attention", "attention", FLOAT, ["B", "K", "S"])

    def _layer(self, layer: int) -> list[Sublayer]:
        checkpoint, name = self.context.checkpoint, f"decoder.{layer}"
        first = self._cell if checkpoint.config.decoder_cell == "ssru" else self._self_attention
        return [
            Sublayer(f"{name}.self_norm", lambda x: first(x, layer)),
            Sublayer(f"{name}.cross_norm", lambda x: self._cross_attention(x, layer)),
            Sublayer(f"{name}.ffn_norm", lambda x: feed_forward(self.graph, checkpoint, x, f"{name}.ffn")),
        ]

    def _cell(self, x: str, layer: int) -> Product:
        # SSRU (Kim et al. 2019, eq. 3): f = sigmoid(Wf x + b); c' = f * c + (1 - f) * W x; relu(c')
        # In float32: a cell is added to at every step, and would keep every rounding.
        graph, checkpoint, name = self.graph, self.context.checkpoint, f"decoder.{layer}.cell"
        product = multiply(graph, checkpoint, x, [f"{name}.candidate", f"{name}.forget"], bias_dtype=FLOAT)
        both = graph.op("Cast", product.value, to=FLOAT)  # [R,1,2d]
        if product.bias is not None:
            both = graph.op("Add", both, product.bias)
        return Product(half(graph, graph.op("Relu", next_cell(graph, both, layer))), None)

    def _self_attention(self, x: str, layer: int) -> Product:
        graph, checkpoint, config = self.graph, self.context.checkpoint, self.context.checkpoint.config
        name = f"decoder.{layer}.self_attention"
        packed = linear(graph, checkpoint, x, self_attention_inputs(config.decoder_cell, name))
        y = cached_self_attention(
            graph, config, packed, layer, max_target_tokens=self.context.max_target_tokens
        )
        return multiply(graph, checkpoint, y, [f"{name}.output"])

    def _cross_attention(self, x: str, layer: int) -> Product:
        graph, checkpoint, config = self.graph, self.context.checkpoint, self.context.checkpoint.config
        name = f"decoder.{layer}.cross_attention"
        query = linear(graph, checkpoint, x, [f"{name}.query"])  # [R,1,d]
        is_greedy = self.kind is StepKind.GREEDY
        if not is_greedy:
            # The beams of a segment are queries to its one cross cache.
            query = graph.op("Reshape", query, "hidden_shape", name=f"cross_query_{layer}")  # [B,K,d]
        y = graph.op(
            "MultiHeadAttention",
            query,
            f"cross_key_{layer}",
            f"cross_value_{layer}",
            "",
            "source_mask",
            domain=MICROSOFT,
            num_heads=config.num_heads,
        )
        if not is_greedy:
            y = graph.op("Reshape", y, graph.ints(-1, 1, config.d_model))
        return multiply(graph, checkpoint, y, [f"{name}.output"])
