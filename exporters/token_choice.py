"""The choice of tokens inside the graph, so that the logits never leave it."""

from __future__ import annotations

from dataclasses import dataclass

from exporters.graph_builder import GraphBuilder

CANDIDATE_BLOCK = 64
"""Candidates come in a multiple of this many, so that they split into blocks."""
MAX_CANDIDATES = 32
"""Most continuations a segment may ask for: twice the largest beam. Beam steps over a shortlist need
as many blocks of candidates."""


def choose(graph: GraphBuilder, logits: str, block: int | None) -> tuple[str, str]:
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
    logits: str,
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
        logits: f32 [R,V].
        row_scores: f32 [R], summed so far; -inf for a beam that must not be continued.
        num_candidates: i64 [1], C; at most V and at most the number of blocks.
        num_segments: i64 [1], B.
        block: a divisor of V, or None.
    """
    probabilities = graph.op("Softmax", logits, axis=-1)
    if block is None:
        values, columns = graph.ops("TopK", probabilities, num_candidates, num_outputs=2, axis=-1)  # [R,C]
    else:
        blocks = graph.op("Reshape", probabilities, graph.ints(0, -1, block))  # [R,V/b,b]
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
    summed = graph.op("Add", graph.op("Log", values), graph.op("Unsqueeze", row_scores, graph.ints(1)))
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
