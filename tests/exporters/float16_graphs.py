"""Drives a bundle's step graphs directly, call by call: cuda-fp16, which the CPU simulates, or cpu-fp32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from app.bundle import Bundle, Variant
from app.runtime.onnx_model import session_options

Array = npt.NDArray[Any]
NUM_CANDIDATES = 32


class StepGraphs:
    """One variant's graphs and the caches of B segments of K beams, states bound in place."""

    def __init__(self, bundle: Bundle, variant: Variant, sources: Sequence[Sequence[int]], num_beams: int):
        graphs = bundle.manifest.variants[variant]
        self._folder, self._graphs = bundle.path, graphs
        self.manifest, self.is_half = bundle.manifest, variant == "cuda-fp16"
        self._sessions: dict[str, onnxruntime.InferenceSession] = {}
        self.num_beams = num_beams
        self.num_segments = len(sources)
        self.source_ids = np.zeros((len(sources), max(map(len, sources))), np.int64)
        self.source_mask = np.zeros(self.source_ids.shape, np.int32)
        for row, ids in enumerate(sources):
            self.source_ids[row, : len(ids)] = ids
            self.source_mask[row, : len(ids)] = 1
        self.cross = self.run(
            "encoder", {"source_ids": self.source_ids, "source_mask": self.source_mask}, in_place=()
        )
        self.state = self.empty_state(len(sources) * num_beams)

    def empty_state(self, num_rows: int) -> dict[str, Array]:
        half = np.float16 if self.is_half else np.float32
        state: dict[str, Array] = {}
        for tensor in self.manifest.state:
            if tensor.kind == "cell":
                state[tensor.name] = np.zeros((num_rows, *tensor.shape), np.float32)
            else:
                heads, width = tensor.shape
                shape = (num_rows, heads, self.manifest.limits.max_target_tokens, width)
                state[tensor.name] = np.zeros(shape, half)
        return state

    def session(self, role: str) -> onnxruntime.InferenceSession:
        if role not in self._sessions:
            path = self._folder / getattr(self._graphs, role)
            self._sessions[role] = onnxruntime.InferenceSession(
                str(path), session_options(), providers=["CPUExecutionProvider"]
            )
        return self._sessions[role]

    def run(self, role: str, feeds: Mapping[str, Array], *, in_place: Sequence[str]) -> dict[str, Array]:
        """Outputs by name; those that are ``next_`` of a tensor of `in_place` are written over it."""
        session = self.session(role)
        binding = session.io_binding()
        values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in feeds.items()}
        for name in {tensor.name for tensor in session.get_inputs()}:
            binding.bind_ortvalue_input(name, values[name])
        returned = []
        for output in session.get_outputs():
            bound = output.name.removeprefix("next_")
            if bound in in_place:
                binding.bind_ortvalue_output(output.name, values[bound])
            else:
                binding.bind_output(output.name)
                returned.append(output.name)
        session.run_with_iobinding(binding)
        outputs = {
            output.name: value
            for output, value in zip(session.get_outputs(), binding.get_outputs(), strict=True)
        }
        return {name: outputs[name].numpy() for name in returned}

    def step(
        self,
        last_ids: Array,
        positions: Array,
        *,
        scores: Array | None = None,
        adjustments: tuple[Array, Array, Array] | None = None,
    ) -> dict[str, Array]:
        """One step over all rows: greedy without scores, guided with adjustments."""
        feeds: dict[str, Array] = {
            "last_ids": last_ids.reshape(-1, 1).astype(np.int64),
            "positions": positions.astype(np.int32),
            "source_mask": self.source_mask,
            **self.cross,
            **self.state,
        }
        role = "step"
        if scores is not None:
            role = "beam_step"
            feeds["row_scores"] = scores.astype(np.float32)
            if self.is_half:
                d_model = self.manifest.sizes.d_model
                feeds["hidden_shape"] = np.array([self.num_segments, self.num_beams, d_model], np.int64)
                feeds["scores_shape"] = np.array([self.num_segments, -1], np.int64)
            else:
                feeds["num_candidates"] = np.array([NUM_CANDIDATES], np.int64)
        if adjustments is not None:
            role = "guided_step"
            names = ("adjusted_columns", "adjusted_divisors", "adjusted_addends")
            feeds |= dict(zip(names, adjustments, strict=True))
        return self.run(role, feeds, in_place=tuple(self.state))
