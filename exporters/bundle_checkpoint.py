"""The way back: the checkpoint that a bundle was exported from, read out of its graphs.

What an export folds in for good, and so does not come back:

* the bias of the unknown piece, which is -1e9 in every bundle (`exporters.export.without_unknown`);
* float weights that the export rounded to int8: their int8 values and scales come back, bit for bit;
* activation scales beyond float32;
* dropout, which no bundle needs: the configuration's default stands in its place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from app.bundle import Bundle
from app.bundle.manifest import Manifest
from app.bundle.onnx_paths import external_files
from app.decoding.shortlist import Shortlist
from app.errors import CheckpointError
from exporters.checkpoint import AlignmentHeads, Checkpoint, Float32Array, Int8Array, QuantizedWeight, Weight
from exporters.sublayers import self_attention_inputs
from model.config import Activation, DecoderCell, PositionLayout, TransformerConfig
from model.saved_model import parameter_shapes

_ACTIVATION_OF: Mapping[str, Activation] = {"Relu": "relu", "Gelu": "gelu", "Sigmoid": "silu"}
_NORM = "SimplifiedLayerNormalization"


def read_checkpoint(bundle: Bundle) -> Checkpoint:
    """Read the weights, scales and choices out of a bundle's graphs.

    The weights come from the cpu-fp32 graphs, which every export writes, the activation scales from the
    cpu-int8 graphs if there are any. Exporting the result with the same options gives the same files.

    Args:
        bundle: opened and thereby verified.

    Raises:
        CheckpointError: the graphs are not as this version of dragoman exports them.
    """
    fp32 = bundle.manifest.variants.get("cpu-fp32")
    if fp32 is None:
        raise CheckpointError(
            f"bundle {bundle.manifest.id} has no cpu-fp32 graphs, whose weights would be read; export the "
            "model again with that variant"
        )
    encoder, step = _Graph.read(bundle, fp32.encoder), _Graph.read(bundle, fp32.step)
    config = _config(bundle, encoder, step)
    shortlist = bundle.manifest.shortlist
    return Checkpoint(
        config=config,
        weights=_weights(config, encoder, step),
        tokenizer=bundle.file(bundle.manifest.tokenizer).read_bytes(),
        activation_scales=_activation_scales(bundle, config),
        shortlist=None if shortlist is None else Shortlist.load(bundle.file(shortlist)),
        unknown_id=bundle.manifest.tokens.unknown_id,
        alignment=_alignment(bundle, config),
        provenance=dict(bundle.manifest.provenance),
    )


@dataclass(frozen=True)
class _Graph:
    """One graph file, its tensors not yet read.

    Attributes:
        path: the file.
        nodes: in graph order.
        tensors: initializers by name.
        producer_of: the node that computes a value.
    """

    path: Path
    nodes: Sequence[onnx.NodeProto]
    tensors: Mapping[str, TensorProto]
    producer_of: Mapping[str, onnx.NodeProto] = field(repr=False)

    @classmethod
    def read(cls, bundle: Bundle, name: str) -> _Graph:
        path = bundle.file(name)
        raw = path.read_bytes()
        try:
            for location in external_files(raw):
                bundle.file(location)  # recorded, hence inside the folder and verified
        except ValueError as error:
            raise CheckpointError(
                f"{path} is not an ONNX graph; restore it or export the model again"
            ) from error
        graph = onnx.load_model_from_string(raw).graph
        return cls(
            path,
            list(graph.node),
            {tensor.name: tensor for tensor in graph.initializer},
            {output: node for node in graph.node for output in node.output if output},
        )

    def fault(self, found: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: {found}, so it was not exported by this version of dragoman; export the model "
            "again"
        )

    def tensor(self, name: str) -> npt.NDArray[Any]:
        if name not in self.tensors:
            raise self.fault(f"there is no tensor {name}")
        try:
            return numpy_helper.to_array(self.tensors[name], base_dir=str(self.path.parent))
        except (ValueError, onnx.checker.ValidationError) as error:
            raise self.fault(f"the tensor {name} cannot be read ({type(error).__name__})") from error

    def attribute(self, node: onnx.NodeProto, name: str) -> Any:
        for attribute in node.attribute:
            if attribute.name == name:
                return helper.get_attribute_value(attribute)
        raise self.fault(f"a node {node.op_type} has no {name}")

    def stored_weight(self, value: str) -> str:
        """Name of the tensor that a multiplication's right side was made of when the graph is loaded."""
        while value not in self.tensors:
            if value not in self.producer_of:
                raise self.fault(f"the weight {value} is computed from no tensor")
            value = self.producer_of[value].input[0]
        return value


