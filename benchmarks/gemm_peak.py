"""What this CPU's integer matrix product reaches through onnxruntime: the peak the engine is held against."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from benchmarks.multiply_adds import MatrixProduct

WeightType = Literal["int8", "uint8"]
"""Activations are uint8. Without VNNI the product by int8 weights saturates; that by uint8 is exact."""

_MIN_MULTIPLY_ADDS = 30_000_000
"""A timed call does at least so many, in several products if need be: a call costs some microseconds."""
_MAX_COPIES = 64
_REPEATS = 7
_ZERO_POINT = 128


@dataclass(frozen=True)
class GemmRate:
    """One shape's best rate.

    Attributes:
        weights: element type of the weights; activations are uint8.
        num_rows: M.
        inputs: K.
        outputs: N.
        gflop_per_s: 2 M K N per nanosecond, best of a few repetitions, on one thread.
    """

    weights: WeightType
    num_rows: int
    inputs: int
    outputs: int
    gflop_per_s: float


@dataclass(frozen=True)
class GemmRates:
    """All measured shapes."""

    rates: tuple[GemmRate, ...]

    def best(self, weights: WeightType) -> float:
        """GFLOP/s of the fastest shape: the peak."""
        return max(rate.gflop_per_s for rate in self.rates if rate.weights == weights)

    def of_products(self, products: Sequence[MatrixProduct], weights: WeightType, num_rows: int) -> float:
        """GFLOP/s of these products one after another, each at the rate of its shape and row count.

        Raises:
            KeyError: a shape was not measured.
        """
        rate_of = {
            (rate.inputs, rate.outputs): rate.gflop_per_s
            for rate in self.rates
            if rate.weights == weights and rate.num_rows == num_rows
        }
        work = [(product, product.multiply_adds(num_rows)) for product in products]
        time_units = sum(adds / rate_of[product.inputs, product.outputs] for product, adds in work)
        return sum(adds for _, adds in work) / time_units


def measure_gemm(
    shapes: Sequence[tuple[int, int]], row_counts: Sequence[int], *, repeat_s: float = 0.02
) -> GemmRates:
    """Time every shape with every row count and both types of weights, on one thread.

    Args:
        shapes: K and N of each.
        row_counts: M.
        repeat_s: seconds of each of the repetitions whose best counts.
    """
    return GemmRates(
        tuple(
            _measure(weights, num_rows, inputs, outputs, repeat_s=repeat_s)
            for inputs, outputs in sorted(set(shapes))
            for num_rows in row_counts
            for weights in _WEIGHT_TYPES
        )
    )


_WEIGHT_TYPES: tuple[WeightType, ...] = ("int8", "uint8")


def _measure(weights: WeightType, num_rows: int, inputs: int, outputs: int, *, repeat_s: float) -> GemmRate:
    adds = num_rows * inputs * outputs
    copies = min(_MAX_COPIES, max(1, _MIN_MULTIPLY_ADDS // adds))
    session = _session(weights, inputs, outputs, copies)
    binding = session.io_binding()
    draw = np.random.default_rng(0)
    x = draw.integers(0, 256, size=(num_rows, inputs), dtype=np.uint8)
    binding.bind_ortvalue_input("x", onnxruntime.OrtValue.ortvalue_from_numpy(x))
    for copy in range(copies):
        y = np.zeros((num_rows, outputs), dtype=np.float32)
        binding.bind_ortvalue_output(f"y{copy}", onnxruntime.OrtValue.ortvalue_from_numpy(y))
    session.run_with_iobinding(binding)
    best_s = min(_seconds_a_call(session, binding, repeat_s) for _ in range(_REPEATS))
    return GemmRate(weights, num_rows, inputs, outputs, 2 * adds * copies / best_s / 1e9)


def _seconds_a_call(
    session: onnxruntime.InferenceSession, binding: onnxruntime.IOBinding, repeat_s: float
) -> float:
    num_calls = 0
    started_at_s = time.perf_counter()
    while True:
        session.run_with_iobinding(binding)
        num_calls += 1
        elapsed_s = time.perf_counter() - started_at_s
        if elapsed_s >= repeat_s:
            return elapsed_s / num_calls


def _session(weights: WeightType, inputs: int, outputs: int, copies: int) -> onnxruntime.InferenceSession:
    """`copies` products of one input, each by its own matrix, so that none is taken out as a duplicate."""
    draw = np.random.default_rng(1)
    initializers = [
        numpy_helper.from_array(np.array(0.01, np.float32), "x_scale"),
        numpy_helper.from_array(np.array(_ZERO_POINT, np.uint8), "x_zero"),
        numpy_helper.from_array(np.full(outputs, 0.01, np.float32), "w_scale"),
        numpy_helper.from_array(np.array(_ZERO_POINT, np.uint8), "w_zero"),
        numpy_helper.from_array(np.zeros(outputs, np.float32), "bias"),
    ]
    nodes = []
    for copy in range(copies):
        matrix: npt.NDArray[np.int8] | npt.NDArray[np.uint8]
        matrix = draw.integers(-127, 128, size=(inputs, outputs), dtype=np.int8)
        if weights == "uint8":
            matrix = (matrix.astype(np.int16) + _ZERO_POINT).astype(np.uint8)
        initializers.append(numpy_helper.from_array(matrix, f"w{copy}"))
        zero = "w_zero" if weights == "uint8" else ""
        nodes.append(
            helper.make_node(
                "MatMulIntegerToFloat",
                ["x", f"w{copy}", "x_scale", "w_scale", "x_zero", zero, "bias"],
                [f"y{copy}"],
                domain="com.microsoft",
            )
        )
    graph = helper.make_graph(
        nodes,
        "gemm",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, ["M", inputs])],
        [
            helper.make_tensor_value_info(f"y{copy}", TensorProto.FLOAT, ["M", outputs])
            for copy in range(copies)
        ],
        initializers,
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
