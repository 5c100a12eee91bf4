"""How long a request may take and whom it may go before: two headers, the same in every dialect."""

from __future__ import annotations

import re
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, cast

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.engine_protocol import TranslationEngine
from app.api.errors import Dialect, error_response
from app.errors import InvalidOption
from app.runtime.request import Priority, TranslationRequest, TranslationResult

TIMEOUT_HEADER = "X-Request-Timeout"
PRIORITY_HEADER = "X-Priority"
MIN_TIMEOUT_S = 0.001
MAX_TIMEOUT_S = 86_400.0
# As many digits as any language writes for a float of that range; no exponents, which need none.
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,24})?", re.ASCII)


@dataclass(frozen=True)
class Urgency:
    """What the two headers say.

    Attributes:
        timeout_s: seconds, from when the request has been read, in which its answer is worth having.
        priority: whether it goes before or after others.
    """

    timeout_s: float | None = None
    priority: Priority = Priority.INTERACTIVE


_USUAL = Urgency()
_urgency: ContextVar[Urgency] = ContextVar("dragoman_urgency", default=_USUAL)


class ReadUrgency:
    """Reads the headers, so that whatever the request asks of the engine is asked that urgently."""

    def __init__(self, app: ASGIApp) -> None:
        """Wrap `app`."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http":
            try:
                _urgency.set(_read(Headers(scope=scope)))
            except InvalidOption as error:
                await error_response(error, Dialect.of(scope["path"]))(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _read(headers: Headers) -> Urgency:
    """Neither value is repeated in an error: headers may be anything."""
    timeout, priority = headers.get(TIMEOUT_HEADER), headers.get(PRIORITY_HEADER)
    timeout_s = None
    if timeout is not None:
        timeout_s = float(timeout) if _SECONDS.fullmatch(timeout) else 0.0
        if not MIN_TIMEOUT_S <= timeout_s <= MAX_TIMEOUT_S:
            raise InvalidOption(
                f"{TIMEOUT_HEADER} must be a number of seconds from {MIN_TIMEOUT_S} to {MAX_TIMEOUT_S:.0f}, "
                "such as 30 or 2.5; leave it out for the service's own limit"
            )
    if priority is None:
        return Urgency(timeout_s)
    try:
        return Urgency(timeout_s, Priority(priority.lower()))
    except ValueError:
        raise InvalidOption(f"{PRIORITY_HEADER} must be {' or '.join(Priority)}") from None


class _UrgedEngine:
    """An engine that is asked as urgently as the request in hand says."""

    def __init__(self, engine: TranslationEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    async def translate(self, request: TranslationRequest) -> TranslationResult:
        urgency = _urgency.get()
        return await self._engine.translate(
            replace(request, timeout_s=urgency.timeout_s, priority=urgency.priority)
        )


def urged(engine: TranslationEngine) -> TranslationEngine:
    """The engine, asked with the deadline and priority of whichever HTTP request asks."""
    return cast(TranslationEngine, _UrgedEngine(engine))


def describe_urgency(schema: dict[str, Any]) -> None:
    """Add the headers, and the answer to a deadline that passed, to every operation that may be queued."""
    parameters = [
        {
            "name": TIMEOUT_HEADER,
            "in": "header",
            "required": False,
            "description": "Seconds, from when the request has been read, in which the answer is worth "
            "having; at most the service's own limit. Later it is 504, and nothing of it is translated any "
            "more. What cannot be done in time gets 429 at once.",
            "schema": {"type": "number", "minimum": MIN_TIMEOUT_S, "maximum": MAX_TIMEOUT_S},
        },
        {
            "name": PRIORITY_HEADER,
            "in": "header",
            "required": False,
            "description": "bulk lets interactive requests go first; one place in eight is for bulk all the "
            "same.",
            "schema": {"type": "string", "enum": [*Priority], "default": Priority.INTERACTIVE.value},
        },
    ]
    for operations in schema["paths"].values():
        operation = operations.get("post", {})
        if "429" not in operation.get("responses", {}) or "503" not in operation["responses"]:
            continue
        operation.setdefault("parameters", []).extend(parameters)
        late = {key: value for key, value in operation["responses"]["503"].items() if key == "content"}
        late["description"] = "The time allowed for the request passed first."
        operation["responses"]["504"] = late
