"""A model whose graph calls are counted and timed, or profiled by onnxruntime, node by node."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import onnxruntime

from app.bundle import Bundle
from app.runtime import onnx_model
from app.runtime.onnx_model import OnnxModel


class CallTimes:
    """Seconds spent in the calls of each graph, over all threads."""

    def __init__(self) -> None:
        """Start from zero."""
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Start from zero again."""
        with self._lock:
            self.seconds: dict[str, float] = {}
            self.calls: dict[str, int] = {}

    def add(self, graph: str, seconds: float) -> None:
        """Count one call."""
        with self._lock:
            self.seconds[graph] = self.seconds.get(graph, 0.0) + seconds
            self.calls[graph] = self.calls.get(graph, 0) + 1


class _TimedSession:
    """A session that reports the time of each call; everything else is the session's own."""

    def __init__(self, graph: str, session: onnxruntime.InferenceSession, times: CallTimes) -> None:
        self._graph = graph
        self._session = session
        self._times = times

    def run(self, *arguments: Any) -> Any:
        return self._timed(self._session.run, *arguments)

    def run_with_iobinding(self, *arguments: Any) -> Any:
        return self._timed(self._session.run_with_iobinding, *arguments)

    def _timed(self, call: Callable[..., Any], *arguments: Any) -> Any:
        started_at_s = time.perf_counter()
        result = call(*arguments)
        self._times.add(self._graph, time.perf_counter() - started_at_s)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


def timed_model(model: OnnxModel) -> tuple[OnnxModel, CallTimes]:
    """The model with every session's calls timed; graphs are named by the model's fields."""
    times = CallTimes()
    sessions = {name: _TimedSession(name, session, times) for name, session in _sessions(model).items()}
    return dataclasses.replace(model, **sessions), times  # type: ignore[arg-type]


def profiled_model(bundle: Bundle, folder: Path, *, use_shortlist: bool) -> OnnxModel:
    """The bundle's int8 graphs with onnxruntime's profiler on; `node_seconds` ends it.

    Args:
        bundle: what to run.
        folder: where the profiler writes.
        use_shortlist: as `load_model`.
    """
    ordinary_options = onnx_model.session_options

    def profiling_options() -> onnxruntime.SessionOptions:
        options = ordinary_options()
        options.enable_profiling = True
        options.profile_file_prefix = str(folder / "profile")
        return options

    # The service has no use for a profiled session, so its loader does not offer one.
    with mock.patch.object(onnx_model, "session_options", profiling_options):
        return onnx_model.load_model(bundle, variant="cpu-int8", use_shortlist=use_shortlist)


def node_seconds(model: OnnxModel) -> dict[str, dict[str, float]]:
    """End the profile: seconds by graph and operator type, summed over all calls of its nodes."""
    found: dict[str, dict[str, float]] = {}
    for graph, session in _sessions(model).items():
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
        found[graph] = seconds_by_operator(events)
    return found


def seconds_by_operator(events: list[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of each operator type in a profile's events, the largest first."""
    seconds: dict[str, float] = {}
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            operator = event["args"]["op_name"]
            seconds[operator] = seconds.get(operator, 0.0) + event["dur"] / 1e6
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def _sessions(model: OnnxModel) -> dict[str, onnxruntime.InferenceSession]:
    values = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    return {name: value for name, value in values.items() if isinstance(value, onnxruntime.InferenceSession)}
