"""Row slots and caches over onnxruntime sessions: the CPU's ModelRunner."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from app.decoding.options import MAX_BEAM_SIZE
from app.runtime.onnx_buffers import GroupBuffers
from app.runtime.onnx_model import OnnxModel, StepGraphs
from app.runtime.runner import (
    BeamStepInput,
    BeamStepOutput,
    Int32Array,
    Int64Array,
    RowGroup,
    SearchKind,
    SourceRow,
    StepOutput,
)

_SMALLEST_GROUP = 64
_ENCODER_MULTIPLE = 8
"""Sources are padded to a multiple of this for the encoder; a segment's padding depends on itself alone."""


def row_groups(
    max_source_tokens: int, max_rows: int, *, max_beams: int = 1, max_guided_beams: int = 0
) -> tuple[RowGroup, ...]:
    """Row groups whose source lengths double up to the model's limit, for every kind and beam size.

    A group of K beams has as many slots as give `max_rows` rows, at least one.
    """
    lengths: list[int] = []
    length = _SMALLEST_GROUP
    while length < max_source_tokens:
        lengths.append(length)
        length *= 2
    kinds = [
        (SearchKind.GREEDY, 1),
        *((SearchKind.BEAMS, num_beams) for num_beams in range(2, max_beams + 1)),
        *((SearchKind.GUIDED, num_beams) for num_beams in range(1, max_guided_beams + 1)),
    ]
    return tuple(
        RowGroup(source_length=length, max_rows=max(1, max_rows // num_beams), num_beams=num_beams, kind=kind)
        for kind, num_beams in kinds
        for length in [*lengths, max_source_tokens]
    )


def row_groups_of(model: StepGraphs, max_rows: int) -> tuple[RowGroup, ...]:
    """The row groups of all that a model can search."""
    return row_groups(
        model.manifest.limits.max_source_tokens,
        max_rows,
        max_beams=1 if model.beam_step is None else MAX_BEAM_SIZE,
        max_guided_beams=0 if model.guided_step is None else MAX_BEAM_SIZE,
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
        self._groups = row_groups_of(model, max_rows)
        self._buffers: list[GroupBuffers | None] = [None] * len(self._groups)

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
            buffers = self._buffers[group] = GroupBuffers(self._model, self._groups[group])
        by_length: dict[int, list[SourceRow]] = {}
        for row in newcomers:
            padded = -(-len(row.source_ids) // _ENCODER_MULTIPLE) * _ENCODER_MULTIPLE
            by_length.setdefault(min(padded, self._groups[group].source_length), []).append(row)
        for padded_length, rows in by_length.items():
            self._encode(buffers, padded_length, rows)
        if buffers.candidates is not None:
            buffers.candidates.admit({row.slot: _required_candidates(row) for row in newcomers})

    def _encode(self, buffers: GroupBuffers, padded_length: int, rows: Sequence[SourceRow]) -> None:
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
        buffers.session.run_with_iobinding(buffers.binding(num_rows))
        return StepOutput(
            token_ids=buffers.outputs["token_ids"][:num_rows].copy(),
            log_probs=buffers.outputs["log_probs"][:num_rows].copy(),
        )

    def beam_step(self, group: int, beams: BeamStepInput) -> BeamStepOutput:
        """Run the beam step graph over slots 0..B-1; see `ModelRunner.beam_step`."""
        buffers = self._buffers[group]
        if buffers is None:
            raise RuntimeError(f"group {group} has no rows")
        num_segments, num_beams = beams.last_ids.shape
        buffers.follow(beams.parents, beams.positions)
        self._set_rows(buffers, beams.last_ids.ravel(), np.repeat(beams.positions, num_beams))
        buffers.row_scores[: num_segments * num_beams] = beams.scores.ravel()
        buffers.num_candidates[0] = beams.num_candidates
        binding = buffers.binding(num_segments)
        if beams.adjustments is not None:
            buffers.bind_adjustments(beams.adjustments)
        buffers.session.run_with_iobinding(binding)
        shown = slice(0, num_segments), slice(0, beams.num_candidates)
        return BeamStepOutput(
            token_ids=buffers.outputs["token_ids"][shown].copy(),
            beams=buffers.outputs["beams"][shown].copy(),
            scores=buffers.outputs["scores"][shown].copy(),
            attention=None
            if beams.adjustments is None
            else buffers.outputs["attention"][:num_segments].copy(),
        )

    def _set_rows(self, buffers: GroupBuffers, last_ids: Int64Array, positions: Int64Array) -> None:
        start_id = self._model.manifest.tokens.start_id
        if start_id is not None:
            last_ids = np.where(positions == 0, start_id, last_ids)
        buffers.last_ids[: len(last_ids), 0] = last_ids
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
