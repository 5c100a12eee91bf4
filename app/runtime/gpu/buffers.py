"""One row group's memory on a device and its bindings to the graphs."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnxruntime

from app.errors import DeviceUnavailable
from app.runtime.gpu.copies import PendingCopies, RowCopies
from app.runtime.gpu.graphs import Captures, buckets
from app.runtime.gpu.memory import LEDGER, Array, DeviceTensor, PackedTensors, TensorSpec
from app.runtime.gpu.model import DeviceModel
from app.runtime.gpu.stream import DeviceStream
from app.runtime.onnx_model import step_session
from app.runtime.runner import Int64Array, LogitAdjustments, RowGroup, SearchKind, SourceRow

MAX_CANDIDATES = 32
"""Continuations that a beam step returns of each segment, whatever is asked for; at most V."""

_COPIES = ("from_rows", "to_rows", "from_slots", "to_slots")


@dataclass(frozen=True)
class BufferPlan:
    """What a row group needs in a device's memory.

    Attributes:
        cross: the cross-attention cache, by slot.
        state: the decoder state, by row; one more row, the last, is zero for ever.
        source_mask: int32 [slots,S].
        controls: what the host sends before every step, in one piece.
        outputs: what it reads after one, in one piece.
        attention: float32 [slots,K,S] of guided groups, else None.
    """

    cross: Mapping[str, TensorSpec]
    state: Mapping[str, TensorSpec]
    source_mask: TensorSpec
    controls: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    attention: TensorSpec | None

    @property
    def num_bytes(self) -> int:
        """All of it."""
        tensors = [*self.cross.values(), *self.state.values(), self.source_mask]
        if self.attention is not None:
            tensors.append(self.attention)
        packed = PackedTensors.num_bytes(self.controls) + PackedTensors.num_bytes(self.outputs)
        return sum(spec.num_bytes for spec in tensors) + packed


def plan_buffers(model: DeviceModel, group: RowGroup) -> BufferPlan:
    """What a group needs, before any of it is made."""
    manifest, sizes, dtypes = model.manifest, model.manifest.sizes, model.dtypes()
    slots, rows, length = group.max_rows, group.max_rows * group.num_beams, group.source_length
    state = {}
    for tensor in manifest.state:
        shape = tensor.shape
        if tensor.kind == "kv":
            shape = (shape[0], manifest.limits.max_target_tokens, shape[1])
        state[tensor.name] = TensorSpec((rows + 1, *shape), dtypes[tensor.name])
    if group.kind is SearchKind.GREEDY:
        outputs = {
            "token_ids": TensorSpec((slots,), np.int64),
            "log_probs": TensorSpec((slots,), np.float32),
        }
    else:
        shape = (slots, min(MAX_CANDIDATES, sizes.vocabulary_size))
        outputs = {
            "token_ids": TensorSpec(shape, np.int64),
            "beams": TensorSpec(shape, np.int64),
            "scores": TensorSpec(shape, np.float32),
        }
    return BufferPlan(
        cross={
            f"cross_{kind}_{layer}": TensorSpec(
                (slots, sizes.num_heads, length, sizes.head_size), dtypes[f"cross_{kind}_{layer}"]
            )
            for layer in range(sizes.decoder_layers)
            for kind in ("key", "value")
        },
        state=state,
        source_mask=TensorSpec((slots, length), np.int32),
        controls={
            "last_ids": TensorSpec((rows,), np.int64),
            "positions": TensorSpec((rows,), np.int32),
            "row_scores": TensorSpec((rows,), np.float32),
            "from_rows": TensorSpec((rows,), np.int64),
            "to_rows": TensorSpec((rows,), np.int64),
            "from_slots": TensorSpec((slots,), np.int64),
            "to_slots": TensorSpec((slots,), np.int64),
        },
        outputs=outputs,
        attention=TensorSpec((slots, group.num_beams, length), np.float32)
        if group.kind is SearchKind.GUIDED
        else None,
    )


class DeviceBuffers:
    """A group's caches, which stay on the device, and the few numbers that come and go.

    The host never sees a cache: the encoder writes into the newcomers' slots, a step writes its state
    where it reads it, and rows are moved by graphs.
    """

    def __init__(
        self,
        model: DeviceModel,
        group: RowGroup,
        *,
        stream: DeviceStream,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Allocate and clear all of it, or nothing.

        Raises:
            DeviceUnavailable: the limit would be passed, or the device has no more; says how much is needed.
            ValueError: the model has no graph for this kind of search.
        """
        self._model, self._group, self._stream = model, group, stream
        self._session = step_session(model, group.kind)
        plan = plan_buffers(model, group)
        device = model.device
        what = (
            f"{group.max_rows} row slots of bundle {model.manifest.id} ({group.kind.value} search, beam size "
            f"{group.num_beams}, sources of up to {group.source_length} tokens)"
        )
        self.num_bytes = plan.num_bytes
        LEDGER.take(device, self.num_bytes, what=what, limit_bytes=model.memory_limit_bytes)
        weakref.finalize(self, LEDGER.give_back, device, self.num_bytes)
        try:
            self._cross = {name: DeviceTensor(device, spec) for name, spec in plan.cross.items()}
            self._state = {name: DeviceTensor(device, spec) for name, spec in plan.state.items()}
            self._mask = DeviceTensor(device, plan.source_mask)
            self._attention = None if plan.attention is None else DeviceTensor(device, plan.attention)
            self._controls = PackedTensors(device, plan.controls)
            self._outputs = PackedTensors(device, plan.outputs)
        except Exception as error:
            raise DeviceUnavailable(
                f"{what} need {self.num_bytes >> 20} MiB, which {device} does not have; lower "
                "DRAGOMAN_MAX_ROWS, or serve fewer models there"
            ) from error
        self._num_rows = group.max_rows * group.num_beams
        self._num_candidates = min(MAX_CANDIDATES, model.manifest.sizes.vocabulary_size)
        self._pending_rows = PendingCopies(self._num_rows)
        self._pending_slots = PendingCopies(group.max_rows)
        self._mask_of_slots = np.zeros((group.max_rows, group.source_length), dtype=np.int32)
        # A slot that nobody has attends to one position: attention to none is 0 / 0.
        self._mask_of_slots[:, 0] = 1
        self._mask_changed = True
        self._bindings: dict[int, onnxruntime.IOBinding] = {}
        self._encoding = model.encoder.io_binding()
        self._moving_state = _bound_in_place(model.copy_state, self._state, self._num_rows + 1)
        self._moving_cross = _bound_in_place(model.copy_cross, self._cross, group.max_rows)
        self._buckets = buckets(group.max_rows)
        self.captures = Captures(group.max_rows, what=what, clock=clock)

    def rehearse(self) -> None:
        """Run the step once on rows that nobody has; nobody may have a slot.

        What fails here is no fault of a capture, and what is done once, such as loading kernels, is done.
        """
        self._send(RowCopies.none(), RowCopies.none(), num_rows=0)
        self._stream.run(self._session, self._binding(self._group.max_rows))

    def capture(self) -> None:
        """Capture the step for every bucket that has no graph yet; after `rehearse`, outside of the gate.

        onnxruntime runs the graph several times for that, so live rows would go several steps at once.
        """
        self.captures.capture(self._model.gate, self._capture_step)

    def _capture_step(self, num_slots: int, graph_id: int) -> None:
        self._stream.run(self._session, self._binding(num_slots), graph_id=graph_id)

    def admit(self, newcomers: Sequence[SourceRow]) -> None:
        """Encode newcomers into their slots, whose state is empty from then on."""
        length, eos_id = self._group.source_length, self._model.manifest.tokens.eos_id
        rows = sorted(newcomers, key=lambda row: row.slot)
        source_ids = np.full((len(rows), length), eos_id, dtype=np.int64)  # [B,S]
        for index, row in enumerate(rows):
            source_ids[index, : len(row.source_ids)] = row.source_ids
            self._mask_of_slots[row.slot] = 0
            self._mask_of_slots[row.slot, : len(row.source_ids)] = 1
            self._pending_rows.empty(self._rows_of(row.slot))
        self._mask_changed = True
        # The encoder overwrites slots that others may still have to be moved from.
        moves = self._pending_slots.outstanding()
        self._send(RowCopies.none(), moves, num_rows=0)
        self._move_slots(moves)
        for first, end in _runs([row.slot for row in rows]):
            self._encode(source_ids[first:end], first_slot=rows[first].slot)

    def _encode(self, source_ids: Int64Array, *, first_slot: int) -> None:
        num_slots = len(source_ids)
        # Bound as it is in the host's memory, it is copied to the device at once, so that must be settled.
        self._stream.settle()
        self._encoding.bind_cpu_input("source_ids", source_ids)
        self._mask.bind_input(self._encoding, "source_mask", num_rows=num_slots, first_row=first_slot)
        for name, tensor in self._cross.items():
            tensor.bind_output(self._encoding, name, num_rows=num_slots, first_row=first_slot)
        self._stream.launch(self._model.encoder, self._encoding)

    def move(self, *, from_slot: int, to_slot: int) -> None:
        """Let a slot have what another one has, before the next call that needs it."""
        self._pending_slots.copy(np.array([from_slot]), np.array([to_slot]))
        self._pending_rows.copy(self._rows_of(from_slot), self._rows_of(to_slot))
        self._mask_of_slots[to_slot] = self._mask_of_slots[from_slot]
        self._mask_changed = True

    def follow(self, parents: Int64Array) -> None:
        """Let every row have its parent's state; parents [B,K] within a segment."""
        num_segments, num_beams = parents.shape
        from_rows = (parents + np.arange(num_segments)[:, None] * num_beams).ravel()
        self._pending_rows.copy(from_rows, np.arange(num_segments * num_beams))

    def step(
        self,
        last_ids: Int64Array,
        positions: Int64Array,
        *,
        scores: Array | None = None,
        adjustments: LogitAdjustments | None = None,
    ) -> dict[str, Array]:
        """Run the step over the first rows.

        Args:
            last_ids: int64 [R].
            positions: int64 [R].
            scores: float32 [R], of beams.
            adjustments: of guided groups, and of them alone.

        Returns:
            What the graph chose, at least for the slots of these rows, and ``attention`` of guided groups.
            The arrays may be written by the next step.
        """
        num_rows = len(last_ids)
        num_slots, captured = num_rows // self._group.num_beams, self.captures.of_this_thread()
        bucket = next(bucket for bucket in self._buckets if bucket >= num_slots)
        # Rows behind those that live are run in vain: their slots are free.
        num_slots = bucket if bucket in captured else num_slots
        host = self._controls.host
        host["last_ids"][:num_rows] = last_ids
        host["positions"][:num_rows] = positions
        if scores is not None:
            host["row_scores"][:num_rows] = scores
        binding = self._binding(num_slots)
        rows, slots = self._pending_rows.outstanding(), self._pending_slots.outstanding()
        self._send(rows, slots, num_rows=num_rows)
        if adjustments is not None:
            _bind_adjustments(binding, adjustments)
        self._move_slots(slots)
        self._move_rows(rows)
        self._stream.run(self._session, binding, graph_id=captured.get(num_slots))
        outputs = self._outputs.download()
        if self._attention is not None:
            outputs["attention"] = self._attention.read()
        return outputs

    def _send(self, rows: RowCopies, slots: RowCopies, *, num_rows: int) -> None:
        """Carry over what graphs are about to read; rows behind the first `num_rows` get harmless values."""
        host = self._controls.host
        host["last_ids"][num_rows:] = self._model.manifest.tokens.eos_id
        host["positions"][num_rows:] = 0
        host["row_scores"][num_rows:] = 0.0
        for name, values in zip(
            _COPIES, (rows.from_rows, rows.to_rows, slots.from_rows, slots.to_rows), strict=True
        ):
            host[name][: len(values)] = values
        self._stream.settle()
        self._controls.upload()
        if self._mask_changed:
            self._mask.write(self._mask_of_slots)
            self._mask_changed = False

    def _move_rows(self, copies: RowCopies) -> None:
        if len(copies):
            self._bind_copies(self._moving_state, len(copies), "rows")
            self._stream.launch(self._model.copy_state, self._moving_state)
        self._pending_rows.clear()

    def _move_slots(self, copies: RowCopies) -> None:
        if len(copies):
            self._bind_copies(self._moving_cross, len(copies), "slots")
            self._stream.launch(self._model.copy_cross, self._moving_cross)
        self._pending_slots.clear()

    def _bind_copies(self, binding: onnxruntime.IOBinding, num_copies: int, what: str) -> None:
        for name, place, shape in (
            ("from_rows", f"from_{what}", (num_copies,)),
            ("to_rows", f"to_{what}", (num_copies, 1)),
        ):
            self._controls.bind_input(binding, name, place=place, shape=shape)

    def _rows_of(self, slot: int) -> Int64Array:
        return slot * self._group.num_beams + np.arange(self._group.num_beams)

    def _binding(self, num_slots: int) -> onnxruntime.IOBinding:
        """The step bound to the first slots; kept, since a captured graph must find its memory again."""
        if num_slots not in self._bindings:
            self._bindings[num_slots] = self._bound_step(num_slots)
        return self._bindings[num_slots]

    def _bound_step(self, num_slots: int) -> onnxruntime.IOBinding:
        binding = self._session.io_binding()
        num_beams = self._group.num_beams
        num_rows = num_slots * num_beams
        self._mask.bind_input(binding, "source_mask", num_rows=num_slots)
        for name, tensor in self._cross.items():
            tensor.bind_input(binding, name, num_rows=num_slots)
        for name, tensor in self._state.items():
            tensor.bind_input(binding, name, num_rows=num_rows)
            tensor.bind_output(binding, f"next_{name}", num_rows=num_rows)
        self._controls.bind_input(binding, "last_ids", shape=(num_rows, 1))
        self._controls.bind_input(binding, "positions", shape=(num_rows,))
        if self._group.kind is SearchKind.GREEDY:
            for name in ("token_ids", "log_probs"):
                self._outputs.bind_output(binding, name, shape=(num_slots,))
            return binding
        self._controls.bind_input(binding, "row_scores", shape=(num_rows,))
        # Read by the host when it launches the kernels.
        d_model = self._model.manifest.sizes.d_model
        binding.bind_cpu_input("hidden_shape", np.array([num_slots, num_beams, d_model], dtype=np.int64))
        binding.bind_cpu_input("scores_shape", np.array([num_slots, -1], dtype=np.int64))
        for name in ("token_ids", "beams", "scores"):
            self._outputs.bind_output(binding, name, shape=(num_slots, self._num_candidates))
        if self._attention is not None:
            self._attention.bind_output(binding, "attention", num_rows=num_slots)
        return binding


