"""Row slots and caches on a device: the ModelRunner of a GPU, and of its simulation on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from app.errors import DeviceUnavailable
from app.runtime.gpu.buffers import DeviceBuffers, plan_buffers
from app.runtime.gpu.graphs import Superseded, current_thread
from app.runtime.gpu.memory import answers
from app.runtime.gpu.model import DeviceModel
from app.runtime.gpu.stream import DeviceStream, enter_thread
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

    On a GPU, whoever makes a runner for a model takes it from the one before, which then raises `Superseded`.
    """

    def __init__(
        self, model: DeviceModel, *, max_rows: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Prepare empty groups; their buffers are made when the first row enters.

        Args:
            model: loaded sessions, which on a GPU no other runner uses at the same time.
            max_rows: rows per group.
            clock: monotonic seconds.

        Raises:
            DeviceUnavailable: greedy search alone would need more memory than the limit allows.
        """
        self._model = model
        self._clock = clock
        self._stream = DeviceStream(model.succession)
        self._may_capture = model.captures
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
            index: buffers.captures.slot_counts
            for index, buffers in enumerate(self._buffers)
            if buffers is not None
        }

    def admit(self, group: int, newcomers: Sequence[SourceRow]) -> None:
        """Encode the newcomers and seat them; see `ModelRunner.admit`."""
        buffers = self._buffers[group]
        if buffers is None:
            buffers = self._make(self._groups[group])
        # Slots are dense: while the first one is free, nobody has any.
        if min(row.slot for row in newcomers) == 0:
            self._capture(buffers, self._groups[group])
        self._buffers[group] = buffers
        with self._using():
            buffers.admit(newcomers)

    @contextmanager
    def _using(self) -> Iterator[None]:
        """Keep captures off; an error of a device that answers nothing any more becomes `DeviceLost`."""
        with self._model.gate.using():
            self._stream.check()
            try:
                yield
            except Superseded:
                raise
            except Exception as error:
                if not lacks_memory(error) and not answers(self._model.device):
                    raise DeviceLost(f"{self._model.device} answers nothing since {error}") from error
                raise

    def _make(self, group: RowGroup) -> DeviceBuffers:
        with self._using():
            if self._thread != current_thread():
                enter_thread(self._model, self._stream)
                self._thread = current_thread()
            return DeviceBuffers(self._model, group, stream=self._stream, clock=self._clock)

    def _capture(self, buffers: DeviceBuffers, group: RowGroup) -> None:
        """Capture what is due; after a failure the group runs node by node, if it still runs at all."""
        # Guided steps change as many logits as they must, so no two have the same shapes.
        if group.kind is SearchKind.GUIDED or not self._may_capture or not buffers.captures.is_due():
            return
        with self._using():
            buffers.rehearse()
        try:
            buffers.capture()
        except Superseded:
            raise
        except Exception as error:  # noqa: BLE001 - onnxruntime has no base class for what a device raises
            buffers.captures.tell_failure(error)
            self._may_capture = False  # unless the graph still runs
            with self._using():
                buffers.rehearse()
            self._may_capture = True

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
