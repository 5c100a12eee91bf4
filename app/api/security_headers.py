"""Pure ASGI middleware: what every answer tells the browser it reaches, errors included."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_NOTHING = b"default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_PAGE = _NOTHING + b"; style-src 'unsafe-inline'"
"""A page of ours may style itself and can do nothing else: no scripts, no frames, no outside resources."""
_ALWAYS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    # Answers hold people's texts; no proxy and no browser is to keep them.
    (b"cache-control", b"no-store"),
)


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
                # Names are in lower case already, as ASGI wants them.
                headers = [*message.get("headers", ())]
                present = dict(headers)
                is_page = present.get(b"content-type", b"").startswith(b"text/html")
                policy = (b"content-security-policy", _PAGE if is_page else _NOTHING)
                headers += [header for header in (*_ALWAYS, policy) if header[0] not in present]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_with_headers if scope["type"] == "http" else send)
