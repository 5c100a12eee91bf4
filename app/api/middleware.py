"""Pure ASGI middleware: request id, metrics, access line, last border for errors.

Plain classes, because Starlette's `BaseHTTPMiddleware` hides a client's disconnect from the route.
"""

from __future__ import annotations

import re
import secrets
import time

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.errors import Dialect, unexpected_response
from app.api.health import LIVE_PATHS, READY_PATHS, STARTUP_PATH
from app.observability import Metrics, frames_of, method_label

_SANE_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_PROBES = frozenset({*LIVE_PATHS, *READY_PATHS, STARTUP_PATH, "/metrics"})
_log: structlog.stdlib.BoundLogger = structlog.get_logger("dragoman.http")


class RequestContext:
    """Gives every request an id, counts and logs it, and answers errors nobody expected.

    The access line names the route and never the path or the query string asked for: both
    may hold a text. A method it does not know may, too.
    """

    def __init__(self, app: ASGIApp, *, metrics: Metrics, paths: frozenset[str]) -> None:
        """Wrap `app`, whose routes have these `paths`."""
        self._app = app
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope))
        exchange = _Exchange(receive, send, request_id)
        start_s = time.perf_counter()
        self._metrics.request_started()
        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self._app(scope, exchange.receive, exchange.send)
            except Exception as error:  # the HTTP border
                _log.error("request_failed", route=self._route_of(scope), traceback=frames_of(error))
                if exchange.status is not None:
                    # Half an answer is out already; closing the connection is the only truth left.
                    raise
                await unexpected_response(Dialect.of(scope["path"]), request_id)(
                    scope, exchange.receive, exchange.send
                )
            finally:
                duration_s = time.perf_counter() - start_s
                status = exchange.status or 500
                route = self._route_of(scope)
                self._metrics.request_finished(
                    scope["method"], route=route, status=status, duration_s=duration_s
                )
                log = _log.debug if route in _PROBES else _log.info
                log(
                    "request",
                    method=method_label(scope["method"]),
                    route=route,
                    status=status,
                    duration_ms=round(duration_s * 1000, 2),
                    request_bytes=exchange.received_bytes,
                    response_bytes=exchange.sent_bytes,
                )

    def _route_of(self, scope: Scope) -> str:
        """The path, if it is one of ours; also where a middleware answered before any route was found.

        No route of ours has parameters, so a template is the path itself.
        """
        path: str = scope["path"]
        return path if path in self._paths else "unmatched"


class _Exchange:
    """One request's channels, measured."""

    def __init__(self, receive: Receive, send: Send, request_id: str) -> None:
        self._receive = receive
        self._send = send
        self._request_id = request_id
        self.status: int | None = None
        self.received_bytes = 0
        self.sent_bytes = 0

    async def receive(self) -> Message:
        message = await self._receive()
        self.received_bytes += len(message.get("body", b""))
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)["X-Request-ID"] = self._request_id
        self.sent_bytes += len(message.get("body", b""))
        await self._send(message)


def _request_id(headers: Headers) -> str:
    """The caller's id if it cannot harm a log; else a new one."""
    given = headers.get("x-request-id", "")
    return given if _SANE_REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
