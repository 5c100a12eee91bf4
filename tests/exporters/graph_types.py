"""Shape inference through operators that onnx does not know."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
from onnx import helper, shape_inference

Dim = int | str | None


def inferred(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with every value's type, by onnx's strict inference; contributed operators are told here.

    Raises:
        onnx.shape_inference.InferenceError: the graph contradicts itself or what it declares.
    """
    model = onnx.ModelProto.FromString(model.SerializeToString())
    waiting = [node for node in model.graph.node if node.domain]
    while True:
        known = _values(shape_inference.infer_shapes(model, check_type=True, data_prop=True))
        ready = [node for node in waiting if all(name in known for name in node.input if name)]
        if not ready:
            break
        for node in ready:
            _declare_outputs(model.graph, node, known)
        waiting = [node for node in waiting if node not in ready]
    assert not waiting, [node.op_type for node in waiting]
    return shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)


def element_types(model: onnx.ModelProto) -> dict[str, int]:
    """Element type of every value of a model from `inferred`."""
    types = {name: value.type.tensor_type.elem_type for name, value in _values(model).items()}
    return types | {tensor.name: tensor.data_type for tensor in model.graph.initializer}


def rank_of_values(model: onnx.ModelProto) -> dict[str, int]:
    """Number of axes of every computed value that has a shape."""
    return {
        name: len(value.type.tensor_type.shape.dim)
        for name, value in _values(model).items()
        if value.type.tensor_type.HasField("shape")
    }


def _values(model: onnx.ModelProto) -> dict[str, onnx.ValueInfoProto]:
    graph = model.graph
    stored = {
        tensor.name: helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
        for tensor in graph.initializer
    }
    return stored | {value.name: value for value in (*graph.input, *graph.output, *graph.value_info)}


def _declare_outputs(
    graph: onnx.GraphProto, node: onnx.NodeProto, known: dict[str, onnx.ValueInfoProto]
) -> None:
    dims = [_dims(known[name]) if name else [] for name in node.input]
    element_type = known[node.input[0]].type.tensor_type.elem_type
    match node.op_type:
        case "GroupQueryAttention":
            rows, length, packed = dims[0]
            assert isinstance(packed, int)
            heads = {each.name: each.i for each in node.attribute}
            queries, width = heads["num_heads"], packed * heads["num_heads"]
            width //= queries + 2 * heads["kv_num_heads"]
            shapes: list[list[Dim]] = [[rows, length, width], dims[3], dims[4]]
        case "FusedMatMul":
            shapes = [[*dims[0][:-1], dims[1][-2]]]
        case "MultiHeadAttention":
            shapes = [dims[0]]
        case "SkipLayerNormalization":
            assert len(dims[0]) == len(dims[1]) == 3
            assert {dims[0][2], dims[1][2], *dims[2], *dims[3]} == {dims[2][0]}
            shapes = [dims[0], [], [], dims[0]]
        case "Gelu" | "BiasGelu" | "QuickGelu":
            shapes = [dims[0]]
        case other:
            raise AssertionError(f"no rule for {other}")
    outputs = {value.name: value for value in graph.output}
    for name, shape in zip(node.output, shapes, strict=False):
        value = helper.make_tensor_value_info(name, element_type, shape)
        if name in outputs and not outputs[name].type.tensor_type.HasField("shape"):
            outputs[name].CopyFrom(value)
        elif name and name not in outputs:
            graph.value_info.append(value)


def _dims(value: onnx.ValueInfoProto) -> list[Dim]:
    return [
        dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None
        for dim in value.type.tensor_type.shape.dim
    ]


def shape_of(model: onnx.ModelProto, name: str) -> Sequence[Dim]:
    """Dimensions of one value of a model from `inferred`."""
    return _dims(_values(model)[name])
