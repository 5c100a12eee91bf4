"""The arrays of one row group and their bindings to its step graph."""

from __future__ import annotations

import math
import mmap
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from app.runtime.onnx_candidates import CandidateSet
from app.runtime.onnx_model import OnnxModel, step_session
from app.runtime.runner import Float32Array, Int64Array, LogitAdjustments, RowGroup, SearchKind


class GroupBuffers:
    """The arrays of one row group and their bindings to its step graph.

    Every step runs over a prefix of the arrays, whose views are kept per number of slots: no cache is
    ever copied. The state's input and output are the same memory: the graphs read a cell
    before they write it, and write a key or value only at its own position.
    """

    def __init__(self, model: OnnxModel, group: RowGroup) -> None:
        """Allocate what the group needs.

        Raises:
            ValueError: the model has no graph for this kind of search.
        """
        manifest, sizes = model.manifest, model.manifest.sizes
        slots, self._num_beams = group.max_rows, group.num_beams
        rows = slots * group.num_beams
        self.cross_names = [
            f"cross_{kind}_{layer}" for layer in range(sizes.decoder_layers) for kind in ("key", "value")
        ]
        self.cell_names = [state.name for state in manifest.state if state.kind == "cell"]
        self._cache_names = [state.name for state in manifest.state if state.kind == "kv"]
        self._state_names = [state.name for state in manifest.state]
        self.arrays: dict[str, Float32Array] = {
            name: _untouched_zeros((slots, sizes.num_heads, group.source_length, sizes.head_size))
            for name in self.cross_names
        }
        for state in manifest.state:
            shape = state.shape
            if state.kind == "kv":
                shape = (shape[0], manifest.limits.max_target_tokens, shape[1])
            self.arrays[state.name] = _untouched_zeros((rows, *shape))
        self.source_mask = np.zeros((slots, group.source_length), dtype=np.int32)
        self.last_ids = np.zeros((rows, 1), dtype=np.int64)
        self.positions = np.zeros(rows, dtype=np.int32)
        self.row_scores = np.zeros(rows, dtype=np.float32)
        self.num_candidates = np.zeros(1, dtype=np.int64)
        self._by_slot: dict[str, npt.NDArray[Any]] = {
            **{name: self.arrays[name] for name in self.cross_names},
            "source_mask": self.source_mask,
        }
        self._by_row: dict[str, npt.NDArray[Any]] = {
            **{name: self.arrays[name] for name in self._state_names},
            "last_ids": self.last_ids,
            "positions": self.positions,
        }
        self.session = step_session(model, group.kind)
        self._fixed: dict[str, npt.NDArray[Any]] = {}
        self._adjusted: dict[str, npt.NDArray[Any]] = {}
        min_blocks = 1
        if group.kind is SearchKind.GREEDY:
            self.outputs: dict[str, npt.NDArray[Any]] = {
                "token_ids": np.zeros(slots, dtype=np.int64),
                "log_probs": np.zeros(slots, dtype=np.float32),
            }
        else:
            min_blocks = num_candidates = min(2 * group.num_beams, sizes.vocabulary_size)
            self._by_row["row_scores"] = self.row_scores
            self._fixed["num_candidates"] = self.num_candidates
            self.outputs = {
                "token_ids": np.zeros((slots, num_candidates), dtype=np.int64),
                "beams": np.zeros((slots, num_candidates), dtype=np.int64),
                "scores": np.zeros((slots, num_candidates), dtype=np.float32),
            }
        if group.kind is SearchKind.GUIDED:
            shape = (slots, group.num_beams, group.source_length)
            self.outputs["attention"] = np.zeros(shape, dtype=np.float32)
        self._binding = self.session.io_binding()
        self._values: dict[int, dict[str, onnxruntime.OrtValue]] = {}
        self._bound: tuple[int, int] | None = None
        self.candidates = (
            None
            if model.candidates is None
            else CandidateSet(
                model.candidates,
                vocabulary_size=sizes.vocabulary_size,
                max_rows=slots,
                min_blocks=min_blocks,
            )
        )

    def binding(self, num_slots: int) -> onnxruntime.IOBinding:
        """The step graph bound to the first `num_slots` slots of every array."""
        version = 0 if self.candidates is None else self.candidates.version
        if self._bound == (num_slots, version):
            return self._binding
        values = self._values.get(num_slots)
        if values is None:
            values = self._values[num_slots] = self._views(num_slots)
        self._bound = None  # until all are bound
        for name in (*self._by_slot, *self._by_row, *self._fixed):
            self._binding.bind_ortvalue_input(name, values[name])
        for name in self.outputs:
            self._binding.bind_ortvalue_output(name, values[name])
        for name in self._state_names:
            self._binding.bind_ortvalue_output(f"next_{name}", values[name])
        if self.candidates is not None:
            self.candidates.bind(self._binding, num_slots)
        self._bound = (num_slots, version)
        return self._binding

    def _views(self, num_slots: int) -> dict[str, onnxruntime.OrtValue]:
        num_rows = num_slots * self._num_beams
        views = {name: array[:num_slots] for name, array in (self._by_slot | self.outputs).items()}
        views |= {name: array[:num_rows] for name, array in self._by_row.items()}
        views |= self._fixed
        return {name: onnxruntime.OrtValue.ortvalue_from_numpy(view) for name, view in views.items()}

    def bind_adjustments(self, adjustments: LogitAdjustments) -> None:
        """Bind what the next step of a guided group changes, in addition to `binding`.

        A token that is no candidate of any row cannot be chosen as it is: its adjustment is left out.
        """
        columns = adjustments.token_ids
        if self.candidates is not None:
            columns = self.candidates.columns_of(adjustments.token_ids)
        known = columns >= 0
        # Kept until the next step: the binding does not keep the memory alive.
        self._adjusted = {
            "adjusted_columns": np.stack([adjustments.rows[known], columns[known]], axis=1),
            "adjusted_divisors": adjustments.divisors[known],
            "adjusted_addends": adjustments.addends[known],
        }
        for name, array in self._adjusted.items():
            self._binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(array))

    def rows_of(self, name: str, slot: int) -> Float32Array:
        """The rows of a slot in a state tensor, a view."""
        return self.arrays[name][slot * self._num_beams : (slot + 1) * self._num_beams]

    def follow(self, parents: Int64Array, positions: Int64Array) -> None:
        """Let every row's state be its parent's; parents [B,K] within a segment, positions [B]."""
        num_segments, num_beams = parents.shape
        rows = (parents + np.arange(num_segments)[:, None] * num_beams).ravel()
        moved = np.flatnonzero(rows != np.arange(len(rows)))
        if not len(moved):
            return
        for name in self.cell_names:
            self.arrays[name][moved] = self.arrays[name][rows[moved]]
        longest = int(positions.max())
        for name in self._cache_names:
            self.arrays[name][moved, :, :longest] = self.arrays[name][rows[moved], :, :longest]

    def move(self, from_slot: int, to_slot: int) -> None:
        """Copy what one slot has onto another; of a cache that is what its rows have written so far."""
        for array in self._by_slot.values():
            array[to_slot] = array[from_slot]
        from_rows, to_rows = (
            slice(slot * self._num_beams, (slot + 1) * self._num_beams) for slot in (from_slot, to_slot)
        )
        self.positions[to_rows] = self.positions[from_rows]
        num_written = int(self.positions[from_rows].max()) + 1
        for name in self.cell_names:
            self.arrays[name][to_rows] = self.arrays[name][from_rows]
        for name in self._cache_names:
            self.arrays[name][to_rows, :, :num_written] = self.arrays[name][from_rows, :, :num_written]
        if self.candidates is not None:
            self.candidates.move(from_slot, to_slot)


def _untouched_zeros(shape: tuple[int, ...]) -> Float32Array:
    """Zeros straight from the system, which lends only the pages that are written.

    `np.zeros` would often get memory that was used before, while bundles were loaded, and have to clear all
    of it, though most rows of most groups are never taken.
    """
    num_bytes = math.prod(shape) * np.dtype(np.float32).itemsize
    if sys.platform == "win32":
        return np.zeros(shape, dtype=np.float32)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, dtype=np.float32).reshape(shape)
