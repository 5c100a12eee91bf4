"""Row slots and caches over onnxruntime sessions: the CPU's ModelRunner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from app.decoding.options import MAX_BEAM_SIZE
from app.runtime.onnx_candidates import CandidateSet
from app.runtime.onnx_model import OnnxModel
from app.runtime.runner import (
    BeamStepInput,
    BeamStepOutput,
    Float32Array,
    Int32Array,
    Int64Array,
    RowGroup,
    SourceRow,
    StepOutput,
)

_SMALLEST_GROUP = 16
_ENCODER_MULTIPLE = 8
"""Sources are padded to a multiple of this for the encoder; a segment's padding depends on itself alone."""


def row_groups(max_source_tokens: int, max_rows: int, *, max_beams: int = 1) -> tuple[RowGroup, ...]:
    """Row groups whose source lengths double up to the model's limit, for every beam size.

    A group of K beams has as many slots as give `max_rows` rows, at least one.
    """
    lengths: list[int] = []
    length = _SMALLEST_GROUP
    while length < max_source_tokens:
        lengths.append(length)
        length *= 2
    return tuple(
        RowGroup(source_length=length, max_rows=max(1, max_rows // num_beams), num_beams=num_beams)
        for num_beams in range(1, max_beams + 1)
        for length in [*lengths, max_source_tokens]
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
        self._groups = row_groups(
            model.manifest.limits.max_source_tokens,
            max_rows,
            max_beams=1 if model.beam_step is None else MAX_BEAM_SIZE,
        )
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
            for slot in slots:
                buffers.rows_of(name, slot)[:] = 0.0

    def step(self, group: int, last_ids: Int64Array, positions: Int64Array) -> StepOutput:
        """Run the step graph over slots 0..R-1; see `ModelRunner.step`."""
        buffers = self._buffers[group]
        if buffers is None:
            raise RuntimeError(f"group {group} has no rows")
        num_rows = len(last_ids)
        self._set_rows(buffers, last_ids, positions)
        self._model.step.run_with_iobinding(buffers.binding(num_rows))
        return StepOutput(
            token_ids=buffers.outputs["token_ids"][:num_rows].copy(),
            log_probs=buffers.outputs["log_probs"][:num_rows].copy(),
        )

    def beam_step(self, group: int, beams: BeamStepInput) -> BeamStepOutput:
        """Run the beam step graph over slots 0..B-1; see `ModelRunner.beam_step`."""
        buffers, session = self._buffers[group], self._model.beam_step
        if buffers is None or session is None:
            raise RuntimeError(f"group {group} has no rows")
        num_segments, num_beams = beams.last_ids.shape
        buffers.follow(beams.parents, beams.positions)
        self._set_rows(buffers, beams.last_ids.ravel(), np.repeat(beams.positions, num_beams))
        buffers.row_scores[: num_segments * num_beams] = beams.scores.ravel()
        buffers.num_candidates[0] = beams.num_candidates
        session.run_with_iobinding(buffers.binding(num_segments))
        shown = slice(0, num_segments), slice(0, beams.num_candidates)
        return BeamStepOutput(
            token_ids=buffers.outputs["token_ids"][shown].copy(),
            beams=buffers.outputs["beams"][shown].copy(),
            scores=buffers.outputs["scores"][shown].copy(),
        )

    def _set_rows(self, buffers: _GroupBuffers, last_ids: Int64Array, positions: Int64Array) -> None:
        start_id = self._model.manifest.tokens.start_id
        buffers.last_ids[: len(last_ids)] = (
            last_ids if start_id is None else np.where(positions == 0, start_id, last_ids)
        )
        buffers.positions[: len(last_ids)] = positions

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
    """The arrays of one row group and their bindings to its step graph.

    Every step runs over a prefix of the arrays, whose views are kept per number of slots: no cache is
    ever copied. The state's input and output are the same memory: the graphs read a cell
    before they write it, and write a key or value only at its own position.
    """

    def __init__(self, model: OnnxModel, group: RowGroup) -> None:
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
            name: np.zeros((slots, sizes.num_heads, group.source_length, sizes.head_size), dtype=np.float32)
            for name in self.cross_names
        }
        for state in manifest.state:
            shape = state.shape
            if state.kind == "kv":
                shape = (shape[0], manifest.limits.max_target_tokens, shape[1])
            self.arrays[state.name] = np.zeros((rows, *shape), dtype=np.float32)
        self.source_mask = np.zeros((slots, group.source_length), dtype=np.int32)
        self.last_ids = np.zeros(rows, dtype=np.int64)
        self.positions = np.zeros(rows, dtype=np.int64)
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
        self._num_continuations = min(2 * group.num_beams, sizes.vocabulary_size)
        if group.num_beams == 1:
            self._session = model.step
            self.outputs: dict[str, npt.NDArray[Any]] = {
                "token_ids": np.zeros(slots, dtype=np.int64),
                "log_probs": np.zeros(slots, dtype=np.float32),
            }
        else:
            assert model.beam_step is not None  # row_groups made no such group otherwise
            self._session = model.beam_step
            self._by_row["row_scores"] = self.row_scores
            self.outputs = {
                "token_ids": np.zeros((slots, self._num_continuations), dtype=np.int64),
                "beams": np.zeros((slots, self._num_continuations), dtype=np.int64),
                "scores": np.zeros((slots, self._num_continuations), dtype=np.float32),
            }
        self._binding = self._session.io_binding()
        self._values: dict[int, dict[str, onnxruntime.OrtValue]] = {}
        self._bound: tuple[int, int] | None = None
        self.candidates = (
            None
            if model.candidates is None
            else CandidateSet(
                model.candidates,
                vocabulary_size=sizes.vocabulary_size,
                max_rows=slots,
                min_blocks=1 if group.num_beams == 1 else self._num_continuations,
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
        for name in (*self._by_slot, *self._by_row):
            self._binding.bind_ortvalue_input(name, values[name])
        if self._num_beams > 1:
            self._binding.bind_ortvalue_input("num_candidates", values["num_candidates"])
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
        views["num_candidates"] = self.num_candidates
        return {name: onnxruntime.OrtValue.ortvalue_from_numpy(view) for name, view in views.items()}

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
        """Copy everything of one slot onto another."""
        for array in self._by_slot.values():
            array[to_slot] = array[from_slot]
        for name in self._state_names:
            self.rows_of(name, to_slot)[:] = self.rows_of(name, from_slot)
        if self.candidates is not None:
            self.candidates.move(from_slot, to_slot)
