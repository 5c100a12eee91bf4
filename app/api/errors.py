"""The one table from errors to HTTP, and the two shapes an error takes on the wire."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from enum import Enum

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from app.errors import (
    DeadlineExceeded,
    DragomanError,
    InvalidOption,
    InvalidRequest,
    QueueFull,
    ReloadInProgress,
    RequestCancelled,
    RequestTooLarge,
    ShuttingDown,
    Unavailable,
    UnsupportedPair,
    WorkerFailed,
)


class MalformedBody(InvalidRequest):
    """The body is not what its content type says: no JSON, no UTF-8, no object."""

    code = "malformed_body"


class UnsupportedMediaType(InvalidRequest):
    """The body's content type is none that the route reads."""

    code = "unsupported_media_type"


class BodyTooLarge(RequestTooLarge):
    """The body exceeds the limit on bytes."""

    code = "body_too_large"


class BodyTimeout(InvalidRequest):
    """The body took longer than the limit to arrive."""

    code = "body_timeout"
    retryable = True


class AccessDenied(DragomanError):
    """The call needs an API key that allows it, and came with none such."""

    code = "access_denied"


class RateLimited(Unavailable):
    """The caller asks faster than its limits allow.

    Attributes:
        retry_after_s: seconds until the same request would be let through.
    """

    code = "rate_limited"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        """Store the message and what the Retry-After header says."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QuotaExceeded(RateLimited):
    """The caller has used up its characters of the day."""

    code = "quota_exceeded"


CLIENT_CLOSED_REQUEST = 499
"""Nobody reads this answer; it tells the metrics and the access log why there was none."""

STATUS_OF: Mapping[type[DragomanError], int] = {
    DragomanError: 500,
    MalformedBody: 400,
    AccessDenied: 401,
    BodyTimeout: 408,
    ReloadInProgress: 409,
    RequestTooLarge: 413,
    UnsupportedMediaType: 415,
    InvalidRequest: 422,
    InvalidOption: 422,
    UnsupportedPair: 422,
    QueueFull: 429,
    RateLimited: 429,
    RequestCancelled: CLIENT_CLOSED_REQUEST,
    Unavailable: 503,
    ShuttingDown: 503,
    WorkerFailed: 503,
    DeadlineExceeded: 504,
}
"""Status by class; a class that is not listed takes its nearest ancestor's."""

LIBRETRANSLATE_STATUS_OF: Mapping[type[DragomanError], int] = {
    **STATUS_OF,
    InvalidRequest: 400,
    InvalidOption: 400,
    UnsupportedPair: 400,
    RequestTooLarge: 400,
    BodyTooLarge: 413,
    AccessDenied: 403,
}
"""The same for LibreTranslate's clients, who expect 400 for all that they can mend."""

_HTTP_CODES = {404: "not_found", 405: "method_not_allowed"}
_HTTP_MESSAGES = {
    404: "there is no such path; see /docs",
    405: "this path does not take this method; see the Allow header and /docs",
}
_RETRY_AFTER_S = 1


class Dialect(Enum):
    """Whose shapes a path speaks."""

    NATIVE = "native"
    LIBRETRANSLATE = "libretranslate"

    @classmethod
    def of(cls, path: str) -> Dialect:
        """Everything below ``/v1`` is native; the root paths are LibreTranslate's."""
        return cls.NATIVE if path == "/v1" or path.startswith("/v1/") else cls.LIBRETRANSLATE


def status_of_class(error: type[DragomanError], dialect: Dialect) -> int:
    """The status of a class of errors in a dialect."""
    table = STATUS_OF if dialect is Dialect.NATIVE else LIBRETRANSLATE_STATUS_OF
    return next(table[cls] for cls in error.__mro__ if cls in table)


def error_response(error: DragomanError, dialect: Dialect) -> Response:
    """The answer to an error raised on purpose."""
    status = status_of_class(type(error), dialect)
    headers = {}
    message = error.message
    if isinstance(error, QueueFull | RateLimited):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
        if dialect is Dialect.LIBRETRANSLATE:
            message = f"Slowdown: {message}"
    elif error.retryable:
        headers["Retry-After"] = str(_RETRY_AFTER_S)
    elif status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="dragoman"'
    return _response(status, dialect, error.code, message, retryable=error.retryable, headers=headers)


def http_exception_response(error: HTTPException, dialect: Dialect, *, methods: Set[str]) -> Response:
    """The answer where the router refused: no such path, no such method.

    Args:
        error: as the router raised it. Its Allow header names the methods of the first of a path's routes.
        dialect: whose shape the answer takes.
        methods: all methods of the path, none if there is no such path.
    """
    headers = dict(error.headers or {})
    if error.status_code == 405:
        headers["Allow"] = ", ".join(sorted(methods))
    return _response(
        error.status_code,
        dialect,
        _HTTP_CODES.get(error.status_code, "invalid_request"),
        _HTTP_MESSAGES.get(error.status_code, "the request cannot be answered; see /docs"),
        retryable=False,
        headers=headers,
    )


def unexpected_response(dialect: Dialect, request_id: str) -> Response:
    """The answer to a fault of ours: nothing but the id under which the log has it."""
    message = f"internal error; the service's log has it under request id {request_id}"
    return _response(500, dialect, "internal", message, retryable=False, headers={})


def _response(
    status: int, dialect: Dialect, code: str, message: str, *, retryable: bool, headers: Mapping[str, str]
) -> Response:
    # Names of files need not be UTF-8, and an answer must.
    message = message.encode("utf-8", "backslashreplace").decode("utf-8")
    body: dict[str, object] = (
        {"error": {"code": code, "message": message, "retryable": retryable}}
        if dialect is Dialect.NATIVE
        else {"error": message}
    )
    return JSONResponse(body, status_code=status, headers=dict(headers))
