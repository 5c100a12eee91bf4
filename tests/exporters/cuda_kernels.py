"""Which kernels onnxruntime has for CUDA, of the operators in the cuda-fp16 graphs, and how it finds them.

Facts from onnxruntime's docs/OperatorKernels.md, section CUDAExecutionProvider, at its commit
001d12d2623fd411ce0f83d05abb5e82304a3389, as far as they are needed; which inputs a kernel wants in CPU
memory, from `InputMemoryType` in the kernels' registrations of the same repository.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import onnx
from onnx import TensorProto, helper

MICROSOFT = "com.microsoft"
HALF, FLOAT = frozenset({TensorProto.FLOAT16}), frozenset({TensorProto.FLOAT})
FLOATS = HALF | FLOAT
INT32, INT64 = frozenset({TensorProto.INT32}), frozenset({TensorProto.INT64})
INDICES = INT32 | INT64
NUMBERS = FLOATS | INDICES
BOOL = frozenset({TensorProto.BOOL})
ANY = NUMBERS | BOOL | frozenset({TensorProto.INT8, TensorProto.UINT8, TensorProto.DOUBLE})


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What is registered under one operator's name.

    Attributes:
        versions: first and last operator version of each registration; None: "and later".
        inputs: accepted element types; the last entry stands for all further inputs.
        output: possible element types of the outputs.
        on_host: inputs that are read in CPU memory.
        domain: of the operator.
    """

    versions: tuple[tuple[int, int | None], ...]
    inputs: tuple[frozenset[int], ...]
    output: frozenset[int]
    on_host: tuple[int, ...] = ()
    domain: str = ""

    def runs(self, since_version: int) -> bool:
        """Whether it is found for an operator last defined in a version.

        As onnxruntime's KernelRegistry::VerifyKernelDef has it: "and later" means this very version.
        """
        return any(
            since_version == first or (last is not None and first <= since_version <= last)
            for first, last in self.versions
        )


def _contributed(
    inputs: tuple[frozenset[int], ...], output: frozenset[int], on_host: tuple[int, ...] = ()
) -> Kernel:
    return Kernel(((1, None),), inputs, output, on_host, MICROSOFT)


_SHAPING = ((13, 20), (21, 22), (23, None))
KERNELS: Mapping[str, Kernel] = {
    "Add": Kernel(((13, 13), (14, None)), (NUMBERS,), NUMBERS),
    "Cast": Kernel(((13, 18), (19, 20), (21, 22), (23, None)), (ANY,), ANY),
    "Div": Kernel(((13, 13), (14, None)), (NUMBERS,), NUMBERS),
    "Gather": Kernel(((11, 12), (13, None)), (ANY, INDICES), ANY),
    "GatherElements": Kernel(((11, 12), (13, None)), (ANY, INDICES), ANY),
    "GatherND": Kernel(((12, 12), (13, None)), (FLOATS | INT64 | BOOL, INT64), FLOATS | INT64 | BOOL),
    "Gemm": Kernel(((11, 12), (13, None)), (FLOATS,), FLOATS),
    "LayerNormalization": Kernel(((17, None),), (FLOATS,), FLOATS),
    "Less": Kernel(((9, 12), (13, None)), (NUMBERS,), BOOL),
    "LogSoftmax": Kernel(((11, 12), (13, None)), (FLOATS,), FLOATS),
    "MatMul": Kernel(((9, 12), (13, None)), (FLOATS,), FLOATS),
    "Max": Kernel(((12, 12), (13, None)), (NUMBERS,), NUMBERS),
    "Min": Kernel(((12, 12), (13, None)), (NUMBERS,), NUMBERS),
    "Mul": Kernel(((13, 13), (14, None)), (NUMBERS,), NUMBERS),
    "ReduceMean": Kernel(((1, 17), (18, None)), (FLOATS | INT32, INT64), FLOATS | INT32, on_host=(1,)),
    "Relu": Kernel(((13, 13), (14, None)), (FLOATS,), FLOATS),
    "Reshape": Kernel(((14, 18), (19, 20), (21, 22), (23, None)), (ANY, INT64), ANY, on_host=(1,)),
    "ScatterND": Kernel(((13, 15), (16, 17), (18, None)), (ANY, INT64, ANY), ANY),
    "Shape": Kernel(((15, 18), (19, 20), (21, 22), (23, None)), (ANY,), INT64),
    "Sigmoid": Kernel(((6, 12), (13, None)), (FLOATS,), FLOATS),
    "Slice": Kernel(((11, 12), (13, None)), (ANY, INDICES), ANY, on_host=(1, 2, 3, 4)),
    "Softmax": Kernel(((11, 12), (13, None)), (FLOATS,), FLOATS),
    "Split": Kernel(((13, 17), (18, None)), (ANY, INT64), ANY, on_host=(1,)),
    "Squeeze": Kernel(_SHAPING, (ANY, INT64), ANY, on_host=(1,)),
    "Sub": Kernel(((13, 13), (14, None)), (NUMBERS,), NUMBERS),
    "TopK": Kernel(((10, 10), (11, None)), (NUMBERS, INT64), NUMBERS, on_host=(1,)),
    "Transpose": Kernel(_SHAPING, (ANY,), ANY),
    "Unsqueeze": Kernel(_SHAPING, (ANY, INT64), ANY, on_host=(1,)),
    "Where": Kernel(((9, 15), (16, None)), (BOOL, NUMBERS), NUMBERS),
    # What is not for a GPU, to see that it is told apart: no registration reaches an opset of today.
    "Identity": Kernel(((14, 18), (19, None)), (ANY,), ANY),
    "BiasGelu": _contributed((FLOATS,), FLOATS),
    "FusedMatMul": _contributed((FLOATS,), FLOATS),
    "Gelu": _contributed((FLOATS,), FLOATS),
    "GroupQueryAttention": _contributed((HALF, HALF, HALF, HALF, HALF, INT32, INT32), HALF, on_host=(6,)),
    "MultiHeadAttention": _contributed((FLOATS, FLOATS, FLOATS, FLOATS, INT32, FLOATS), FLOATS, on_host=(8,)),
    "QuickGelu": _contributed((FLOATS,), FLOATS),
    "SkipLayerNormalization": _contributed((FLOATS,), FLOATS),
}


