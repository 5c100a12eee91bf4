"""How many multiply-adds a translation takes, from the model's sizes alone.

Counted is the work that the text asks for: no padding, no beams that died, no union of shortlists. An
engine that does more than this per second of its own time wastes less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.bundle import Manifest
from app.bundle.manifest import ModelSizes


@dataclass(frozen=True)
class MatrixProduct:
    """``[rows, inputs] x [inputs, outputs]``, done `count` times.

    Attributes:
        inputs: K.
        outputs: N.
        count: layers that have one of this shape.
    """

    inputs: int
    outputs: int
    count: int

    def multiply_adds(self, num_rows: int) -> int:
        """Of this many rows."""
        return num_rows * self.inputs * self.outputs * self.count


def encoder_products(sizes: ModelSizes) -> list[MatrixProduct]:
    """The encoder's linear layers, with the decoder's cross-attention keys and values that it makes."""
    d, layers = sizes.d_model, sizes.encoder_layers
    return [
        MatrixProduct(d, 3 * d, layers),
        MatrixProduct(d, d, layers),
        MatrixProduct(d, sizes.ffn_size, layers),
        MatrixProduct(sizes.ffn_size, d, layers),
        MatrixProduct(d, 2 * d * sizes.decoder_layers, 1),
    ]


def step_products(manifest: Manifest, *, num_outputs: int | None = None) -> list[MatrixProduct]:
    """The linear layers of one decoder step.

    Args:
        manifest: of the bundle.
        num_outputs: candidates of the output projection; None is the whole vocabulary.
    """
    sizes = manifest.sizes
    d, layers = sizes.d_model, sizes.decoder_layers
    if has_self_attention(manifest):
        products = [MatrixProduct(d, 3 * d, layers), MatrixProduct(d, d, layers)]
    else:
        products = [MatrixProduct(d, 2 * d, layers)]
    return [
        *products,
        MatrixProduct(d, d, 2 * layers),  # query and output of cross-attention
        MatrixProduct(d, sizes.ffn_size, layers),
        MatrixProduct(sizes.ffn_size, d, layers),
        MatrixProduct(d, sizes.vocabulary_size if num_outputs is None else num_outputs, 1),
    ]


def encoder_multiply_adds(sizes: ModelSizes, source_lengths: Sequence[int]) -> int:
    """Of encoding sentences of these lengths: linear layers, and ``QK`` and ``AV`` of self-attention."""
    linear = sum(product.multiply_adds(sum(source_lengths)) for product in encoder_products(sizes))
    attention = sum(2 * length * length * sizes.d_model * sizes.encoder_layers for length in source_lengths)
    return linear + attention


def decoder_multiply_adds(
    manifest: Manifest,
    *,
    source_length: int,
    num_steps: int,
    num_beams: int = 1,
    num_outputs: int | None = None,
) -> int:
    """Of decoding one sentence: linear layers, cross-attention, and self-attention over what was decoded.

    Args:
        manifest: of the bundle.
        source_length: source tokens.
        num_steps: decoder steps, one for each token of the best hypothesis.
        num_beams: rows of a step.
        num_outputs: candidates of the output projection; None is the whole vocabulary.
    """
    sizes = manifest.sizes
    linear = sum(
        product.multiply_adds(num_steps) for product in step_products(manifest, num_outputs=num_outputs)
    )
    attended = num_steps * source_length
    if has_self_attention(manifest):
        attended += num_steps * (num_steps + 1) // 2
    return num_beams * (linear + 2 * attended * sizes.d_model * sizes.decoder_layers)


def has_self_attention(manifest: Manifest) -> bool:
    """Whether the decoder looks back at its own tokens, rather than keeping a recurrent cell."""
    return any(state.kind == "kv" for state in manifest.state)
