"""The linear layers node by node, against exact integer arithmetic."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, numpy_helper

from app.errors import CheckpointError
from app.runtime.onnx_model import session_options
from exporters.checkpoint import Checkpoint, QuantizedWeight
from exporters.graph_builder import FLOAT, INT64, GraphBuilder
from exporters.int8_arithmetic import Int8Arithmetic
from exporters.linear import Float32Arithmetic
from exporters.quantization import pair_sums, quantize, quantized, reduction_divisors
from exporters.weight_store import WEIGHTS_NAME, WeightStore
from model.config import TransformerConfig

D, V = 64, 128
STEP = 0.5
Array = npt.NDArray[Any]


def extreme_weight(rows: int) -> npt.NDArray[np.int8]:
    """Values whose pairwise products with extreme activations exceed 16 bits."""
    values = np.random.default_rng(1).choice([-128, -127, 126, 127], size=(rows, D)).astype(np.int8)
    values[0], values[1], values[2] = 127, -127, -128
    return values


def checkpoint_of(*, scalar: bool, activation_scale: float | None) -> Checkpoint:
    scale = np.float32(0.01) if scalar else np.linspace(0.001, 0.02, V, dtype=np.float32)
    weight = QuantizedWeight(extreme_weight(V), np.asarray(scale))
    scales = (
        {}
        if activation_scale is None
        else dict.fromkeys(("embedding.weight", "first.weight", "second.weight"), activation_scale)
    )
    bias = np.linspace(-3, 3, V, dtype=np.float32)
    return Checkpoint(
        config=TransformerConfig(V, d_model=D, num_heads=4, encoder_layers=1, decoder_layers=1, ffn_size=D),
        weights={
            "embedding.weight": weight,
            "output_bias": bias,
            "first.weight": weight,
            "first.bias": bias,
            "second.weight": QuantizedWeight(extreme_weight(32)[::-1].copy(), np.asarray(np.float32(0.03))),
        },
        tokenizer=b"",
        activation_scales=scales,
    )


def extreme_input() -> npt.NDArray[np.float32]:
    """Rows of largest, smallest and mixed activations; every value is a multiple of STEP."""
    x = np.random.default_rng(2).choice([-127, -64, 120, 127], size=(6, D)).astype(np.float32)
    x[0], x[1], x[2, ::2] = 127, -127, -127
    return (x * STEP).astype(np.float32)


def product(x: Array, weight: QuantizedWeight, bias: Array | float) -> Array:
    """``x @ W.T + b`` in integers and float64."""
    q = np.rint(x.astype(np.float64) / STEP).astype(np.int64)
    scale = np.broadcast_to(weight.scale, len(weight.values)).astype(np.float64)
    return (q @ weight.values.T.astype(np.int64)) * STEP * scale + bias


def reduced(weight: QuantizedWeight) -> QuantizedWeight:
    """What an int8 layer multiplies by: extreme weights would saturate, so their rows are reduced."""
    divisors = reduction_divisors(weight.values)
    assert divisors is not None
    values = np.rint(weight.values.astype(np.float64) * 128 / divisors[:, None]).astype(np.int8)
    return QuantizedWeight(values, (weight.scale * divisors / 128).astype(np.float32))


def run(graph: GraphBuilder, store: WeightStore, folder: Path, feeds: dict[str, Array]) -> list[Array]:
    onnx.save_model(graph.build(), str(folder / f"{id(graph)}.onnx"))
    store.write(folder / WEIGHTS_NAME)
    session = onnxruntime.InferenceSession(
        str(folder / f"{id(graph)}.onnx"), session_options(), providers=["CPUExecutionProvider"]
    )
    outputs: list[Array] = session.run(None, feeds)
    return outputs


scale_kinds = pytest.mark.parametrize("scalar", [True, False], ids=["one scale", "scale per row"])
activation_kinds = pytest.mark.parametrize("activation_scale", [STEP, None], ids=["static", "per row"])


@scale_kinds
@activation_kinds
def test_int8_layers_compute_exact_integers(
    tmp_path: Path, scalar: bool, activation_scale: float | None
) -> None:
    checkpoint = checkpoint_of(scalar=scalar, activation_scale=activation_scale)
    store, x = WeightStore(), extreme_input()
    graph = GraphBuilder("linear", store)
    y = Int8Arithmetic(checkpoint).linear(graph, graph.input("x", FLOAT, ["R", D]), ["first", "second"])
    graph.output(y, "y", FLOAT, ["R", V + 32])
    (found,) = run(graph, store, tmp_path, {"x": x})
    weights = [checkpoint.weights["first.weight"], checkpoint.weights["second.weight"]]
    bias = checkpoint.weights["first.bias"]
    expected = np.concatenate(
        [product(x, reduced(weights[0]), bias), product(x, reduced(weights[1]), 0.0)], axis=1
    )
    assert np.allclose(found, expected, rtol=2e-6, atol=1e-4)


@scale_kinds
@activation_kinds
def test_the_int8_output_projection_computes_exact_integers(
    tmp_path: Path, scalar: bool, activation_scale: float | None
) -> None:
    checkpoint = checkpoint_of(scalar=scalar, activation_scale=activation_scale)
    store, x = WeightStore(), extreme_input()
    graph = GraphBuilder("projection", store)
    graph.output(
        Int8Arithmetic(checkpoint).output_projection(graph, graph.input("x", FLOAT, ["R", D])),
        "y",
        FLOAT,
        ["R", V],
    )
    (found,) = run(graph, store, tmp_path, {"x": x})
    expected = product(x, reduced(checkpoint.weights["embedding.weight"]), checkpoint.weights["output_bias"])
    assert np.allclose(found, expected, rtol=2e-6, atol=1e-4)


@scale_kinds
@activation_kinds
@pytest.mark.parametrize("make", [Int8Arithmetic, Float32Arithmetic])
def test_the_projection_over_candidates_is_exact_though_its_weights_come_from_another_graph(
    tmp_path: Path,
    scalar: bool,
    activation_scale: float | None,
    make: Callable[[Checkpoint], Int8Arithmetic | Float32Arithmetic],
) -> None:
    checkpoint = checkpoint_of(scalar=scalar, activation_scale=activation_scale)
    arithmetic, store, x = make(checkpoint), WeightStore(), extreme_input()
    ids = np.array([2, 5, 1, 0, *range(60, 120)], dtype=np.int64)
    gather = GraphBuilder("candidates", store)
    arithmetic.candidate_outputs(gather, gather.input("candidate_ids", INT64, ["N"]))
    names = [output.name for output in gather.build().graph.output]
    gathered = dict(zip(names, run(gather, store, tmp_path, {"candidate_ids": ids}), strict=True))
    graph = GraphBuilder("projection", store)
    graph.input("x", FLOAT, ["R", D])
    arithmetic.candidate_inputs(graph)
    graph.output(arithmetic.candidate_projection(graph, "x"), "y", FLOAT, ["R", "N"])
    (found,) = run(graph, store, tmp_path, {"x": x, **gathered})
    weight = checkpoint.weights["embedding.weight"]
    weight = weight if make is Float32Arithmetic else reduced(weight)
    every = product(x, weight, checkpoint.weights["output_bias"])
    assert np.allclose(found, every[:, ids], rtol=2e-6, atol=1e-3)


@pytest.mark.parametrize("activation_scale", [STEP, None])
def test_a_layer_after_relu_sees_no_negative_value_and_twice_the_steps(
    tmp_path: Path, activation_scale: float | None
) -> None:
    checkpoint = checkpoint_of(scalar=True, activation_scale=activation_scale)
    store, x = WeightStore(), extreme_input()
    x[3] = np.linspace(-STEP * 127, STEP * 127, D)
    graph = GraphBuilder("linear", store)
    y = Int8Arithmetic(checkpoint).linear(
        graph, graph.input("x", FLOAT, ["R", D]), ["first"], after_relu=True
    )
    graph.output(y, "y", FLOAT, ["R", V])
    (found,) = run(graph, store, tmp_path, {"x": x})
    weight = checkpoint.weights["first.weight"]
    assert isinstance(weight, QuantizedWeight)
    weight = reduced(weight)
    positive = np.maximum(x, 0).astype(np.float64)
    if activation_scale is None:
        step = np.maximum(positive.max(axis=1, keepdims=True), 1e-9) / 127
    else:
        step = np.array(STEP * 127 / 255)
    quantised = np.rint(positive / step) * step
    expected = quantised @ weight.to_float().T.astype(np.float64) + checkpoint.weights["first.bias"]
    # A value half-way between two steps may be rounded either way by float32.
    one_step = float(np.abs(weight.to_float()).max() * np.max(step))
    assert np.abs(found - expected).max() <= 1.01 * one_step
    assert np.allclose(found[:2], expected[:2], rtol=2e-6, atol=1e-3)


def test_without_a_known_scale_a_row_is_quantised_by_its_own_largest_value_alone(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(scalar=True, activation_scale=None)
    store = WeightStore()
    graph = GraphBuilder("linear", store)
    y = Int8Arithmetic(checkpoint).linear(graph, graph.input("x", FLOAT, ["R", D]), ["first"])
    graph.output(y, "y", FLOAT, ["R", V])
    small = np.random.default_rng(3).normal(0, 1e-3, (1, D)).astype(np.float32)
    rows = np.concatenate([small, small * 1e6, np.zeros((1, D), np.float32)])
    (together,) = run(graph, store, tmp_path, {"x": rows})
    alone = [run(graph, store, tmp_path, {"x": row[None]})[0][0] for row in rows]
    assert np.array_equal(together, np.stack(alone))
    weight = checkpoint.weights["first.weight"]
    assert isinstance(weight, QuantizedWeight)
    weight = reduced(weight)
    bias = np.asarray(checkpoint.weights["first.bias"])
    exact = rows.astype(np.float64) @ weight.to_float().T
    error = np.abs(together - bias - exact).max(axis=1)
    assert (error <= 0.02 * np.abs(exact).max(axis=1) + 1e-5).all()
    assert np.array_equal(together[2], bias)


def test_layers_whose_scales_differ_are_multiplied_one_by_one_and_lie_side_by_side(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(scalar=True, activation_scale=STEP)
    checkpoint = dataclasses.replace(checkpoint, activation_scales={"first.weight": STEP})
    store, x = WeightStore(), extreme_input()
    graph = GraphBuilder("linear", store)
    y = Int8Arithmetic(checkpoint).linear(graph, graph.input("x", FLOAT, ["R", D]), ["first", "second"])
    graph.output(y, "y", FLOAT, ["R", V + 32])
    (found,) = run(graph, store, tmp_path, {"x": x})
    expected = np.concatenate(
        [
            product(x, reduced(checkpoint.weights["first.weight"]), checkpoint.weights["first.bias"]),
            product(x, reduced(checkpoint.weights["second.weight"]), 0.0),
        ],
        axis=1,
    )
    assert np.allclose(found, expected, rtol=2e-6, atol=1e-3)


def test_float_matrices_are_rounded_to_the_nearest_step_of_their_row() -> None:
    weight = np.random.default_rng(4).normal(0, 1, (7, 33)).astype(np.float32)
    weight[3] = 0
    weight[4] = 1e-42
    packed = quantize(weight)
    assert packed.values.dtype == np.int8
    assert packed.values.min() >= -127
    # The whole range, but for what two large neighbours cost (test_quantization.py).
    full = (np.abs(packed.values).max(axis=1) == 127) | (pair_sums(packed.values) >= 126)
    assert full[[0, 1, 2, 5, 6]].all()
    assert np.isfinite(packed.scale).all()
    assert (np.abs(packed.to_float() - weight) <= 0.5001 * packed.scale[:, None]).all()


def test_quantising_leaves_vectors_and_int8_matrices_alone() -> None:
    checkpoint = checkpoint_of(scalar=True, activation_scale=None)
    weights = dict(checkpoint.weights) | {"third.weight": np.eye(4, dtype=np.float32)}
    packed = quantized(dataclasses.replace(checkpoint, weights=weights))
    assert packed.weights["first.weight"] is checkpoint.weights["first.weight"]
    assert packed.weights["first.bias"] is checkpoint.weights["first.bias"]
    assert isinstance(packed.weights["third.weight"], QuantizedWeight)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_not_a_finite_number_is_refused(value: float) -> None:
    weight = np.ones((2, 3), np.float32)
    weight[1, 2] = value
    with pytest.raises(CheckpointError, match="1 weights that are not"):
        quantize(weight)


def test_the_store_keeps_one_aligned_copy_of_each_tensor(tmp_path: Path) -> None:
    store = WeightStore()
    big = np.arange(999, dtype=np.int8)
    table = np.random.default_rng(6).normal(size=(50, 7)).astype(np.float32)
    first = store.initializer("big", big)
    assert store.initializer("big", big.copy()) == first
    second = store.initializer("table", table.T)
    small = store.initializer("small", np.arange(5, dtype=np.int64))
    store.write(tmp_path / WEIGHTS_NAME)
    content = (tmp_path / WEIGHTS_NAME).read_bytes()
    assert len(content) == store.num_bytes == 1024 + table.nbytes
    for tensor, values in ((first, big), (second, table.T)):
        facts = {entry.key: entry.value for entry in tensor.external_data}
        offset, length = int(facts["offset"]), int(facts["length"])
        assert facts["location"] == WEIGHTS_NAME
        assert offset % 64 == 0
        stored = np.frombuffer(content[offset : offset + length], values.dtype).reshape(tuple(tensor.dims))
        assert np.array_equal(stored, values)
    assert small.data_location != TensorProto.EXTERNAL
    assert numpy_helper.to_array(small).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "other", [np.zeros(999, np.int8), np.arange(999, dtype=np.uint8), np.arange(998, dtype=np.int8)]
)
def test_two_different_tensors_may_not_share_a_name(other: Array) -> None:
    store = WeightStore()
    store.initializer("w", np.arange(999, dtype=np.int8))
    with pytest.raises(ValueError, match="two different tensors are named w"):
        store.initializer("w", other)


def test_a_graph_refuses_a_name_that_stands_for_two_values() -> None:
    def weight_and_input(graph: GraphBuilder) -> None:
        graph.weight("x", np.zeros(3, np.float32))

    def two_inputs(graph: GraphBuilder) -> None:
        graph.input("x", FLOAT, [1])

    def input_and_node(graph: GraphBuilder) -> None:
        graph.op("Relu", "x", name="x")

    def two_nodes(graph: GraphBuilder) -> None:
        graph.op("Relu", "x", name="y")
        graph.op("Abs", "x", name="y")

    def weight_and_node(graph: GraphBuilder) -> None:
        graph.weight("v0_0", np.zeros(3, np.float32))
        graph.op("Relu", "x")

    def two_outputs(graph: GraphBuilder) -> None:
        graph.output(graph.op("Relu", "x"), "out", FLOAT, [1])
        graph.output(graph.op("Abs", "x"), "out", FLOAT, [1])

    for clash in (weight_and_input, two_inputs, input_and_node, two_nodes, weight_and_node, two_outputs):
        graph = GraphBuilder("g", WeightStore())
        graph.input("x", FLOAT, [1])
        clash(graph)
        with pytest.raises(ValueError, match="two values of graph g are named"):
            graph.build()


def test_a_large_constant_belongs_into_the_store() -> None:
    with pytest.raises(ValueError, match="weight store"):
        GraphBuilder("g", WeightStore()).constant(np.zeros(100, np.float32))
