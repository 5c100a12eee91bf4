"""An exported int8 greedy step graph, one row, observed where the graph itself tells nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from beam_reference import Prefix

from app.bundle import Bundle
from app.runtime.onnx_model import OnnxModel, session_options


class Observed(NamedTuple):
    """One step of the int8 graph: logits [V], attention [H,S], state after it."""

    logits: npt.NDArray[np.float32]
    attention: npt.NDArray[np.float32]
    state: dict[str, npt.NDArray[np.float32]]


class IntegerSteps:
    """The int8 greedy step graph that also tells its logits and what it asks the cross-attention."""

    def __init__(
        self, bundle: Bundle, model: OnnxModel, sources: Sequence[Sequence[int]], *, layer: int
    ) -> None:
        """Take a bundle, its loaded int8 model, and the decoder layer whose attention is shown."""
        proto = onnx.load(bundle.file(bundle.manifest.variants["cpu-int8"].step), load_external_data=False)
        (softmax,) = [node for node in proto.graph.node if node.op_type == "LogSoftmax"]
        (attention,) = [node for node in proto.graph.node if f"cross_attention_{layer}" in node.output]
        self._logits, self._query = softmax.input[0], attention.input[0]
        for name in (self._logits, self._query):
            proto.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
        path = bundle.path / "observed.onnx"
        onnx.save(proto, path)
        self._session = onnxruntime.InferenceSession(
            str(path), session_options(), providers=["CPUExecutionProvider"]
        )
        self._model = model
        self._layer = layer
        self._seen: dict[tuple[int, Prefix], Observed] = {}
        self._cross: dict[int, dict[str, npt.NDArray[np.float32]]] = {}
        self._sources = sources

    def attention(self, source: int, target: Prefix) -> npt.NDArray[np.float32]:
        """The cross-attention at each step of a target and behind it, [T+1,H,S]."""
        return np.stack([self.after(source, target[:at]).attention for at in range(len(target) + 1)])

    def after(self, source: int, target: Prefix) -> Observed:
        """The step behind a target, every target from its own beginning."""
        if (source, target) not in self._seen:
            self._seen[source, target] = self._step(source, target)
        return self._seen[source, target]

    def _step(self, source: int, target: Prefix) -> Observed:
        model = self._model
        mask = np.ones((1, len(self._sources[source])), dtype=np.int32)
        if source not in self._cross:
            source_ids = np.array([self._sources[source]])
            encoded = model.encoder.run(None, {"source_ids": source_ids, "source_mask": mask})
            names = [output.name for output in model.encoder.get_outputs()]
            self._cross[source] = dict(zip(names, encoded, strict=True))
        keys = self._cross[source][f"cross_key_{self._layer}"][0]  # [H,S,D]
        if target:
            state = self.after(source, target[:-1]).state
        else:
            slots = model.manifest.limits.max_target_tokens
            state = {
                state.name: np.zeros(
                    (1, *state.shape) if state.kind == "cell" else (1, state.shape[0], slots, state.shape[1]),
                    dtype=np.float32,
                )
                for state in model.manifest.state
            }
        inputs = {
            "last_ids": np.array([[target[-1] if target else model.manifest.tokens.start_id or 0]]),
            "positions": np.array([len(target)], dtype=np.int32),
            "source_mask": mask,
        }
        outputs = [output.name for output in self._session.get_outputs()]
        results = self._session.run(None, inputs | self._cross[source] | state)
        found = dict(zip(outputs, results, strict=True))
        query = found[self._query].reshape(keys.shape[0], -1)  # [H,D]
        scores = np.einsum("hd,hsd->hs", query, keys) / query.shape[1] ** 0.5
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        return Observed(
            logits=found[self._logits][0],
            attention=weights / weights.sum(-1, keepdims=True),
            state={name: found[f"next_{name}"] for name in state},
        )
