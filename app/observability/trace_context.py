"""W3C Trace Context, level 1: the ids that tie log lines and spans of several services together.

https://www.w3.org/TR/trace-context/#traceparent-header
"""

from __future__ import annotations

import re
import secrets
from contextvars import ContextVar
from dataclasses import dataclass

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_SAMPLED = 0x01


@dataclass(frozen=True)
class TraceContext:
    """Where a request stands in a trace.

    Attributes:
        trace_id: 32 lower-case hexadecimal digits, shared by all that happens for one cause.
        span_id: 16 of them: the caller's part, or ours.
        sampled: whether the caller records its part.
    """

    trace_id: str
    span_id: str
    sampled: bool

    def header(self) -> str:
        """The value of a ``traceparent`` or ``traceresponse`` header."""
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"

    def child(self) -> TraceContext:
        """A new part of the same trace."""
        return TraceContext(self.trace_id, secrets.token_hex(8), self.sampled)


current_trace: ContextVar[TraceContext | None] = ContextVar("dragoman_trace", default=None)
"""The trace that log lines of this task belong to."""


def parse_traceparent(header: str) -> TraceContext | None:
    """What a ``traceparent`` header says; None if it is missing or malformed, as the standard demands.

    Later versions may append fields; version 00 may not, and ``ff`` is none.
    """
    match = _TRACEPARENT.fullmatch(header.strip(" \t"))
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    if version == "ff" or (version == "00" and rest) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))


def new_trace() -> TraceContext:
    """The first part of a trace of our own, which nobody records."""
    return TraceContext(secrets.token_hex(16), secrets.token_hex(8), sampled=False)
