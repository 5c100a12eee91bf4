"""Structured logs: one format for the service and for the server below it."""

from __future__ import annotations

import logging
import sys
import traceback
from typing import Literal, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

LogFormat = Literal["console", "json"]
_QUIET_LOGGERS = ("uvicorn.access",)
"""The server's own access lines print query strings, and a query string may hold a text."""


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
    handler = logging.StreamHandler(stream)
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
    class names and code positions are kept.
    """
    frames: list[str] = []
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None and cause is not error:
        frames += [*frames_of(cause), "then"]
    frames.append(f"{type(error).__module__}.{type(error).__qualname__}")
    frames += [
        f"{frame.filename}:{frame.lineno} in {frame.name}"
        for frame in traceback.extract_tb(error.__traceback__)
    ]
    return frames


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
