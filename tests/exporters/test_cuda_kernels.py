"""The graphs of cuda-fp16 as documents: valid, typed throughout, and every node has a CUDA kernel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from cuda_kernels import folded, missing_kernels
from cuda_models import MODELS, cuda_checkpoint
from graph_types import element_types, inferred, rank_of_values, shape_of

from exporters.cuda_graphs import CUDA_OPSET, copy_cross, copy_state, cuda_encoder
from exporters.cuda_step_graphs import cuda_decoder_step
from exporters.graph_builder import FLOAT16, GraphBuilder
from exporters.graphs import ModelContext
from exporters.quantization import quantized
from exporters.step_graphs import StepKind
from exporters.weight_store import WEIGHTS_NAME, WeightStore

GRAPHS: dict[str, Callable[[ModelContext], onnx.ModelProto]] = {
    "encoder": cuda_encoder,
    "step": lambda context: cuda_decoder_step(context, StepKind.GREEDY),
    "beam_step": lambda context: cuda_decoder_step(context, StepKind.BEAMS),
    "guided_step": lambda context: cuda_decoder_step(context, StepKind.GUIDED),
    "copy_state": copy_state,
    "copy_cross": copy_cross,
}
# On the CPU, or a copy to it: what a recorded step must not have.
CONTROL_FLOW = {"If", "Loop", "Scan", "Shape", "Size", "NonZero"}


def context_of(name: str) -> ModelContext:
    return ModelContext(
        checkpoint=quantized(cuda_checkpoint(name)),
        store=WeightStore(),
        max_source_tokens=40,
        max_target_tokens=24,
    )


@pytest.fixture(scope="module", params=list(MODELS))
def context(request: pytest.FixtureRequest) -> ModelContext:
    return context_of(request.param)


@pytest.fixture(params=list(GRAPHS))
def graph(request: pytest.FixtureRequest, context: ModelContext) -> onnx.ModelProto:
    return GRAPHS[request.param](context)


def test_every_graph_is_valid_and_typed_throughout(
    graph: onnx.ModelProto, context: ModelContext, tmp_path: Path
) -> None:
    context.store.write(tmp_path / WEIGHTS_NAME)
    onnx.save_model(graph, tmp_path / "graph.onnx")
    onnx.checker.check_model(tmp_path / "graph.onnx")
    model = inferred(graph)
    computed = {name for node in model.graph.node for name in node.output if name}
    types, ranks = element_types(model), rank_of_values(model)
    assert computed <= types.keys()
    assert all(types[name] for name in computed)
    assert computed <= ranks.keys()


def test_every_node_has_a_cuda_kernel_and_no_tensor_goes_to_the_host(graph: onnx.ModelProto) -> None:
    assert missing_kernels(graph, element_types(inferred(graph))) == []


def test_every_graph_returns_what_it_says_whatever_inference_finds(graph: onnx.ModelProto) -> None:
    """An output's declaration could hide a wrong type or a fixed size in the middle: infer without it."""
    bare = onnx.ModelProto.FromString(graph.SerializeToString())
    for output in bare.graph.output:
        output.type.tensor_type.ClearField("shape")
    model = inferred(bare)
    for output in graph.graph.output:
        found = shape_of(model, output.name)
        declared = [dim.dim_value or dim.dim_param for dim in output.type.tensor_type.shape.dim]
        assert len(found) == len(declared)
        for one, other in zip(found, declared, strict=True):
            assert one == other or not isinstance(one, int)


def test_a_recorded_step_reads_nothing_back(context: ModelContext) -> None:
    for role in ("step", "beam_step", "guided_step", "copy_state", "copy_cross"):
        graph = GRAPHS[role](context).graph
        constants = folded(graph)
        live = [node for node in graph.node if not set(node.output) <= constants]
        assert not CONTROL_FLOW & {node.op_type for node in live}
        assert all(not attribute.HasField("g") for node in live for attribute in node.attribute)


def test_state_and_encoder_outputs_have_the_types_of_the_step_that_reads_them(context: ModelContext) -> None:
    typed = {
        role: {
            value.name.removeprefix("next_"): value.type.tensor_type.elem_type
            for value in (*made.graph.input, *made.graph.output)
        }
        for role, made in ((role, make(context)) for role, make in GRAPHS.items())
    }
    for name in context.cross_names():
        assert {typed[role][name] for role in typed if name in typed[role]} == {FLOAT16}
        assert name in typed["encoder"].keys() & typed["step"].keys() & typed["copy_cross"].keys()
    state = typed["copy_state"].keys() - {"from_rows", "to_rows"}
    assert state
    for name in state:
        assert len({typed[role][name] for role in ("step", "beam_step", "guided_step", "copy_state")}) == 1


def with_node(op_type: str, opset: int, **attributes: int) -> list[str]:
    graph = GraphBuilder("faulty", WeightStore(), opset=opset)
    x = graph.input("x", FLOAT16, ["A", "B"])
    graph.output(graph.op(op_type, x, **attributes), "y", FLOAT16, ["A", "B"])
    model = inferred(graph.build())
    return missing_kernels(model, element_types(model))


def test_the_list_of_kernels_tells_what_would_run_on_the_cpu() -> None:
    assert with_node("Relu", CUDA_OPSET) == []
    assert with_node("Relu", 21) == ["Identity: no kernel for version 21"]  # in front of the output
    assert with_node("Tanh", CUDA_OPSET) == ["onnx Tanh: no kernel"]


def test_the_list_of_kernels_tells_what_would_be_copied_to_the_host() -> None:
    graph = GraphBuilder("faulty", WeightStore(), opset=CUDA_OPSET)
    x = graph.input("x", FLOAT16, ["A", "B"])
    shape = graph.input("shape", onnx.TensorProto.INT64, [2])
    y = graph.op("Reshape", x, graph.op("Add", shape, graph.ints(0)), name="y")
    graph.op("Reshape", x, shape, name="z")
    graph.output(y, "y", FLOAT16, ["C", "D"])
    graph.output("z", "z", FLOAT16, ["C", "D"])
    model = inferred(graph.build())
    faults = missing_kernels(model, element_types(model))
    assert faults == [
        "Reshape: input 1 would be copied to the host",
        "shape is read both on the host and on the device",
    ]


def test_float32_would_find_no_kernel_for_the_self_cache() -> None:
    model = inferred(GRAPHS["step"](context_of("attention post relu")))
    types = element_types(model) | {"self_key_0": onnx.TensorProto.FLOAT}
    assert "GroupQueryAttention: input 3 is TensorProto.FLOAT" in missing_kernels(model, types)
