"""Where a translation's time goes: by graph, by operator type, and outside of graph calls."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from app.bundle import Bundle
from app.decoding.options import DecodingOptions
from app.runtime.onnx_model import OnnxModel, load_model
from benchmarks.contest import timed
from benchmarks.local_engine import Hypotheses, LocalEngine, load_shortlist, num_tokens
from benchmarks.watched_model import node_seconds, profiled_model, timed_model
from benchmarks.workload import Workload

_WARM_UP_STRIDE = 16


@dataclass(frozen=True)
class Setting:
    """What is run.

    Attributes:
        name: for the table.
        bundle: the model.
        workload: the sentences.
        beam_size: 1 is greedy.
        use_shortlist: limit outputs.
        alone: one sentence after another in one thread, or everything at once.
        num_threads: of everything at once.
        max_rows: rows of a row group.
    """

    name: str
    bundle: Bundle
    workload: Workload
    beam_size: int = 1
    use_shortlist: bool = False
    alone: bool = False
    num_threads: int = 1
    max_rows: int = 64


@dataclass(frozen=True)
class GraphTime:
    """One graph's part.

    Attributes:
        graph: role.
        num_calls: graph calls.
        seconds: in those calls, without the profiler.
        by_operator_s: the same seconds, divided among operator types as the profiler saw them. The
            profiler adds a little to every node, so many small nodes look dearer than they are. Empty
            when operators were not asked for.
    """

    graph: str
    num_calls: int
    seconds: float
    by_operator_s: Mapping[str, float]


@dataclass(frozen=True)
class Breakdown:
    """Where the time of one setting went.

    Attributes:
        name: the setting's.
        num_tokens: target tokens.
        wall_s: seconds of the run without the profiler.
        outside_share: share of the threads' time outside of graph calls: Python, and waiting for its
            lock or for work.
        graphs: those that were called.
    """

    name: str
    num_tokens: int
    wall_s: float
    outside_share: float
    graphs: tuple[GraphTime, ...]


@dataclass(frozen=True)
class Observation:
    """A breakdown and the translations it came from."""

    breakdown: Breakdown
    translations: list[Hypotheses]


def observe(setting: Setting, *, by_operator: bool = True) -> Observation:
    """Run a setting once with timed calls and, if operators are wanted, once more with the profiler."""
    model, times = timed_model(
        load_model(setting.bundle, variant="cpu-int8", use_shortlist=setting.use_shortlist)
    )
    with _engine(setting, model) as engine:
        _translate(setting, engine, setting.workload.every(_WARM_UP_STRIDE))
        times.clear()
        translations: list[Hypotheses] = []

        def work() -> int:
            translations.extend(_translate(setting, engine, setting.workload))
            return num_tokens(translations)

        run = timed(work)
    operators = _profile(setting) if by_operator else {}
    graphs = tuple(
        GraphTime(graph, times.calls[graph], seconds, scaled(operators.get(graph, {}), seconds))
        for graph, seconds in times.seconds.items()
    )
    num_threads = 1 if setting.alone else setting.num_threads
    breakdown = Breakdown(
        name=setting.name,
        num_tokens=run.num_tokens,
        wall_s=run.wall_s,
        outside_share=1 - sum(times.seconds.values()) / (run.wall_s * num_threads),
        graphs=graphs,
    )
    return Observation(breakdown, translations)


def scaled(seconds_of: Mapping[str, float], total_s: float) -> dict[str, float]:
    """The same proportions with another sum."""
    factor = total_s / (sum(seconds_of.values()) or 1.0)
    return {name: seconds * factor for name, seconds in seconds_of.items()}


def _profile(setting: Setting) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory() as name:
        model = profiled_model(setting.bundle, Path(name), use_shortlist=setting.use_shortlist)
        with _engine(setting, model) as engine:
            _translate(setting, engine, setting.workload)
        return node_seconds(model)


def _engine(setting: Setting, model: OnnxModel) -> LocalEngine:
    return LocalEngine(
        model,
        shortlist=load_shortlist(setting.bundle) if setting.use_shortlist else None,
        num_threads=setting.num_threads,
        max_rows=setting.max_rows,
    )


def _translate(setting: Setting, engine: LocalEngine, workload: Workload) -> list[Hypotheses]:
    translate = engine.one_by_one if setting.alone else engine.translate
    options = DecodingOptions(beam_size=setting.beam_size)
    return translate(workload.sources, options, max_target_tokens=workload.limits)
