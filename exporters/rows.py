"""How the rows of a decoder step belong to segments: one each, or K beams side by side."""

from __future__ import annotations

from typing import Protocol

from exporters.graph_builder import GraphBuilder


class Rows(Protocol):
    """Turns row-wise tensors into segment-wise ones and back."""

    @property
    def num_segments(self) -> str:
        """i64 [1], B."""
        ...

    def by_segment(self, x: str) -> str:
        """[R,1,d] -> [B,K,d]: the beams of a segment as queries to its one cross cache."""
        ...

    def flat(self, x: str) -> str:
        """[B,K,d] -> [R,1,d]."""
        ...

    def add_by_segment(self, logits: str, addend: str) -> str:
        """Add to logits [R,N] an addend [B,N], the same for all beams of a segment -> [R,N]."""
        ...


class GreedyRows:
    """One row a segment: R = B."""

    def __init__(self, graph: GraphBuilder) -> None:
        """Work in `graph`."""
        self._graph = graph

    @property
    def num_segments(self) -> str:
        """See `Rows.num_segments`; greedy steps do not need it."""
        raise NotImplementedError

    def by_segment(self, x: str) -> str:
        """See `Rows.by_segment`."""
        return x

    def flat(self, x: str) -> str:
        """See `Rows.flat`."""
        return x

    def add_by_segment(self, logits: str, addend: str) -> str:
        """See `Rows.add_by_segment`."""
        return self._graph.op("Add", logits, addend)


class BeamRows:
    """K rows a segment: R = B x K, K known only when the graph runs."""

    def __init__(self, graph: GraphBuilder, d_model: int) -> None:
        """Work in `graph`, whose source_mask has B rows."""
        self._graph = graph
        self._d_model = d_model
        self.num_segments = graph.op("Shape", "source_mask", start=0, end=1)  # [1]

    def by_segment(self, x: str) -> str:
        """See `Rows.by_segment`."""
        graph = self._graph
        shape = graph.op("Concat", self.num_segments, graph.ints(-1, self._d_model), axis=0)
        return graph.op("Reshape", x, shape)

    def flat(self, x: str) -> str:
        """See `Rows.flat`."""
        return self._graph.op("Reshape", x, self._graph.ints(-1, 1, self._d_model))

    def add_by_segment(self, logits: str, addend: str) -> str:
        """See `Rows.add_by_segment`."""
        graph = self._graph
        width = graph.op("Shape", addend, start=1, end=2)
        shape = graph.op("Concat", self.num_segments, graph.ints(-1), width, axis=0)
        by_segment = graph.op("Reshape", logits, shape)  # [B,K,N]
        summed = graph.op("Add", by_segment, graph.op("Unsqueeze", addend, graph.ints(1)))
        return graph.op("Reshape", summed, graph.op("Concat", graph.ints(-1), width, axis=0))
