"""Row slots and caches over onnxruntime sessions: the CPU's ModelRunner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from app.runtime.onnx_candidates import CandidateSet
from app.runtime.onnx_model import OnnxModel
from app.runtime.runner import Float32Array, Int32Array, Int64Array, RowGroup, SourceRow, StepOutput

_SMALLEST_GROUP = 16
_ENCODER_MULTIPLE = 8
"""Sources are padded to a multiple of this for the encoder; a segment's padding depends on itself alone."""


def row_groups(max_source_tokens: int, max_rows: int) -> tuple[RowGroup, ...]:
    """Row groups whose source lengths double up to the model's limit."""
    lengths: list[int] = []
    length = _SMALLEST_GROUP
    while length < max_source_tokens:
        lengths.append(length)
        length *= 2
    return tuple(
        RowGroup(source_length=length, max_rows=max_rows) for length in [*lengths, max_source_tokens]
    )


class OnnxRunner:
    """Runs one model for one worker. Sessions are shared, buffers are its own; one thread only."""

    def __init__(self, model: OnnxModel, *, max_rows: int) -> None:
        """Prepare empty groups; their buffers are made when the first row enters.

        Args:
            model: loaded sessions.
            max_rows: rows per group.
        """
        self._model = model
        self._groups = row_groups(model.manifest.limits.max_source_tokens, max_rows)
        self._buffers: list[_GroupBuffers | None] = [None] * len(self._groups)

    @property
    def groups(self) -> Sequence[RowGroup]:
        """The row groups, shortest source length first."""
        return self._groups

    @property
    def vocabulary_size(self) -> int:
        """V, from the manifest."""
        return self._model.manifest.sizes.vocabulary_size

    def admit(self, group: int, newcomers: Sequence[SourceRow]) -> None:
        """Encode the newcomers and seat them; see `ModelRunner.admit`."""
        buffers = self._buffers[group]
        if buffers is None:
            buffers = self._buffers[group] = _GroupBuffers(self._model, self._groups[group])
        by_length: dict[int, list[SourceRow]] = {}
        for row in newcomers:
            padded = -(-len(row.source_ids) // _ENCODER_MULTIPLE) * _ENCODER_MULTIPLE
            by_length.setdefault(min(padded, self._groups[group].source_length), []).append(row)
        for padded_length, rows in by_length.items():
            self._encode(buffers, padded_length, rows)
        if buffers.candidates is not None:
            buffers.candidates.admit({row.slot: _required_candidates(row) for row in newcomers})

    def _encode(self, buffers: _GroupBuffers, padded_length: int, rows: Sequence[SourceRow]) -> None:
        source_ids = np.full(
            (len(rows), padded_length), self._model.manifest.tokens.eos_id, dtype=np.int64
        )  # [B,S]
        source_mask = np.zeros((len(rows), padded_length), dtype=np.int32)  # [B,S]
        for index, row in enumerate(rows):
            source_ids[index, : len(row.source_ids)] = row.source_ids
            source_mask[index, : len(row.source_ids)] = 1
        encoded = self._model.encoder.run(
            buffers.cross_names, {"source_ids": source_ids, "source_mask": source_mask}
        )  # each [B,H,S,D]
        slots = [row.slot for row in rows]
        for name, values in zip(buffers.cross_names, encoded, strict=True):
            buffers.arrays[name][slots, :, :padded_length] = values
            # A former row's infinities or NaNs would pass the mask: 0 * NaN is NaN.
            buffers.arrays[name][slots, :, padded_length:] = 0.0
        buffers.source_mask[slots] = 0
        buffers.source_mask[slots, :padded_length] = source_mask
        for name in buffers.cell_names:
            buffers.arrays[name][slots] = 0.0

    def step(self, group: int, last_ids: Int64Array, positions: Int64Array) -> StepOutput:
        """Run the step graph over slots 0..R-1; see `ModelRunner.step`."""
        buffers = self._buffers[group]
        if buffers is None:
            raise RuntimeError(f"group {group} has no rows")
        num_rows = len(last_ids)
        start_id = self._model.manifest.tokens.start_id
        buffers.last_ids[:num_rows] = (
            last_ids if start_id is None else np.where(positions == 0, start_id, last_ids)
        )
        buffers.positions[:num_rows] = positions
        self._model.step.run_with_iobinding(buffers.binding(num_rows))
        return StepOutput(
            token_ids=buffers.token_ids[:num_rows].copy(), log_probs=buffers.log_probs[:num_rows].copy()
        )

    def move(self, group: int, *, from_slot: int, to_slot: int) -> None:
        """Copy a row's caches onto another slot; see `ModelRunner.move`."""
        buffers = self._buffers[group]
        if buffers is None:
            raise RuntimeError(f"group {group} has no rows")
        buffers.move(from_slot, to_slot)


def _required_candidates(row: SourceRow) -> Int32Array:
    if row.candidates is None:
        raise ValueError("this model was loaded with its shortlist: every row needs candidates")
    return row.candidates


class _GroupBuffers:
    """The arrays of one row group and their bindings to the step graph.

    Every step runs over a prefix of the arrays, whose views are kept per number of rows: no cache is
    ever copied. The state's input and output are the same memory: the graphs read a cell
    before they write it, and write a key or value only at its own position.
    """

    def __init__(self, model: OnnxModel, group: RowGroup) -> None:
        manifest, sizes = model.manifest, model.manifest.sizes
        rows, source_length = group.max_rows, group.source_length
        self.cross_names = [
            f"cross_{kind}_{layer}" for layer in range(sizes.decoder_layers) for kind in ("key", "value")
        ]
        self.cell_names = [state.name for state in manifest.state if state.kind == "cell"]
        self._state_names = [state.name for state in manifest.state]
        self.arrays: dict[str, Float32Array] = {
            name: np.zeros((rows, sizes.num_heads, source_length, sizes.head_size), dtype=np.float32)
            for name in self.cross_names
        }
        for state in manifest.state:
            shape = state.shape
            if state.kind == "kv":
                shape = (shape[0], manifest.limits.max_target_tokens, shape[1])
            self.arrays[state.name] = np.zeros((rows, *shape), dtype=np.float32)
        self.source_mask = np.zeros((rows, source_length), dtype=np.int32)
        self.last_ids = np.zeros(rows, dtype=np.int64)
        self.positions = np.zeros(rows, dtype=np.int64)
        self.token_ids = np.zeros(rows, dtype=np.int64)
        self.log_probs = np.zeros(rows, dtype=np.float32)
        self._inputs: dict[str, npt.NDArray[Any]] = {
            **self.arrays,
            "source_mask": self.source_mask,
            "last_ids": self.last_ids,
            "positions": self.positions,
        }
        self._outputs: dict[str, npt.NDArray[Any]] = {
            "token_ids": self.token_ids,
            "log_probs": self.log_probs,
        }
        self._binding = model.step.io_binding()
        self._values: dict[int, dict[str, onnxruntime.OrtValue]] = {}
        self._bound: tuple[int, int] | None = None
        self.candidates = (
            None
            if model.candidates is None
            else CandidateSet(model.candidates, vocabulary_size=sizes.vocabulary_size, max_rows=rows)
        )

    def binding(self, num_rows: int) -> onnxruntime.IOBinding:
        """The step graph bound to the first `num_rows` rows of every array."""
        version = 0 if self.candidates is None else self.candidates.version
        if self._bound == (num_rows, version):
            return self._binding
        values = self._values.get(num_rows)
        if values is None:
            values = self._values[num_rows] = {
                name: onnxruntime.OrtValue.ortvalue_from_numpy(array[:num_rows])
                for name, array in (self._inputs | self._outputs).items()
            }
        self._bound = None  # until all are bound
        for name in self._inputs:
            self._binding.bind_ortvalue_input(name, values[name])
        for name in self._outputs:
            self._binding.bind_ortvalue_output(name, values[name])
        for name in self._state_names:
            self._binding.bind_ortvalue_output(f"next_{name}", values[name])
        if self.candidates is not None:
            self.candidates.bind(self._binding, num_rows)
        self._bound = (num_rows, version)
        return self._binding

    def move(self, from_slot: int, to_slot: int) -> None:
        for array in self.arrays.values():
            array[to_slot] = array[from_slot]
        self.source_mask[to_slot] = self.source_mask[from_slot]
        if self.candidates is not None:
            self.candidates.move(from_slot, to_slot)
