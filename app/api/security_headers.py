"""Pure ASGI middleware: what every answer tells the browser it reaches, errors included."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_NOTHING = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_PAGE = f"{_NOTHING}; style-src 'unsafe-inline'"
"""A page of ours may style itself and can do nothing else: no scripts, no frames, no outside resources."""
_ALWAYS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Answers hold people's texts; no proxy and no browser is to keep them.
    "Cache-Control": "no-store",
}


class SecurityHeaders:
    """Adds the headers that keep a browser from doing more with an answer than it should.

    A route that sets one of them itself has decided so; its value stays.
    """

    def __init__(self, app: ASGIApp) -> None:
        """Wrap `app`; nothing that answers may stand before this."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _ALWAYS.items():
                    headers.setdefault(name, value)
                is_page = headers.get("content-type", "").startswith("text/html")
                headers.setdefault("Content-Security-Policy", _PAGE if is_page else _NOTHING)
            await send(message)

        await self._app(scope, receive, send_with_headers if scope["type"] == "http" else send)
