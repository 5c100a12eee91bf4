"""Builds an ONNX graph node by node, straight from weights: no tracing, no surprises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from exporters.weight_store import WeightStore

MICROSOFT = "com.microsoft"
"""Operator domain of onnxruntime's contributed operators."""
_OPSET = 21
_IR_VERSION = 10

Dims = Sequence[int | str]


class GraphBuilder:
    """A graph under construction. Values are the names of tensors."""

    def __init__(self, name: str, store: WeightStore, *, opset: int = _OPSET) -> None:
        """Start an empty graph whose large tensors go to `store`."""
        self._name = name
        self._opset = opset
        self._store = store
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: dict[str, onnx.TensorProto] = {}
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._declared: list[onnx.ValueInfoProto] = []

    def input(self, name: str, dtype: int, dims: Dims) -> str:
        """Declare a graph input."""
        self._inputs.append(helper.make_tensor_value_info(name, dtype, dims))
        return name

    def output(self, value: str, name: str, dtype: int, dims: Dims) -> None:
        """Make a value a graph output under the given name."""
        if value != name:
            self._nodes.append(helper.make_node("Identity", [value], [name]))
        self._outputs.append(helper.make_tensor_value_info(name, dtype, dims))

    def declare(self, value: str, dtype: int, dims: Dims) -> None:
        """State a value's type where the runtime does not infer it."""
        self._declared.append(helper.make_tensor_value_info(value, dtype, dims))

    def weight(self, name: str, values: npt.NDArray[Any]) -> str:
        """A stored tensor, shared by name with every other graph of the bundle."""
        self._initializers.setdefault(name, self._store.initializer(name, values))
        return name

    def constant(self, values: npt.NDArray[Any] | np.generic) -> str:
        """A small constant kept in the graph itself; equal ones are kept once."""
        array = np.asarray(values)
        if array.nbytes > 256:
            raise ValueError(f"a constant of {array.nbytes} bytes belongs into the weight store")
        content = (str(array.dtype), array.shape, array.tobytes())
        name = self._constants.setdefault(content, f"c{len(self._constants)}")
        self._initializers.setdefault(name, numpy_helper.from_array(array, name))
        return name

    def ints(self, *values: int) -> str:
        """A constant int64 [n]: axes, shapes."""
        return self.constant(np.array(values, dtype=np.int64))

    def int32(self, value: int) -> str:
        """A constant int32 scalar."""
        return self.constant(np.int32(value))

    def op(
        self, op_type: str, *inputs: str, domain: str = "", name: str | None = None, **attributes: Any
    ) -> str:
        """Append a node with one output and return that output."""
        return self.ops(
            op_type, *inputs, num_outputs=1, domain=domain, names=[name] if name else None, **attributes
        )[0]

    def ops(
        self,
        op_type: str,
        *inputs: str,
        num_outputs: int,
        domain: str = "",
        names: Sequence[str] | None = None,
        **attributes: Any,
    ) -> list[str]:
        """Append a node with several outputs, named by the graph unless `names` is given; "" is left out."""
        index = len(self._nodes)
        outputs = list(names) if names else [f"v{index}_{i}" for i in range(num_outputs)]
        self._nodes.append(
            # Without names of their own: names are half of a graph's bytes.
            helper.make_node(op_type, list(inputs), outputs, domain=domain, **attributes)
        )
        return outputs

    def split(self, x: str, num_parts: int) -> list[str]:
        """Equal parts of x along its last axis."""
        outputs = [f"v{len(self._nodes)}_{i}" for i in range(num_parts)]
        self._nodes.append(helper.make_node("Split", [x], outputs, axis=-1, num_outputs=num_parts))
        return outputs

    def split_off(self, x: str, size: int, rest: int) -> tuple[str, str]:
        """The first `size` and the other `rest` elements of x along its last axis."""
        first, second = f"v{len(self._nodes)}_0", f"v{len(self._nodes)}_1"
        self._nodes.append(helper.make_node("Split", [x, self.ints(size, rest)], [first, second], axis=-1))
        return first, second

    def build(self) -> onnx.ModelProto:
        """The finished model. External data is written by `WeightStore.write`.

        Raises:
            ValueError: a name stands for two values.
        """
        names = Counter([*self._initializers, *(value.name for value in self._inputs)])
        names.update(name for node in self._nodes for name in node.output if name)
        if clash := sorted(name for name, count in names.items() if count > 1):
            raise ValueError(f"two values of graph {self._name} are named {', '.join(clash)}")
        graph = helper.make_graph(
            self._nodes,
            self._name,
            self._inputs,
            self._outputs,
            initializer=list(self._initializers.values()),
            value_info=self._declared,
        )
        return helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", self._opset), helper.make_opsetid(MICROSOFT, 1)],
            ir_version=_IR_VERSION,
            producer_name="dragoman",
        )


FLOAT = TensorProto.FLOAT
FLOAT16 = TensorProto.FLOAT16
INT32 = TensorProto.INT32
INT64 = TensorProto.INT64
INT8 = TensorProto.INT8
UINT8 = TensorProto.UINT8
