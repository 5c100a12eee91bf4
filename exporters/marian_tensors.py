"""What Marian calls its tensors, and in which order it keeps their numbers.

Names are those of marian-dev, src/models/transformer.h; ours are those of `model.transformer`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from app.errors import CheckpointError
from exporters.checkpoint import Float32Array, QuantizedWeight, Weight
from exporters.marian_binary import MarianItem, damaged
from model.config import TransformerConfig

EMBEDDING = "Wemb"

_ALPHA_SUFFIX = "_QuantMultA"
_OUTPUT_ALPHA = "none_QuantMultA"
"""The output projection's matrix is the embedding, which Marian does not name there."""


@dataclass(frozen=True)
class ImportedTensors:
    """A Marian file's tensors under our names.

    Attributes:
        weights: see `Checkpoint.weights`.
        activation_scales: see `Checkpoint.activation_scales`; the output projection's is that of
            ``embedding.weight``.
    """

    weights: dict[str, Weight] = field(default_factory=dict)
    activation_scales: dict[str, float] = field(default_factory=dict)


def convert_tensors(
    items: Mapping[str, MarianItem], config: TransformerConfig, *, source: str
) -> ImportedTensors:
    """Rename, reorder and check every tensor; ``source`` names the file in messages.

    Raises:
        CheckpointError: a tensor is absent, superfluous, or not of the shape the configuration gives.
    """
    tensors = ImportedTensors()
    used = {EMBEDDING + _ALPHA_SUFFIX}  # no multiplier: Marian quantises it along with the embedding
    for entry in _parameters(config):
        item = items.get(entry.marian_name)
        if item is None:
            raise damaged(
                source, f"there is no tensor {entry.marian_name!r}", "one, by the embedded configuration"
            )
        if item.shape != entry.marian_shape:
            raise damaged(
                source,
                f"{entry.marian_name!r} has the shape {item.shape}",
                f"{entry.marian_shape} by the embedded configuration",
            )
        used.add(entry.marian_name)
        tensors.weights[entry.name] = entry.convert(item)
        alpha_name = _OUTPUT_ALPHA if entry.marian_name == EMBEDDING else entry.marian_name + _ALPHA_SUFFIX
        if alpha_name in items and entry.convert is not _flat:
            used.add(alpha_name)
            tensors.activation_scales[entry.name] = _activation_scale(items[alpha_name])
    unused = sorted(name for name in items if name not in used and not name.startswith("special:"))
    if unused:
        raise CheckpointError(
            f"{source}: {len(unused)} tensors have no place in the model that the embedded configuration "
            f"describes ({', '.join(map(repr, unused[:3]))}), expected none; this kind of Marian model is "
            "not supported, or its depth contradicts its tensors"
        )
    return tensors


@dataclass(frozen=True)
class _Parameter:
    """One of our parameters and where Marian keeps it."""

    name: str
    marian_name: str
    marian_shape: tuple[int, int]
    convert: Callable[[MarianItem], Weight]


def _parameters(config: TransformerConfig) -> Iterator[_Parameter]:
    """All parameters of a model; Marian counts layers from 1."""
    d_model = config.d_model
    yield _Parameter("embedding.weight", EMBEDDING, (config.vocabulary_size, d_model), _embedding)
    yield _vector("output_bias", "decoder_ff_logit_out_b", config.vocabulary_size)
    for index in range(config.encoder_layers):
        ours, theirs = f"encoder.{index}", f"encoder_l{index + 1}"
        yield from _attention(f"{ours}.self_attention", f"{ours}.self_norm", f"{theirs}_self", d_model)
        yield from _feed_forward(ours, theirs, config)
    for index in range(config.decoder_layers):
        ours, theirs = f"decoder.{index}", f"decoder_l{index + 1}"
        if config.decoder_cell == "ssru":
            yield _matrix(f"{ours}.cell.candidate.weight", f"{theirs}_rnn_W", d_model, d_model)
            yield _matrix(f"{ours}.cell.forget.weight", f"{theirs}_rnn_Wf", d_model, d_model)
            yield _vector(f"{ours}.cell.forget.bias", f"{theirs}_rnn_bf", d_model)
            yield from _norm(f"{ours}.self_norm", f"{theirs}_rnn_ffn", d_model)
        else:
            yield from _attention(f"{ours}.self_attention", f"{ours}.self_norm", f"{theirs}_self", d_model)
        yield from _attention(f"{ours}.cross_attention", f"{ours}.cross_norm", f"{theirs}_context", d_model)
        yield from _feed_forward(ours, theirs, config)


