"""Traces: which request a log line belongs to, and, where switched on, spans for OpenTelemetry.

Spans are made after the fact from the timestamps that the engine takes anyway: no step of decoding knows of
them. Nothing of OpenTelemetry is imported by this file; `tracer_choice` does so where tracing is on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from app.observability.trace_context import TraceContext, new_trace, parse_traceparent
from app.runtime.request import Timings, TranslationResult


@dataclass(frozen=True)
class Stage:
    """A part of a translation.

    Attributes:
        name: the span's name.
        start_s: seconds from the call of the engine to the stage's begin.
        end_s: likewise to its end.
    """

    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class TranslationFacts:
    """What a span tells of one translation; counts and codes, never a text.

    Attributes:
        pair: ``en-pt``.
        started_at_ns: wall clock at the call of the engine, nanoseconds since 1970.
        ended_at_ns: the start and what the monotonic clock has counted since.
        stages: in the order they began; none where it failed.
        counts: name -> number, such as ``num_segments``.
        model: bundle id; empty where it failed.
        error_code: the code of the error it failed with; empty where it did not.
    """

    pair: str
    started_at_ns: int
    ended_at_ns: int
    stages: tuple[Stage, ...] = ()
    counts: Mapping[str, int] | None = None
    model: str = ""
    error_code: str = ""


class RequestTrace(Protocol):
    """One HTTP request's part of a trace. For the event loop."""

    @property
    def context(self) -> TraceContext:
        """This request's own ids."""
        ...

    def translated(self, facts: TranslationFacts) -> None:
        """The engine answered or failed."""
        ...

    def finish(self, *, route: str, status: int) -> None:
        """The request was answered; called once."""
        ...


class Tracer(Protocol):
    """Begins the trace of every request."""

    def begin(self, method: str, *, headers: Mapping[str, str]) -> RequestTrace:
        """A request arrived.

        Args:
            method: as metrics show it.
            headers: the request's, by lower-case name.
        """
        ...

    def close(self) -> None:
        """Send what has not been sent; blocks for some seconds at most."""
        ...


class PlainTracer:
    """Ids for the log and the answer, and no spans: what runs unless tracing is switched on."""

    def begin(self, method: str, *, headers: Mapping[str, str]) -> RequestTrace:  # noqa: ARG002
        """Continue the caller's trace, or start one."""
        caller = parse_traceparent(headers.get("traceparent", ""))
        return _PlainTrace(new_trace() if caller is None else caller.child())

    def close(self) -> None:
        """Nothing to send."""


class _PlainTrace:
    def __init__(self, context: TraceContext) -> None:
        self.context = context

    def translated(self, facts: TranslationFacts) -> None:
        """Ignore."""

    def finish(self, *, route: str, status: int) -> None:
        """Ignore."""


def stages_of(timings: Timings) -> tuple[Stage, ...]:
    """The stages of a translation, from the engine's timestamps.

    Of several segments, ``queue`` is the longest wait, ``encode`` the pass of the first one, and ``decode``
    lasts until the last one is done; so ``queue`` and ``decode`` may overlap.
    """
    stages = (
        Stage("prepare", 0.0, timings.prepared_s),
        Stage("queue", timings.prepared_s, timings.prepared_s + timings.queue_s),
        Stage("encode", timings.first_row_s, timings.first_encoded_s),
        Stage("decode", timings.first_encoded_s, timings.decoded_s),
        Stage("detokenise", timings.decoded_s, timings.total_s),
    )
    # Nothing was decoded where a text holds no segments, or the cache had them all.
    return tuple(stage for stage in stages if stage.end_s > stage.start_s)


def counts_of(result: TranslationResult) -> Mapping[str, int]:
    """How much was translated."""
    segments: Sequence[tuple[int, int]] = [
        (segment.num_source_tokens, segment.num_target_tokens)
        for text in result.texts
        for segment in text.segments
    ]
    return {
        "num_texts": len(result.texts),
        "num_segments": len(segments),
        "num_source_tokens": sum(source for source, _ in segments),
        "num_target_tokens": sum(target for _, target in segments),
    }