def folded(graph: onnx.GraphProto) -> set[str]:
    """Values that the runtime computes when it loads the graph: made of stored tensors alone."""
    known = {tensor.name for tensor in graph.initializer}
    for node in graph.node:
        if all(name in known for name in node.input if name):
            known.update(node.output)
    return known


def missing_kernels(model: onnx.ModelProto, types: Mapping[str, int]) -> list[str]:
    """What would keep nodes off the GPU: one line for each fault, none if all is well.

    Args:
        model: opset imports and graph.
        types: element type of every value.
    """
    (opset,) = (entry.version for entry in model.opset_import if entry.domain == "")
    constants = folded(model.graph)
    given = {value.name for value in model.graph.input}
    on_host = constants | {
        name for node in model.graph.node if node.op_type == "Shape" for name in node.output
    }
    read_by: dict[str, set[bool]] = {}
    faults = []
    for node in model.graph.node:
        if set(node.output) <= constants:
            continue
        kernel = KERNELS.get(node.op_type)
        if kernel is None or kernel.domain != node.domain:
            faults.append(f"{node.domain or 'onnx'} {node.op_type}: no kernel")
            continue
        since = 1 if node.domain else onnx.defs.get_schema(node.op_type, opset, "").since_version
        if not kernel.runs(since):
            faults.append(f"{node.op_type}: no kernel for version {since}")
        for index, name in enumerate(node.input):
            if not name:
                continue
            accepted = kernel.inputs[min(index, len(kernel.inputs) - 1)]
            if types[name] not in accepted:
                faults.append(f"{node.op_type}: input {index} is {_named(types[name])}")
            if index in kernel.on_host and name not in on_host | given:
                faults.append(f"{node.op_type}: input {index} would be copied to the host")
            if name in given:
                read_by.setdefault(name, set()).add(index in kernel.on_host)
        faults += [
            f"{node.op_type}: output is {_named(types[name])}"
            for name in node.output
            if name and types[name] not in kernel.output
        ]
    faults += [
        f"{name} is read both on the host and on the device"
        for name, where in read_by.items()
        if len(where) > 1
    ]
    return faults


def _named(element_type: int) -> str:
    return str(helper.tensor_dtype_to_string(element_type))
