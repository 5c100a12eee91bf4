"""Weights, linear layers and LayerNorm of the graphs for a GPU, in float16.

The file holds int8 weights and float32 vectors, as for every variant; they become float16 when the runtime
folds constants at load, so that this variant costs a bundle no weights of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from app.errors import CheckpointError
from exporters.checkpoint import Checkpoint, QuantizedWeight
from exporters.graph_builder import FLOAT, FLOAT16, MICROSOFT, GraphBuilder
from exporters.linear import quantized_weight, side_by_side, vector

LARGEST_FLOAT16 = float(np.finfo(np.float16).max)
"""65504."""
KEPT_IN_FLOAT32 = ("output_bias",)
"""Added to logits in float32: -1e9 there forbids a token, and would be -inf."""


def check_fits(checkpoint: Checkpoint) -> None:
    """Refuse weights that float16 cannot hold.

    Raises:
        CheckpointError: naming the first parameter that is too large, and how large it is.
    """
    for name, weight in checkpoint.weights.items():
        if name in KEPT_IN_FLOAT32:
            continue
        values = weight.to_float() if isinstance(weight, QuantizedWeight) else weight
        largest = float(np.abs(values).max(initial=0.0))
        if not largest <= LARGEST_FLOAT16:
            raise CheckpointError(
                f"{name} holds {largest:g}, and float16 ends at {LARGEST_FLOAT16:g}: this model cannot be "
                "exported as cuda-fp16; leave that variant out, or train the model with weight decay"
            )


@dataclass(frozen=True)
class Product:
    """What a linear layer multiplied, and the bias that its reader still has to add.

    Attributes:
        value: f16 [..., out].
        bias: [out], or None.
    """

    value: str
    bias: str | None


def half(graph: GraphBuilder, value: str) -> str:
    """A value cast to float16."""
    return graph.op("Cast", value, to=FLOAT16)


def embedding_table(graph: GraphBuilder, checkpoint: Checkpoint) -> str:
    """The tied embedding f16 [V,d], which rows are taken from and the output projection multiplies by."""
    embedding = quantized_weight(checkpoint, "embedding.weight")
    table = graph.op(
        "DequantizeLinear",
        graph.weight("embedding.weight", embedding.values),
        graph.weight("embedding.scale", embedding.scale),
        axis=0,
    )
    return half(graph, table)


def multiply(
    graph: GraphBuilder, checkpoint: Checkpoint, x: str, names: Sequence[str], *, bias_dtype: int = FLOAT16
) -> Product:
    """``x @ W.T`` of layers that share their input, outputs side by side; the bias is left to the reader.

    Args:
        graph: graph to extend.
        checkpoint: quantised.
        x: f16 [..., in].
        names: layer names, as for `exporters.linear.Arithmetic.linear`.
        bias_dtype: float16, or float32 for a reader that computes in it.
    """
    name, values, scales, bias = side_by_side(checkpoint, names)
    weight = graph.op(
        "DequantizeLinear",
        graph.weight(f"{name}.weight", values),
        graph.weight(f"{name}.scale", scales),
        axis=1,
    )
    y = graph.op("MatMul", x, half(graph, weight))
    if bias is None:
        return Product(y, None)
    stored_bias = graph.weight(f"{name}.bias", bias)
    return Product(y, stored_bias if bias_dtype == FLOAT else half(graph, stored_bias))


def linear(graph: GraphBuilder, checkpoint: Checkpoint, x: str, names: Sequence[str]) -> str:
    """`multiply` with the bias added, f16 [..., out]."""
    product = multiply(graph, checkpoint, x, names)
    return product.value if product.bias is None else graph.op("Add", product.value, product.bias)


def feed_forward(graph: GraphBuilder, checkpoint: Checkpoint, x: str, name: str) -> Product:
    """Position-wise feed-forward network [..., d] -> [..., d]."""
    inner = multiply(graph, checkpoint, x, [f"{name}.inner"])
    activation = checkpoint.config.activation
    if activation == "gelu" and inner.bias is not None:
        y = graph.op("BiasGelu", inner.value, inner.bias, domain=MICROSOFT)
    else:
        y = inner.value if inner.bias is None else graph.op("Add", inner.value, inner.bias)
        if activation == "relu":
            y = graph.op("Relu", y)
        elif activation == "gelu":
            y = graph.op("Gelu", y, domain=MICROSOFT)
        else:
            y = graph.op("QuickGelu", y, domain=MICROSOFT, alpha=1.0)  # x * sigmoid(x)
    return multiply(graph, checkpoint, y, [f"{name}.outer"])


@dataclass(frozen=True)
class Sublayer:
    """One residual branch.

    Attributes:
        norm: name of its LayerNorm.
        body: f16 [..., d] -> what is added to the residual.
    """

    norm: str
    body: Callable[[str], Product]


def residual_layers(
    graph: GraphBuilder, checkpoint: Checkpoint, x: str, sublayers: Sequence[Sublayer], *, last_norm: str
) -> str:
    """All sub-layers of a stack with their residual connections, f16 [N,S,d] -> [N,S,d].

    Every residual sum is normalised right away, after its own sub-layer's LayerNorm or before the next one's:
    both are one SkipLayerNormalization, which also adds the bias of the layer that came before.

    Args:
        graph: graph to extend.
        checkpoint: weights.
        x: f16 [N,S,d].
        sublayers: in order.
        last_norm: the LayerNorm behind the stack; post-norm models have none.
    """
    if checkpoint.config.norm == "post":
        for sublayer in sublayers:
            x = _add_and_norm(graph, checkpoint, x, sublayer.body(x), sublayer.norm)
        return x
    norms = [*(sublayer.norm for sublayer in sublayers), last_norm]
    normed = graph.op(
        "LayerNormalization",
        x,
        *_norm_vectors(graph, checkpoint, norms[0]),
        epsilon=checkpoint.config.layer_norm_epsilon,
    )
    for sublayer, norm in zip(sublayers, norms[1:], strict=True):
        total = f"{norm}.sum"
        normed = _add_and_norm(graph, checkpoint, x, sublayer.body(normed), norm, total=total)
        x = total
    return normed


def _add_and_norm(
    graph: GraphBuilder, checkpoint: Checkpoint, x: str, product: Product, norm: str, *, total: str = ""
) -> str:
    """LayerNorm of ``x + product``, f16 [N,S,d]; the sum itself is called `total` if that is given."""
    names = [f"{norm}.output", *(["", "", total] if total else [])]
    return graph.ops(
        "SkipLayerNormalization",
        x,
        product.value,
        *_norm_vectors(graph, checkpoint, norm),
        *([product.bias] if product.bias else []),
        num_outputs=len(names),
        domain=MICROSOFT,
        names=names,
        epsilon=checkpoint.config.layer_norm_epsilon,
    )[0]


def _norm_vectors(graph: GraphBuilder, checkpoint: Checkpoint, norm: str) -> list[str]:
    """Scale and bias of a LayerNorm, each f16 [d]."""
    names = [f"{norm}.{part}" for part in ("weight", "bias")]
    return [half(graph, graph.weight(name, vector(checkpoint, name))) for name in names]
