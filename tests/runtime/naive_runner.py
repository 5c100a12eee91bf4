"""A ModelRunner over a device's graphs with nothing clever in it: the reference for the one that serves.

Everything is a numpy array, every row is encoded alone, every copy is made at once, every step gets arrays
and returns new ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from app.runtime.gpu.model import DeviceModel
from app.runtime.onnx_runner import row_groups
from app.runtime.runner import (
    BeamStepInput,
    BeamStepOutput,
    Int64Array,
    RowGroup,
    SourceRow,
    StepOutput,
)


class NaiveRunner:
    """See the module."""

    def __init__(self, model: DeviceModel, *, max_rows: int) -> None:
        self._model, limits = model, model.manifest.limits
        self._groups = row_groups(limits.max_source_tokens, max_rows, max_beams=16, max_guided_beams=16)
        self._slots: dict[tuple[int, int], dict[str, np.ndarray]] = {}  # of each group and slot
        self._rows: dict[tuple[int, int], dict[str, np.ndarray]] = {}  # of each group and row

    @property
    def groups(self) -> Sequence[RowGroup]:
        return self._groups

    @property
    def vocabulary_size(self) -> int:
        return self._model.manifest.sizes.vocabulary_size

    def admit(self, group: int, newcomers: Sequence[SourceRow]) -> None:
        shape = self._groups[group]
        for row in newcomers:
            ids = np.full((1, shape.source_length), self._model.manifest.tokens.eos_id, dtype=np.int64)
            ids[0, : len(row.source_ids)] = row.source_ids
            mask = np.zeros((1, shape.source_length), dtype=np.int32)
            mask[0, : len(row.source_ids)] = 1
            names = [output.name for output in self._model.encoder.get_outputs()]
            cross = self._model.encoder.run(names, {"source_ids": ids, "source_mask": mask})
            self._slots[group, row.slot] = {"source_mask": mask, **dict(zip(names, cross, strict=True))}
            for beam in range(shape.num_beams):
                self._rows[group, row.slot * shape.num_beams + beam] = self._empty_state()

    def step(self, group: int, last_ids: Int64Array, positions: Int64Array) -> StepOutput:
        inputs = self._inputs(group, len(last_ids), last_ids, positions)
        token_ids, log_probs = self._run(group, self._model.step, inputs, ["token_ids", "log_probs"])
        return StepOutput(token_ids, log_probs)

    def beam_step(self, group: int, beams: BeamStepInput) -> BeamStepOutput:
        num_segments, num_beams = beams.last_ids.shape
        rows = {(group, row): self._rows[group, row] for row in range(num_segments * num_beams)}
        for segment, parents in enumerate(beams.parents.tolist()):
            for beam, parent in enumerate(parents):
                self._rows[group, segment * num_beams + beam] = rows[group, segment * num_beams + parent]
        positions = np.repeat(beams.positions, num_beams)
        inputs = self._inputs(group, num_segments, beams.last_ids.ravel(), positions) | {
            "row_scores": beams.scores.ravel(),
            "hidden_shape": np.array([num_segments, num_beams, self._model.manifest.sizes.d_model]),
            "scores_shape": np.array([num_segments, -1]),
        }
        names = ["token_ids", "beams", "scores"]
        if beams.adjustments is None:
            outputs = self._run(group, self._model.beam_step, inputs, names)
        else:
            changes = beams.adjustments
            inputs |= {
                "adjusted_columns": np.stack([changes.rows, changes.token_ids], axis=1),
                "adjusted_divisors": changes.divisors,
                "adjusted_addends": changes.addends,
            }
            outputs = self._run(group, self._model.guided_step, inputs, [*names, "attention"])
        shown = [output[:, : beams.num_candidates] for output in outputs[:3]]
        return BeamStepOutput(*shown, attention=outputs[3] if len(outputs) > 3 else None)

    def move(self, group: int, *, from_slot: int, to_slot: int) -> None:
        num_beams = self._groups[group].num_beams
        self._slots[group, to_slot] = self._slots[group, from_slot]
        for beam in range(num_beams):
            source = self._rows[group, from_slot * num_beams + beam]
            self._rows[group, to_slot * num_beams + beam] = source

    def _empty_state(self) -> dict[str, np.ndarray]:
        manifest, dtypes = self._model.manifest, self._model.dtypes()
        return {
            state.name: np.zeros(
                (1, state.shape[0], manifest.limits.max_target_tokens, state.shape[1])
                if state.kind == "kv"
                else (1, *state.shape),
                dtypes[state.name],
            )
            for state in manifest.state
        }

    def _inputs(
        self, group: int, num_slots: int, last_ids: Int64Array, positions: Int64Array
    ) -> dict[str, np.ndarray]:
        start_id = self._model.manifest.tokens.start_id
        if start_id is not None:
            last_ids = np.where(positions == 0, start_id, last_ids)
        slots = [self._slots[group, slot] for slot in range(num_slots)]
        rows = [self._rows[group, row] for row in range(len(last_ids))]
        return {
            "last_ids": last_ids[:, None],
            "positions": positions.astype(np.int32),
            **{name: np.concatenate([slot[name] for slot in slots]) for name in slots[0]},
            **{name: np.concatenate([row[name] for row in rows]) for name in rows[0]},
        }

    def _run(self, group: int, session: Any, inputs: dict[str, np.ndarray], names: list[str]) -> list[Any]:
        state = [tensor.name for tensor in self._model.manifest.state]
        outputs = session.run([*names, *(f"next_{name}" for name in state)], inputs)
        for row in range(len(inputs["last_ids"])):
            self._rows[group, row] = {
                name: values[row : row + 1] for name, values in zip(state, outputs[len(names) :], strict=True)
            }
        return outputs[: len(names)]
