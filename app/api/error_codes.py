"""Every error code, read off the classes themselves, for /docs and the API description."""

from __future__ import annotations

from dataclasses import dataclass

from app import errors as service_errors
from app.api import errors as web_errors
from app.api.errors import Dialect, status_of_class
from app.errors import DragomanError


@dataclass(frozen=True)
class ErrorCode:
    """One code.

    Attributes:
        code: the stable name, as bodies below /v1 carry it.
        status: HTTP status below /v1.
        libretranslate_status: HTTP status of the same error at the root.
        retryable: whether the same call may succeed later.
        meaning: one sentence.
    """

    code: str
    status: int
    libretranslate_status: int
    retryable: bool
    meaning: str


_BY_ROUTER = (
    ErrorCode("not_found", 404, 404, False, "There is no such path."),
    ErrorCode("method_not_allowed", 405, 405, False, "The path does not take this method; see Allow."),
)


def error_codes() -> tuple[ErrorCode, ...]:
    """All codes, by status and name."""
    classes = {
        found
        for module in (service_errors, web_errors)
        for found in vars(module).values()
        if isinstance(found, type) and issubclass(found, DragomanError)
    }
    codes = {_described(found) for found in classes}
    return tuple(sorted((*codes, *_BY_ROUTER), key=lambda code: (code.status, code.code)))


def _described(error: type[DragomanError]) -> ErrorCode:
    meaning = "A fault of the service; its log has it under the answer's X-Request-ID."
    if error is not DragomanError:
        meaning = (error.__doc__ or "").strip().partition("\n")[0]
    return ErrorCode(
        error.code,
        status_of_class(error, Dialect.NATIVE),
        status_of_class(error, Dialect.LIBRETRANSLATE),
        error.retryable,
        meaning,
    )
