"""Pieces that the encoder and the decoder graph share."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from typing import Protocol

import numpy as np

from exporters.checkpoint import Checkpoint
from exporters.graph_builder import MICROSOFT, GraphBuilder
from exporters.linear import Arithmetic, quantized_weight, vector
from model.config import DecoderCell, TransformerConfig


def position_codes(graph: GraphBuilder, checkpoint: Checkpoint, num_positions: int) -> str:
    """Sinusoidal position codes f32 [P,d].

    "interleaved": PE(p, 2i) = sin(p / 10000^(2i/d)), PE(p, 2i+1) = cos(...) (Vaswani et al. 2017,
    section 3.5). "halves": all sines, then all cosines, with exponent i / (d/2 - 1) (Marian's
    ``SinusoidalPositionEmbeddings``, src/graph/node_initializers.cpp).

    Only the frequencies are stored: the runtime folds these nodes into the table when it loads the
    graph, which keeps 0.4 MB out of every bundle. In float64, since a float32 angle of 300 radians
    is wrong in the fifth digit. cos(a) is written sin(a + pi/2).
    """
    d_model, layout = checkpoint.config.d_model, checkpoint.config.positions
    half = d_model // 2
    divisor = half if layout == "interleaved" else half - 1
    # Rounded correctly, not by a library's exp, whose last digit depends on the CPU: a bundle shall not.
    exponents = [-math.log(10000.0) * index / divisor for index in range(half)]
    frequencies = np.array([float(Decimal(exponent).exp()) for exponent in exponents])
    phases = np.array([0.0, math.pi / 2])
    if layout == "interleaved":
        frequencies, phases = np.repeat(frequencies, 2), np.tile(phases, half)
    else:
        frequencies, phases = np.tile(frequencies, 2), np.repeat(phases, half)
    angles = graph.op("Mul", _every(graph, num_positions), graph.weight("position_frequencies", frequencies))
    shifted = graph.op("Add", angles, graph.weight("position_phases", phases))
    return graph.op("Cast", graph.op("Sin", shifted), to=1)


def started(graph: GraphBuilder, num_positions: int) -> str:
    """min(position, 1), f32 [P,1]; made when the graph is loaded, as the position codes are."""
    return graph.op(
        "Cast", graph.op("Min", _every(graph, num_positions), graph.constant(np.float64(1))), to=1
    )


def _every(graph: GraphBuilder, num_positions: int) -> str:
    """All positions, f64 [P,1]."""
    every = graph.op(
        "Range",
        graph.constant(np.float64(0)),
        graph.constant(np.float64(num_positions)),
        graph.constant(np.float64(1)),
    )
    return graph.op("Unsqueeze", every, graph.ints(1))


class Normalise(Protocol):
    """LayerNorm by name: x f32 [..., d] -> [..., d]."""

    def __call__(self, graph: GraphBuilder, checkpoint: Checkpoint, x: str, name: str) -> str:
        """Extend the graph."""
        ...


def norm_of_rows(graph: GraphBuilder, checkpoint: Checkpoint, x: str, name: str) -> str:
    """LayerNorm of x [R,1,d]: each row is the one channel of an instance.

    InstanceNormalization is vectorised, and two nodes less than `layer_norm` needs: 4 of 28 us for one
    row (benchmarks/README.md).
    """
    one, zero = graph.constant(np.ones(1, np.float32)), graph.constant(np.zeros(1, np.float32))
    normed = graph.op("InstanceNormalization", x, one, zero, epsilon=checkpoint.config.layer_norm_epsilon)
    scaled = graph.op("Mul", normed, graph.weight(f"{name}.weight", vector(checkpoint, f"{name}.weight")))
    return graph.op("Add", scaled, graph.weight(f"{name}.bias", vector(checkpoint, f"{name}.bias")))


def layer_norm(graph: GraphBuilder, checkpoint: Checkpoint, x: str, name: str) -> str:
    """LayerNorm of x [..., d], written as centring followed by an RMS norm.

    The CPU provider's LayerNormalization is scalar; this form gives the same values and is about
    five times as fast (docs/decisions).
    """
    centred = graph.op("Sub", x, graph.op("ReduceMean", x, graph.ints(-1), keepdims=1))
    normed = graph.op(
        "SimplifiedLayerNormalization",
        centred,
        graph.weight(f"{name}.weight", vector(checkpoint, f"{name}.weight")),
        axis=-1,
        epsilon=checkpoint.config.layer_norm_epsilon,
    )
    return graph.op("Add", normed, graph.weight(f"{name}.bias", vector(checkpoint, f"{name}.bias")))


def sublayer(
    graph: GraphBuilder,
    checkpoint: Checkpoint,
    x: str,
    norm: str,
    body: Callable[[str], str],
    *,
    normalise: Normalise,
) -> str:
    """Residual connection and LayerNorm around a sub-layer, after it or before it."""
    if checkpoint.config.norm == "post":
        return normalise(graph, checkpoint, graph.op("Add", x, body(x)), norm)
    return graph.op("Add", x, body(normalise(graph, checkpoint, x, norm)))


def feed_forward(
    graph: GraphBuilder, checkpoint: Checkpoint, arithmetic: Arithmetic, x: str, name: str
) -> str:
    """Position-wise feed-forward network [..., d] -> [..., d]."""
    inner = arithmetic.linear(graph, x, [f"{name}.inner"])
    activation = checkpoint.config.activation
    if activation == "relu":
        return arithmetic.linear(graph, inner, [f"{name}.outer"], after_relu=True)
    if activation == "gelu":
        inner = graph.op("Gelu", inner, domain=MICROSOFT)
    else:
        inner = graph.op("Mul", inner, graph.op("Sigmoid", inner))
    return arithmetic.linear(graph, inner, [f"{name}.outer"])


def embed(graph: GraphBuilder, checkpoint: Checkpoint, ids: str) -> str:
    """Word embeddings times sqrt(d), float32 [..., d] of ids [...]; the table stays int8."""
    embedding = quantized_weight(checkpoint, "embedding.weight")
    root = np.float32(math.sqrt(checkpoint.config.d_model))
    rows = graph.op("Gather", graph.weight("embedding.weight", embedding.values), ids)
    if embedding.scale.ndim == 0:
        return graph.op("DequantizeLinear", rows, graph.constant(np.float32(embedding.scale * root)))
    # Multiplied and turned into a column once, when the graph is loaded.
    scales = graph.op("Mul", graph.weight("embedding.scale", embedding.scale), graph.constant(root))
    scale = graph.op("Gather", graph.op("Unsqueeze", scales, graph.ints(1)), ids)  # [...,1]
    return graph.op("Mul", graph.op("Cast", rows, to=1), scale)


def next_cell(graph: GraphBuilder, both: str, layer: int) -> str:
    """The SSRU cell after a step, ``next_cell_{layer}``, float32 [R,1,d].

    Kim et al. 2019, equation 3: f = sigmoid(Wf x + b); c' = f * c + (1 - f) * W x.

    Args:
        graph: graph to extend, with an input ``cell_{layer}``.
        both: W x and Wf x + b side by side, float32 [R,1,2d].
        layer: of the decoder.
    """
    candidate, forget = graph.split(both, 2)  # each [R,1,d]
    kept = graph.op("Mul", graph.op("Sigmoid", forget), graph.op("Sub", f"cell_{layer}", candidate))
    return graph.op("Add", candidate, kept, name=f"next_cell_{layer}")


def self_attention_inputs(cell: DecoderCell, name: str) -> tuple[str, ...]:
    """The linear layers of a decoder self-attention that read its input, as they lie side by side."""
    gate = ("gate",) if cell == "gated_attention" else ()
    return tuple(f"{name}.{part}" for part in ("query", "key", "value", *gate))


def cached_self_attention(
    graph: GraphBuilder, config: TransformerConfig, packed: str, layer: int, *, max_target_tokens: int
) -> str:
    """Attention of each row to what it has decoded, [R,1,G*d]; writes its key and value at its position.

    Args:
        graph: graph to extend, with inputs ``self_key_{layer}``, ``self_value_{layer}`` and ``positions``.
        config: of the model.
        packed: `self_attention_inputs` side by side: queries [R,1,G*d], a key and a value of d, and, with a
            gate, G*d more.
        layer: of the decoder.
        max_target_tokens: T of the caches.
    """
    gate = None
    if config.decoder_cell == "gated_attention":
        width = config.num_query_heads * config.head_size
        packed, gate = graph.split_off(packed, width + 2 * config.d_model, width)
    attended = graph.ops(
        "GroupQueryAttention",
        packed,
        "",
        "",
        f"self_key_{layer}",
        f"self_value_{layer}",
        "positions",
        # Each row reads as far as its own position; this is only the most that any may have.
        graph.int32(max_target_tokens),
        num_outputs=3,
        domain=MICROSOFT,
        names=[f"self_attention_{layer}", f"next_self_key_{layer}", f"next_self_value_{layer}"],
        num_heads=config.num_query_heads,
        kv_num_heads=config.num_heads,
    )[0]
    return attended if gate is None else graph.op("Mul", attended, graph.op("Sigmoid", gate))
