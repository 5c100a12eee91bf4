"""The output words a group's rows may choose from: one union for the projection, one mask per row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnxruntime

from app.runtime.runner import Float32Array, Int32Array, Int64Array

_BLOCK = 64
"""The step graph's two-stage argmax takes a multiple of this many candidates."""
_DISALLOWED = np.float32(-1e9)


class CandidateSet:
    """The union of the running rows' shortlists, and which of it each row may use.

    The projection runs over the union, but a row is masked to its own list, so its choice does not
    depend on its neighbours'. The union is made anew only when a newcomer brings a word it lacks.
    """

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        *,
        vocabulary_size: int,
        max_rows: int,
        min_blocks: int = 1,
    ) -> None:
        """Start with no candidates.

        Args:
            session: the candidates graph.
            vocabulary_size: V.
            max_rows: slots of the group.
            min_blocks: blocks the step graph needs at least: the continuations of a beam step.
        """
        self._min_columns = min_blocks * _BLOCK
        self._session = session
        self._output_names = [output.name for output in session.get_outputs()]
        self._rows: dict[int, Int32Array] = {}
        self._column_of = np.full(vocabulary_size, -1, dtype=np.int32)  # [V], -1: not in the union
        self._max_rows = max_rows
        self._ids = np.zeros(0, dtype=np.int64)  # [N]
        self._mask = np.zeros((max_rows, 0), dtype=np.float32)  # [rows,N]
        self._projection: list[onnxruntime.OrtValue] = []
        self.version = 0
        """Grows whenever bindings made earlier are out of date."""

    def admit(self, newcomers: Mapping[int, Int32Array]) -> None:
        """Take the sorted, unique candidates of newcomers, by slot.

        Slots at or behind the lowest newcomer's are free or newcomers themselves.
        """
        first_new = min(newcomers)
        rows = {slot: ids for slot, ids in self._rows.items() if slot < first_new} | dict(newcomers)
        if all((self._column_of[ids] >= 0).all() for ids in newcomers.values()):
            for slot, ids in newcomers.items():
                _allow(self._mask[slot], self._column_of[ids])
            self._rows = rows
        else:
            self._rebuild(rows)

    def move(self, from_slot: int, to_slot: int) -> None:
        """The row in `from_slot` now sits in `to_slot`."""
        self._rows[to_slot] = self._rows[from_slot]
        self._mask[to_slot] = self._mask[from_slot]

    def columns_of(self, token_ids: Int64Array) -> Int64Array:
        """The column of each token in the union, int64, -1 for those it lacks."""
        return self._column_of[token_ids].astype(np.int64)

    def bind(self, binding: onnxruntime.IOBinding, num_rows: int) -> None:
        """Bind the candidates' inputs of the step graph for the first `num_rows` rows."""
        binding.bind_ortvalue_input("candidate_ids", onnxruntime.OrtValue.ortvalue_from_numpy(self._ids))
        binding.bind_ortvalue_input(
            "candidate_mask", onnxruntime.OrtValue.ortvalue_from_numpy(self._mask[:num_rows])
        )
        for name, value in zip(self._output_names, self._projection, strict=True):
            binding.bind_ortvalue_input(name, value)

    def _rebuild(self, rows: Mapping[int, Int32Array]) -> None:
        """Make the union of the rows' candidates; nothing changes when the graph call fails."""
        union = _union(list(rows.values()), len(self._column_of))
        padding = max(-len(union) % _BLOCK, self._min_columns - len(union))
        union_ids = np.concatenate([union, np.full(padding, union[0])]).astype(np.int64)
        binding = self._session.io_binding()
        binding.bind_ortvalue_input("candidate_ids", onnxruntime.OrtValue.ortvalue_from_numpy(union_ids))
        for name in self._output_names:
            binding.bind_output(name, "cpu")
        self._session.run_with_iobinding(binding)
        self._projection = binding.get_outputs()
        self._column_of[self._ids] = -1
        self._column_of[union] = np.arange(len(union), dtype=np.int32)
        self._rows, self._ids = dict(rows), union_ids
        self._mask = np.empty((self._max_rows, len(union_ids)), dtype=np.float32)
        for slot, ids in rows.items():
            _allow(self._mask[slot], self._column_of[ids])
        self.version += 1


def _union(lists: Sequence[Int32Array], vocabulary_size: int) -> Int32Array:
    """The ids in any of the sorted lists, sorted."""
    if len(lists) == 1:
        return lists[0]
    wanted = np.zeros(vocabulary_size, dtype=bool)
    for ids in lists:
        wanted[ids] = True
    return np.flatnonzero(wanted).astype(np.int32)


def _allow(mask: Float32Array, columns: Int32Array) -> None:
    """Make one row's mask [N] allow these columns and no others."""
    mask[:] = _DISALLOWED
    mask[columns] = 0.0