def _config(bundle: Bundle, encoder: _Graph, step: _Graph) -> TransformerConfig:
    manifest = bundle.manifest
    found = {_ACTIVATION_OF[node.op_type] for node in encoder.nodes if node.op_type in _ACTIVATION_OF}
    if len(found) != 1:
        raise encoder.fault(f"{len(found)} non-linearities stand where 1 is expected")
    norm = next((node for node in encoder.nodes if node.op_type == _NORM), None)
    if norm is None:
        raise encoder.fault(f"there is no {_NORM}")
    sizes = manifest.sizes
    cell, decoder_query_heads = _decoder_cell(manifest, step)
    return TransformerConfig(
        vocabulary_size=sizes.vocabulary_size,
        d_model=sizes.d_model,
        num_heads=sizes.num_heads,
        encoder_layers=sizes.encoder_layers,
        decoder_layers=sizes.decoder_layers,
        ffn_size=sizes.ffn_size,
        activation=found.pop(),
        norm="pre" if "encoder_norm.weight" in encoder.tensors else "post",
        positions=_position_layout(encoder, sizes.d_model),
        decoder_cell=cell,
        decoder_query_heads=decoder_query_heads,
        # The shortest decimal of the graph's float32: 1e-06, not 9.99999997e-07.
        layer_norm_epsilon=float(str(np.float32(encoder.attribute(norm, "epsilon")))),
        eos_id=manifest.tokens.eos_id,
        start_id=manifest.tokens.start_id,
    )


def _decoder_cell(manifest: Manifest, step: _Graph) -> tuple[DecoderCell, int | None]:
    """What stands first in each decoder layer, and how many of its heads look if not as many as elsewhere."""
    if manifest.state[0].kind == "cell":
        return "ssru", None
    attention = next((node for node in step.nodes if node.op_type == "GroupQueryAttention"), None)
    if attention is None:
        raise step.fault("there is no GroupQueryAttention")
    num_query_heads = int(step.attribute(attention, "num_heads"))
    gated = self_attention_inputs("gated_attention", "decoder.0.self_attention")
    return (
        "gated_attention" if f"{_stored_name(gated)}.weight" in step.tensors else "attention",
        None if num_query_heads == manifest.sizes.num_heads else num_query_heads,
    )


def _position_layout(encoder: _Graph, d_model: int) -> PositionLayout:
    """The layout whose frequencies the graph holds (`exporters.sublayers.position_codes`)."""
    half = d_model // 2
    # A second feature has the first one's frequency in one layout, the next lower one in the other.
    frequencies = encoder.tensor("position_frequencies")
    if frequencies.shape != (d_model,):
        raise encoder.fault(f"position_frequencies has the shape {list(frequencies.shape)}")
    if half == 1 or frequencies[0] == frequencies[1]:
        return "interleaved"
    if frequencies[0] == frequencies[half] and math.isclose(frequencies[half - 1], 1e-4):
        return "halves"
    raise encoder.fault("the position codes are of no known layout")


def _encoder_groups(config: TransformerConfig) -> Iterator[tuple[str, ...]]:
    """Layers that the encoder graph multiplies together, as `exporters.graphs` lays them side by side."""
    for layer in range(config.encoder_layers):
        name = f"encoder.{layer}"
        yield tuple(f"{name}.self_attention.{part}" for part in ("query", "key", "value"))
        yield from ((f"{name}.{part}",) for part in ("self_attention.output", "ffn.inner", "ffn.outer"))
    yield tuple(
        f"decoder.{layer}.cross_attention.{part}"
        for layer in range(config.decoder_layers)
        for part in ("key", "value")
    )


def _step_groups(config: TransformerConfig) -> Iterator[tuple[str, ...]]:
    """Likewise of the step graphs, as in `exporters.step_graphs`."""
    for layer in range(config.decoder_layers):
        name = f"decoder.{layer}"
        if config.decoder_cell == "ssru":
            yield (f"{name}.cell.candidate", f"{name}.cell.forget")
        else:
            yield self_attention_inputs(config.decoder_cell, f"{name}.self_attention")
            yield (f"{name}.self_attention.output",)
        for part in ("cross_attention.query", "cross_attention.output", "ffn.inner", "ffn.outer"):
            yield (f"{name}.{part}",)


def _stored_name(group: Sequence[str]) -> str:
    """What `exporters.linear.side_by_side` calls the group's tensors."""
    return group[0] if len(group) == 1 else f"{group[0]}+{len(group) - 1}"


def _weights(config: TransformerConfig, encoder: _Graph, step: _Graph) -> dict[str, Weight]:
    shapes = parameter_shapes(config)
    weights: dict[str, Weight] = {
        "embedding.weight": QuantizedWeight(
            _shaped(step, "embedding.weight", shapes["embedding.weight"], np.int8),
            _embedding_scale(step, config),
        )
    }
    for graph, groups in ((encoder, _encoder_groups(config)), (step, _step_groups(config))):
        for group in groups:
            weights |= _group_weights(graph, group, shapes)
    for name in shapes.keys() - weights.keys():
        graph = encoder if name.startswith("encoder") else step
        weights[name] = _shaped(graph, name, shapes[name], np.float32)
    return {name: weights[name] for name in shapes}


