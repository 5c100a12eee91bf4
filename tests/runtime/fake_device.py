"""A device on the CPU that is as strict as a GPU: what is launched waits, and captured graphs never change.

* A run that nobody waits for is not done before somebody waits, as on a stream that is far behind: whoever
  overwrites its inputs meanwhile changes its results.
* The first run under a new graph id happens three times. Later ones fail unless shapes and addresses are
  the same. Another thread has graphs of its own.
* A capture fails while anything else runs, and anything else fails while one is captured.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnxruntime

from app.runtime.gpu.graphs import CaptureGate
from app.runtime.gpu.model import DeviceModel

NUM_RUNS_TO_CAPTURE = 3


@dataclasses.dataclass(frozen=True)
class Run:
    """What a session was asked."""

    session: str
    graph_id: int
    awaited: bool
    num_rows: int
    captures: bool = False


class FakeGpu:
    """The stream that all sessions of a model share, and its captured graphs."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.during_capture: Callable[[], None] = lambda: None
        self.failing: dict[str, Exception] = {}
        self._waiting: list[Callable[[], None]] = []
        self._captured: dict[tuple[str, int, int], object] = {}
        self._lock = threading.RLock()
        self._num_inside = 0
        self._capturing = False

    @contextmanager
    def call(self, *, captures: bool) -> Iterator[None]:
        with self._lock:
            if self._capturing or (captures and self._num_inside):
                raise RuntimeError("CUDA error 901: another thread uses the GPU during a capture")
            self._num_inside += 1
            self._capturing = captures
        try:
            yield
        finally:
            with self._lock:
                self._num_inside -= 1
                self._capturing = False if captures else self._capturing

    def run(self, session: FakeSession, binding: FakeBinding, *, graph_id: int, awaited: bool) -> None:
        key = session.name, threading.get_ident(), graph_id
        replays = session.can_capture and graph_id != -1
        captures = replays and key not in self._captured
        num_rows = binding.num_rows()
        self.runs.append(Run(session.name, graph_id, awaited, num_rows, captures))
        if session.name in self.failing:
            raise self.failing.pop(session.name)
        with self.call(captures=captures):
            if captures:
                self.drain()
                self._captured[key] = binding.signature()
                self.during_capture()
                for _ in range(NUM_RUNS_TO_CAPTURE):
                    binding.execute()
                return
            if replays and self._captured[key] != binding.signature():
                raise RuntimeError(f"graph {graph_id} was captured with other shapes or addresses")
            self._waiting.append(binding.snapshot().execute)
            if awaited:
                self.drain()

    def drain(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for job in waiting:
            job()


class FakeBinding:
    """Records what is bound, and binds it to the real session when the work is done."""

    def __init__(self, session: onnxruntime.InferenceSession, gpu: FakeGpu) -> None:
        self._session, self._gpu = session, gpu
        self._inputs: dict[str, tuple[Any, ...]] = {}
        self._outputs: dict[str, tuple[Any, ...]] = {}

    def bind_input(self, name: str, *place: Any) -> None:
        self._inputs[name] = place

    def bind_cpu_input(self, name: str, values: np.ndarray) -> None:
        self._inputs[name] = (values.copy(),)  # on its way to the device at once

    def bind_output(self, name: str, *place: Any) -> None:
        self._outputs[name] = place

    def synchronize_outputs(self) -> None:
        with self._gpu.call(captures=False):
            self._gpu.drain()

    def num_rows(self) -> int:
        shape = self._inputs["positions"][3] if "positions" in self._inputs else [0]
        return int(shape[0])

    def signature(self) -> object:
        return [
            (name, [(item.shape, item.tobytes()) if isinstance(item, np.ndarray) else item for item in place])
            for name, place in [*sorted(self._inputs.items()), *sorted(self._outputs.items())]
        ]

    def snapshot(self) -> FakeBinding:
        copy = FakeBinding(self._session, self._gpu)
        copy._inputs, copy._outputs = dict(self._inputs), dict(self._outputs)
        return copy

    def execute(self) -> None:
        binding = self._session.io_binding()
        for name, place in self._inputs.items():
            if len(place) == 1:
                binding.bind_cpu_input(name, place[0])
            else:
                binding.bind_input(name, *place)
        for name, place in self._outputs.items():
            binding.bind_output(name, *place)
        self._session.run_with_iobinding(binding)


class FakeSession:
    """A real session behind the fake stream."""

    def __init__(self, name: str, session: onnxruntime.InferenceSession, gpu: FakeGpu) -> None:
        self.name, self.can_capture = name, name in ("step", "beam_step")
        self._session, self._gpu = session, gpu

    def get_inputs(self) -> list[Any]:
        return self._session.get_inputs()

    def get_outputs(self) -> list[Any]:
        return self._session.get_outputs()

    def io_binding(self) -> FakeBinding:
        return FakeBinding(self._session, self._gpu)

    def run_with_iobinding(self, binding: FakeBinding, options: onnxruntime.RunOptions) -> None:
        self._gpu.run(
            self,
            binding,
            graph_id=int(options.get_run_config_entry("gpu_graph_id")),
            awaited=options.get_run_config_entry("disable_synchronize_execution_providers") == "0",
        )


def on_fake_gpu(model: DeviceModel, gpu: FakeGpu, **changes: Any) -> DeviceModel:
    """The same model with its sessions behind a fake stream, and a gate of its own."""
    names = ("encoder", "step", "copy_state", "copy_cross", "beam_step", "guided_step")
    sessions = {
        name: FakeSession(name, session, gpu)
        for name in names
        if (session := getattr(model, name)) is not None
    }
    return dataclasses.replace(model, **({"captures": True, "gate": CaptureGate()} | sessions | changes))