def _attention(name: str, norm_name: str, marian_name: str, d_model: int) -> Iterator[_Parameter]:
    for part, letter in (("query", "q"), ("key", "k"), ("value", "v"), ("output", "o")):
        yield _matrix(f"{name}.{part}.weight", f"{marian_name}_W{letter}", d_model, d_model)
        yield _vector(f"{name}.{part}.bias", f"{marian_name}_b{letter}", d_model)
    yield from _norm(norm_name, f"{marian_name}_Wo", d_model)


def _feed_forward(name: str, marian_name: str, config: TransformerConfig) -> Iterator[_Parameter]:
    for part, number, num_in, num_out in (
        ("inner", 1, config.d_model, config.ffn_size),
        ("outer", 2, config.ffn_size, config.d_model),
    ):
        yield _matrix(f"{name}.ffn.{part}.weight", f"{marian_name}_ffn_W{number}", num_in, num_out)
        yield _vector(f"{name}.ffn.{part}.bias", f"{marian_name}_ffn_b{number}", num_out)
    yield from _norm(f"{name}.ffn_norm", f"{marian_name}_ffn_ffn", config.d_model)


def _norm(name: str, marian_name: str, d_model: int) -> Iterator[_Parameter]:
    yield _vector(f"{name}.weight", f"{marian_name}_ln_scale", d_model)
    yield _vector(f"{name}.bias", f"{marian_name}_ln_bias", d_model)


def _matrix(name: str, marian_name: str, num_in: int, num_out: int) -> _Parameter:
    return _Parameter(name, marian_name, (num_in, num_out), _linear)


def _vector(name: str, marian_name: str, size: int) -> _Parameter:
    return _Parameter(name, marian_name, (1, size), _flat)


def _linear(item: MarianItem) -> Weight:
    """A linear layer's matrix as [out, in].

    Floats are [in, out] as the shape says. The integers of intgemm8 were transposed for the
    processor when the model was converted, and the shape was not.
    """
    num_in, num_out = item.shape
    if item.type_name == "intgemm8":
        return QuantizedWeight(item.int8().reshape(num_out, num_in), _weight_scale(item))
    return np.ascontiguousarray(item.float32().T)


def _embedding(item: MarianItem) -> Weight:
    """The embedding [V, d]; it is used transposed, so its integers are in the order of its shape."""
    if item.type_name == "intgemm8":
        return QuantizedWeight(item.int8().reshape(item.shape), _weight_scale(item))
    return item.float32()


def _flat(item: MarianItem) -> Float32Array:
    return item.float32().reshape(-1)


def _weight_scale(item: MarianItem) -> Float32Array:
    return np.array(_inverse(item.quantization_multiplier(), item), dtype=np.float32)


def _activation_scale(item: MarianItem) -> float:
    """The real value of one integer step of a layer's input: 1 / alpha."""
    if item.num_elements != 1:
        raise damaged(item.source, f"{item.name!r} has the shape {item.shape}", "one number")
    return _inverse(float(item.float32().flat[0]), item)


def _inverse(multiplier: float, item: MarianItem) -> float:
    """float32(1 / multiplier), refused unless it is a positive, normal number."""
    inverse = float(np.float32(1.0 / multiplier)) if 1e-30 < multiplier < 1e30 else 0.0
    if inverse <= 0.0 or not math.isfinite(inverse):
        raise damaged(item.source, f"the multiplier of {item.name!r} is {multiplier}", "1e-30 to 1e30")
    return inverse