def _group_weights(
    graph: _Graph, group: Sequence[str], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Weight]:
    """The weights and biases of layers whose outputs lie side by side."""
    stored = _stored_name(group)
    num_in = shapes[f"{group[0]}.weight"][1]
    num_out = [shapes[f"{name}.weight"][0] for name in group]
    total = sum(num_out)
    values: Int8Array = _shaped(graph, f"{stored}.weight", (num_in, total), np.int8)
    scales: Float32Array = _shaped(graph, f"{stored}.scale", (total,), np.float32)
    biases = np.zeros(total, np.float32)  # a bias that is zero everywhere is not stored
    if f"{stored}.bias" in graph.tensors:
        biases = _shaped(graph, f"{stored}.bias", (total,), np.float32)
    weights: dict[str, Weight] = {}
    ends = np.cumsum(num_out)
    for name, start, end in zip(group, ends - num_out, ends, strict=True):
        scale = scales[start:end]
        # One scale for a whole matrix, as importers bring it, was repeated for every row.
        scale = scale[0].reshape(()) if (scale == scale[0]).all() else scale
        weights[f"{name}.weight"] = QuantizedWeight(
            np.ascontiguousarray(values[:, start:end].T), scale.copy()
        )
        if f"{name}.bias" in shapes:
            weights[f"{name}.bias"] = biases[start:end].copy()
        elif biases[start:end].any():
            raise graph.fault(f"{name} has a bias")
    return weights


def _embedding_scale(step: _Graph, config: TransformerConfig) -> Float32Array:
    scale = step.tensor("embedding.scale")
    return _shaped(step, "embedding.scale", () if scale.ndim == 0 else (config.vocabulary_size,), np.float32)


def _shaped(graph: _Graph, name: str, shape: tuple[int, ...], dtype: type[np.generic]) -> npt.NDArray[Any]:
    values = graph.tensor(name)
    if values.shape != shape or values.dtype != dtype:
        raise graph.fault(
            f"{name} is {values.dtype} {list(values.shape)}, expected {np.dtype(dtype)} {list(shape)}"
        )
    return values.copy()


def _activation_scales(bundle: Bundle, config: TransformerConfig) -> dict[str, float]:
    """The static scales of the cpu-int8 graphs, by the names of their weights."""
    int8 = bundle.manifest.variants.get("cpu-int8")
    if int8 is None:
        return {}
    layers_of = {_stored_name(group): group for group in (*_encoder_groups(config), *_step_groups(config))}
    scales: dict[str, float] = {}
    for name in (int8.encoder, int8.step):
        graph = _Graph.read(bundle, name)
        for node in graph.nodes:
            if node.op_type != "MatMulIntegerToFloat":
                continue
            stored = graph.stored_weight(node.input[1]).removesuffix(".weight")
            scale = _static_scale(graph, node)
            if scale is not None:
                scales.update((f"{layer}.weight", scale) for layer in layers_of.get(stored, (stored,)))
    if unknown := scales.keys() - parameter_shapes(config).keys():
        raise CheckpointError(
            f"bundle {bundle.manifest.id} multiplies by {min(unknown)}, which the model has not; export it "
            "again"
        )
    return scales


def _static_scale(graph: _Graph, multiplication: onnx.NodeProto) -> float | None:
    """The constant that a multiplication's left side was quantised with; None if each row has its own."""
    quantizer = graph.producer_of.get(multiplication.input[0])
    if quantizer is None or quantizer.op_type != "QuantizeLinear":
        raise graph.fault("the left side of a multiplication is not quantised")
    left = graph.producer_of.get(quantizer.input[0])
    if left is not None and left.op_type == "Div":  # by the row's own scale
        return None
    scale = float(graph.tensor(quantizer.input[1]))
    # Without negative values the step was made smaller: exporters.int8_arithmetic, after_relu.
    return scale if int(graph.tensor(quantizer.input[2])) else scale * 255 / 127


def _alignment(bundle: Bundle, config: TransformerConfig) -> AlignmentHeads:
    """Layer and heads whose attention the guided step returns."""
    guided = bundle.manifest.variants["cpu-fp32"].guided_step
    if guided is None:
        return AlignmentHeads()
    graph = _Graph.read(bundle, guided)
    for layer in range(config.decoder_layers):
        if f"cross_scores_{layer}" not in graph.producer_of:
            continue
        heads = None
        (softmax,) = (node for node in graph.nodes if f"cross_scores_{layer}" in node.input)
        (reader,) = (node for node in graph.nodes if softmax.output[0] in node.input)
        if reader.op_type == "Gather":
            heads = tuple(int(head) for head in graph.tensor(reader.input[1]))
        return AlignmentHeads(layer=-1 if layer == config.decoder_layers - 1 else layer, heads=heads)
    raise graph.fault("no cross-attention tells its scores")
