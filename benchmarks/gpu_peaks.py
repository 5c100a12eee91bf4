"""What a device reaches at most, through onnxruntime itself: a large fp16 product, a large addition."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import onnxruntime

from app.runtime.device import Device

_REPEATS = 5
_CALLS = 8


@dataclass(frozen=True)
class Peaks:
    """Best of a few repetitions.

    Attributes:
        flop_per_s: two for each multiply-add of a square fp16 matrix product.
        bytes_per_s: read and written by an fp16 addition of two long vectors.
        matrix_size: rows and columns of the product.
        vector_bytes: of each vector.
    """

    flop_per_s: float
    bytes_per_s: float
    matrix_size: int
    vector_bytes: int


def measure_peaks(device: Device, *, matrix_size: int, vector_size: int) -> Peaks:
    """Measure both.

    Args:
        device: where.
        matrix_size: rows and columns of both factors.
        vector_size: elements of both summands.

    Raises:
        ImportError: the package onnx, which builds the two graphs, is not installed.
    """
    product_s = _seconds_a_call(device, "MatMul", (matrix_size, matrix_size))
    addition_s = _seconds_a_call(device, "Add", (vector_size,))
    vector_bytes = vector_size * np.dtype(np.float16).itemsize
    return Peaks(
        flop_per_s=2 * matrix_size**3 / product_s,
        bytes_per_s=3 * vector_bytes / addition_s,
        matrix_size=matrix_size,
        vector_bytes=vector_bytes,
    )


def providers_of(device: Device) -> list[str | tuple[str, dict[str, str]]]:
    """What onnxruntime is told to run a session on this device alone."""
    if device.kind == "cpu":
        return ["CPUExecutionProvider"]
    return [("CUDAExecutionProvider", {"device_id": str(device.index)})]


def _seconds_a_call(device: Device, operator: str, shape: tuple[int, ...]) -> float:
    """Of one operator over two fp16 tensors that lie on the device, as does its result."""
    from onnx import TensorProto, helper  # only the machine that measures peaks needs it

    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT16, list(shape)) for name in ("x", "y", "z")
    ]
    graph = helper.make_graph([helper.make_node(operator, ["x", "y"], ["z"])], "peak", values[:2], values[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=providers_of(device))
    binding = session.io_binding()
    ones = np.ones(shape, dtype=np.float16)
    kept = [
        onnxruntime.OrtValue.ortvalue_from_numpy(ones, device.kind, device.index) for _ in ("x", "y", "z")
    ]
    for name, value in zip(("x", "y"), kept[:2], strict=True):
        binding.bind_ortvalue_input(name, value)
    binding.bind_ortvalue_output("z", kept[2])
    best_s = float("inf")
    for _ in range(_REPEATS):
        session.run_with_iobinding(binding)
        started_at_s = time.perf_counter()
        for _ in range(_CALLS):
            session.run_with_iobinding(binding)  # returns when the device has done it
        best_s = min(best_s, (time.perf_counter() - started_at_s) / _CALLS)
    return best_s
