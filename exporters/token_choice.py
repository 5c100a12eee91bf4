"""The choice of tokens inside the graph, so that the logits never leave it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from exporters.graph_builder import GraphBuilder

CANDIDATE_BLOCK = 64
"""Candidates come in a multiple of this many, so that they split into blocks."""
MAX_CANDIDATES = 32
"""Most continuations a segment may ask for: twice the largest beam. Beam steps over a shortlist need
as many blocks of candidates."""


def adjusted(graph: GraphBuilder, logits: str, *, columns: str, divisors: str, addends: str) -> str:
    """Logits f32 [R,N] with M of them changed, so that no one else's row is touched.

    A logit x becomes ``min(x / divisor, x * divisor) + addend``. With a divisor r >= 1 that is the repetition
    penalty of Keskar et al. 2019 (CTRL, section 4.1) as it is used for logits of either sign: x / r above 0,
    x * r below. An addend of -1e9 forbids a token.

    Args:
        graph: graph to extend.
        logits: f32 [R,N].
        columns: i64 [M,2], row and column, each pair once.
        divisors: f32 [M], at least 1.
        addends: f32 [M].
    """
    before = graph.op("GatherND", logits, columns)  # [M]
    penalised = graph.op("Min", graph.op("Div", before, divisors), graph.op("Mul", before, divisors))
    return graph.op("ScatterND", logits, columns, graph.op("Add", penalised, addends))


def without_forbidden(graph: GraphBuilder, logits: str, log_probs: str) -> str:
    """Log-probabilities [R,N] with -1e9 wherever the logit was pushed below -1e8.

    The softmax alone does not see to that: where a row may say nothing, it shares all probability among
    what is forbidden.
    """
    is_forbidden = graph.op("Less", logits, graph.constant(np.float32(-1e8)))
    return graph.op("Where", is_forbidden, graph.constant(np.float32(-1e9)), log_probs)


def choose(graph: GraphBuilder, log_probs: str, block: int | None) -> tuple[str, str]:
    """The first largest of log-probabilities [R,V]: its index i64 [R] and its value f32 [R].

    ArgMax over a long row is slow on the CPU provider: the maximum of every block is taken first
    (vectorised), then the first block that holds the largest, then the first index in that block.
    """
    if block is None:
        largest = graph.op("ReduceMax", log_probs, graph.ints(-1), keepdims=0)
        return graph.op("ArgMax", log_probs, axis=-1, keepdims=0), largest
    blocks = graph.op("Reshape", log_probs, graph.ints(0, -1, block))  # [R,V/b,b]
    maxima = graph.op("ReduceMax", blocks, graph.ints(-1), keepdims=0)  # [R,V/b]
    block_index = graph.op("ArgMax", maxima, axis=-1, keepdims=1)  # [R,1]
    winners = graph.op("GatherND", blocks, block_index, batch_dims=1)  # [R,b]
    within = graph.op("ArgMax", winners, axis=-1, keepdims=0)  # [R]
    first = graph.op("Mul", graph.op("Squeeze", block_index, graph.ints(1)), graph.ints(block))
    return graph.op("Add", first, within), graph.op("ReduceMax", maxima, graph.ints(-1), keepdims=0)


@dataclass(frozen=True)
class Continuations:
    """The best continuations of every segment, best first.

    Attributes:
        indices: i64 [B,C], column of the logits.
        beams: i64 [B,C], which of the segment's beams is continued.
        scores: f32 [B,C], summed log-probabilities.
    """

    indices: str
    beams: str
    scores: str


def best_continuations(
    graph: GraphBuilder,
    log_probs: str,
    row_scores: str,
    num_candidates: str,
    num_segments: str,
    block: int | None,
) -> Continuations:
    """The C best of all beams' continuations, by summed log-probability.

    Each row's C best are found first: the C best of a segment are among them. Within a row they are
    found by blocks, as in `choose`: the C largest values lie in the C blocks of largest maxima.

    Args:
        graph: graph to extend.
        log_probs: f32 [R,V].
        row_scores: f32 [R], summed so far; -inf for a beam that must not be continued.
        num_candidates: i64 [1], C; at most V and at most the number of blocks.
        num_segments: i64 [1], B.
        block: a divisor of V, or None.
    """
    if block is None:
        values, columns = graph.ops("TopK", log_probs, num_candidates, num_outputs=2, axis=-1)  # [R,C]
    else:
        blocks = graph.op("Reshape", log_probs, graph.ints(0, -1, block))  # [R,V/b,b]
        maxima = graph.op("ReduceMax", blocks, graph.ints(-1), keepdims=0)  # [R,V/b]
        _, block_indices = graph.ops("TopK", maxima, num_candidates, num_outputs=2, axis=-1)  # [R,C]
        winners = graph.op(
            "GatherND", blocks, graph.op("Unsqueeze", block_indices, graph.ints(2)), batch_dims=1
        )  # [R,C,b]
        values, flat = graph.ops(
            "TopK", graph.op("Flatten", winners, axis=1), num_candidates, num_outputs=2, axis=-1
        )  # [R,C]
        width = graph.ints(block)
        block_of = graph.op("GatherElements", block_indices, graph.op("Div", flat, width), axis=1)
        columns = graph.op("Add", graph.op("Mul", block_of, width), graph.op("Mod", flat, width))
    summed = graph.op("Add", values, graph.op("Unsqueeze", row_scores, graph.ints(1)))
    shape = graph.op("Concat", num_segments, graph.ints(-1), axis=0)
    scores, order = graph.ops(
        "TopK", graph.op("Reshape", summed, shape), num_candidates, num_outputs=2, axis=-1
    )  # [B,C] of [B,K*C]
    return Continuations(
        indices=graph.op("GatherElements", graph.op("Reshape", columns, shape), order, axis=1),
        beams=graph.op("Div", order, num_candidates),
        scores=scores,
    )


def block_size(vocabulary_size: int, *, min_blocks: int = 1) -> int | None:
    """The divisor of V nearest to its square root, or None when V has none worth the detour."""
    root = vocabulary_size**0.5
    divisors = [b for b in range(16, 1025) if vocabulary_size % b == 0 and vocabulary_size // b >= min_blocks]
    return min(divisors, key=lambda b: abs(b - root)) if divisors else None
