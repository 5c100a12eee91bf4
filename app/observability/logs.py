"""Structured logs: one format for the service and for the server below it."""

from __future__ import annotations

import logging
import sys
import traceback
from typing import Literal, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from app.observability.log_handler import handler_for
from app.observability.trace_context import current_trace

LogFormat = Literal["console", "json"]
_QUIET_LOGGERS = ("uvicorn.access",)
"""The server's own access lines print query strings, and a query string may hold a text."""
_MAX_FRAMES = 30
"""Frames shown of one error: enough for the web framework's own and ours."""
_MAX_CAUSES = 4


def configure_logging(log_format: LogFormat, log_level: str, *, stream: TextIO | None = None) -> None:
    """Send structlog and the standard library's loggers through one formatter to one stream.

    Args:
        log_format: ``console`` for people, ``json`` for log collectors, one object per line.
        log_level: ``debug``, ``info``, ``warning`` or ``error``.
        stream: where lines go; None is standard error.
    """
    stream = sys.stderr if stream is None else stream
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        _with_trace_ids,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _without_exception_values,
    ]
    renderer: Processor = (
        structlog.processors.JSONRenderer(ensure_ascii=False)
        if log_format == "json"
        else structlog.dev.ConsoleRenderer(colors=stream.isatty())
    )
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    handler = handler_for(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder(allow=())],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(log_level.upper())
    for name in ("uvicorn", "uvicorn.error", *_QUIET_LOGGERS):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = name not in _QUIET_LOGGERS


def frames_of(error: BaseException) -> list[str]:
    """Where an error arose, innermost last, causes first; without the error's message.

    Messages of foreign errors may quote the data they choked on (`UnicodeEncodeError` does), so only
    class names and code positions are kept. Of a long chain or a deep stack, the end nearest to the error.
    """
    chain = [error]
    while len(chain) <= _MAX_CAUSES:
        last = chain[-1]
        cause = last.__cause__ or (None if last.__suppress_context__ else last.__context__)
        if cause is None or any(cause is known for known in chain):
            break
        chain.append(cause)
    frames: list[str] = []
    for one in reversed(chain):
        frames += [*(["then"] if frames else []), f"{type(one).__module__}.{type(one).__qualname__}"]
        places = list(traceback.walk_tb(one.__traceback__))
        if (num_left_out := len(places) - _MAX_FRAMES) > 0:
            frames.append(f"{num_left_out} frames left out")
        frames += [
            f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
            for frame, line in places[-_MAX_FRAMES:]
        ]
    return frames


def _with_trace_ids(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Name the request's trace; cheaper for every request than binding the ids as it comes."""
    if (context := current_trace.get()) is not None:
        event["trace_id"], event["span_id"] = context.trace_id, context.span_id
    return event


def _without_exception_values(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Replace ``exc_info`` by its frames, so that no formatter prints the error's message."""
    info = event.pop("exc_info", None)
    if info is True:
        info = sys.exc_info()
    error = info[1] if isinstance(info, tuple) else info
    if isinstance(error, BaseException):
        event["traceback"] = frames_of(error)
    record = event.get("_record")
    if record is not None:
        record.exc_info = None
        record.exc_text = None
    return event