def _bound_in_place(
    session: onnxruntime.InferenceSession, tensors: Mapping[str, DeviceTensor], num_rows: int
) -> onnxruntime.IOBinding:
    """A graph that copies rows, bound to write where it reads; what it copies is bound later."""
    binding = session.io_binding()
    for name, tensor in tensors.items():
        tensor.bind_input(binding, name, num_rows=num_rows)
        tensor.bind_output(binding, f"next_{name}", num_rows=num_rows)
    return binding


def _bind_adjustments(binding: onnxruntime.IOBinding, adjustments: LogitAdjustments) -> None:
    """Bind what a guided step changes: at least one logit, since CUDA's GatherND takes no fewer."""
    columns = np.stack([adjustments.rows, adjustments.token_ids], axis=1)
    divisors, addends = adjustments.divisors, adjustments.addends
    if not len(columns):
        columns = np.zeros((1, 2), dtype=np.int64)
        divisors, addends = np.ones(1, dtype=np.float32), np.zeros(1, dtype=np.float32)
    binding.bind_cpu_input("adjusted_columns", columns)
    binding.bind_cpu_input("adjusted_divisors", divisors)
    binding.bind_cpu_input("adjusted_addends", addends)


def _runs(slots: Sequence[int]) -> list[tuple[int, int]]:
    """Where runs of neighbouring slots begin and end in an ascending list of slots."""
    borders = [at for at in range(1, len(slots)) if slots[at] != slots[at - 1] + 1]
    return list(zip([0, *borders], [*borders, len(slots)], strict=True))
