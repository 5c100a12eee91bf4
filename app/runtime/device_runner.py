"""Row slots and caches on a device: the ModelRunner of a GPU, and of its simulation on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from app.errors import DeviceUnavailable
from app.runtime.device_buffers import DeviceBuffers, plan_buffers
from app.runtime.device_graphs import current_thread
from app.runtime.device_memory import answers
from app.runtime.device_model import DeviceModel
from app.runtime.device_stream import DeviceStream, enter_thread
from app.runtime.memory_shortage import lacks_memory
from app.runtime.onnx_runner import row_groups_of
from app.runtime.runner import (
    BeamStepInput,
    BeamStepOutput,
    DeviceLost,
    Int64Array,
    RowGroup,
    SearchKind,
    SourceRow,
    StepOutput,
)


class DeviceRunner:
    """Runs one model on one device for one worker; one thread at a time.

    Captured graphs belong to the thread in which a group's first row was admitted; in any other, steps run
    uncaptured.
    """

    def __init__(self, model: DeviceModel, *, max_rows: int) -> None:
        """Prepare empty groups; their buffers are made when the first row enters.

        Args:
            model: loaded sessions, which on a GPU no other runner uses at the same time.
            max_rows: rows per group.

        Raises:
            DeviceUnavailable: greedy search alone would need more memory than the limit allows.
        """
        self._model = model
        self._stream = DeviceStream()
        self._thread: int | None = None
        self._groups = row_groups_of(model, max_rows)
        self._buffers: list[DeviceBuffers | None] = [None] * len(self._groups)
        self._check_limit(max_rows)

    def _check_limit(self, max_rows: int) -> None:
        limit = self._model.memory_limit_bytes
        num_bytes = sum(
            plan_buffers(self._model, group).num_bytes
            for group in self._groups
            if group.kind is SearchKind.GREEDY
        )
        if limit is not None and num_bytes > limit:
            raise DeviceUnavailable(
                f"bundle {self._model.manifest.id} needs {-(-num_bytes >> 20)} MiB on {self._model.device} "
                f"for greedy search with {max_rows} rows, and the limit is {limit >> 20} MiB; lower "
                "DRAGOMAN_MAX_ROWS or raise DRAGOMAN_GPU_MEMORY_MB"
            )

    @property
    def groups(self) -> Sequence[RowGroup]:
        """The row groups, shortest source length first."""
        return self._groups

    @property
    def vocabulary_size(self) -> int:
        """V, from the manifest."""
        return self._model.manifest.sizes.vocabulary_size

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the row slots made so far, on the device."""
        return sum(buffers.num_bytes for buffers in self._buffers if buffers is not None)

    @property
    def captured_buckets(self) -> dict[int, tuple[int, ...]]:
        """The slot counts of each group made so far that run as captured graphs; empty without any."""
        return {
            index: buffers.captured_buckets
            for index, buffers in enumerate(self._buffers)
            if buffers is not None
        }

    def admit(self, group: int, newcomers: Sequence[SourceRow]) -> None:
        """Encode the newcomers and seat them; see `ModelRunner.admit`."""
        buffers = self._buffers[group]
        if buffers is None:
            buffers = self._buffers[group] = self._make(self._groups[group])
        with self._using():
            buffers.admit(newcomers)

    @contextmanager
    def _using(self) -> Iterator[None]:
        """Keep captures off; an error of a device that answers nothing any more becomes `DeviceLost`."""
        with self._model.gate.using():
            try:
                yield
            except Exception as error:
                if not lacks_memory(error) and not answers(self._model.device):
                    raise DeviceLost(f"{self._model.device} answers nothing since {error}") from error
                raise

    def _make(self, group: RowGroup) -> DeviceBuffers:
        with self._using():
            if self._thread != current_thread():
                enter_thread(self._model, self._stream)
                self._thread = current_thread()
            buffers = DeviceBuffers(self._model, group, stream=self._stream)
        # Guided steps change as many logits as they must, so no two have the same shapes.
        if self._model.captures and group.kind is not SearchKind.GUIDED:
            buffers.capture()
        return buffers

    def step(self, group: int, last_ids: Int64Array, positions: Int64Array) -> StepOutput:
        """Run the step graph over slots 0..R-1; see `ModelRunner.step`."""
        buffers = self._live(group)
        num_rows = len(last_ids)
        with self._using():
            outputs = buffers.step(self._started(last_ids, positions), positions)
        return StepOutput(
            token_ids=outputs["token_ids"][:num_rows].copy(), log_probs=outputs["log_probs"][:num_rows].copy()
        )

    def beam_step(self, group: int, beams: BeamStepInput) -> BeamStepOutput:
        """Run the beam step graph over slots 0..B-1; see `ModelRunner.beam_step`."""
        buffers = self._live(group)
        num_segments, num_beams = beams.last_ids.shape
        positions = np.repeat(beams.positions, num_beams)
        with self._using():
            buffers.follow(beams.parents)
            outputs = buffers.step(
                self._started(beams.last_ids.ravel(), positions),
                positions,
                scores=beams.scores.ravel(),
                adjustments=beams.adjustments,
            )
        shown = slice(0, num_segments), slice(0, beams.num_candidates)
        return BeamStepOutput(
            token_ids=outputs["token_ids"][shown].copy(),
            beams=outputs["beams"][shown].copy(),
            scores=outputs["scores"][shown].copy(),
            attention=None if beams.adjustments is None else outputs["attention"][:num_segments].copy(),
        )

    def move(self, group: int, *, from_slot: int, to_slot: int) -> None:
        """Copy a row's caches onto another slot, by the next call at the latest; see `ModelRunner.move`."""
        self._live(group).move(from_slot=from_slot, to_slot=to_slot)

    def _live(self, group: int) -> DeviceBuffers:
        buffers = self._buffers[group]
        if buffers is None:
            raise RuntimeError(f"group {group} has no rows")
        return buffers

    def _started(self, last_ids: Int64Array, positions: Int64Array) -> Int64Array:
        start_id = self._model.manifest.tokens.start_id
        return last_ids if start_id is None else np.where(positions == 0, start_id, last_ids)
