"""Pure ASGI middleware: how large a body may be and how long it may take; a stopping service waits for none.

Whoever waits for a body holds what has come of it in memory. So the wait is bounded, and it ends when the
service begins to drain: nothing is lost, since a request without its body was never admitted.
"""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.errors import BodyTimeout, BodyTooLarge, Dialect, UnsupportedMediaType, error_response
from app.errors import ShuttingDown


class Drain:
    """Says once, to all who wait for a body, that the service is stopping."""

    def __init__(self) -> None:
        """Nothing is stopping yet."""
        self.begun = False
        self._arrived_at_s = 0.0
        self._waits: set[asyncio.Timeout] = set()

    def begin(self) -> None:
        """End all waits; called in the loop's thread."""
        self.begun = True
        now_s = self._arrived_at_s = asyncio.get_running_loop().time()
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(now_s)

    def note_arrival(self) -> None:
        """A request has come that is not only a look at the service."""
        self._arrived_at_s = asyncio.get_running_loop().time()

    async def until_quiet(self, quiet_s: float, *, at_most_s: float) -> None:
        """Wait until no request has come for a while.

        A port that closes while requests come loses those that were connected and not yet read.

        Args:
            quiet_s: seconds without a request.
            at_most_s: seconds after which those that go on asking are to blame.
        """
        clock = asyncio.get_running_loop().time
        give_up_at_s = clock() + at_most_s
        while (wait_s := min(self._arrived_at_s + quiet_s, give_up_at_s) - clock()) > 0:  # noqa: ASYNC110 - for time
            await asyncio.sleep(wait_s)

    async def receive_by(self, deadline_s: float, receive: Receive) -> Message:
        """Await a message until a deadline of the loop's clock or the begin of the drain.

        Raises:
            ShuttingDown: the drain began first, or has begun before.
            TimeoutError: the deadline passed first.
        """
        if not self.begun:
            wait = asyncio.timeout_at(deadline_s)
            self._waits.add(wait)
            try:
                async with wait:
                    return await receive()
            except TimeoutError:
                if not self.begun:
                    raise
            finally:
                self._waits.discard(wait)
        raise ShuttingDown("the service is stopping; try another instance")


class BodyLimits:
    """Refuses compressed, too large and too slow bodies, and all that are incomplete when a drain begins.

    A size is refused by the Content-Length at once, and a chunked body's while it arrives.
    """

    def __init__(self, app: ASGIApp, *, max_body_bytes: int, body_timeout_s: float, drain: Drain) -> None:
        """Wrap `app`."""
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] not in ("GET", "HEAD"):
            self._drain.note_arrival()
        headers = Headers(scope=scope)
        if scope["method"] not in ("GET", "HEAD") and any(
            coding.strip().lower() != "identity" for coding in headers.getlist("content-encoding")
        ):
            # What a compressed body expands to is known only by expanding it.
            coded = UnsupportedMediaType(
                "compressed bodies are not read; send it uncompressed, without Content-Encoding"
            )
            await error_response(coded, Dialect.of(scope["path"]))(scope, receive, send)
            return
        declared = headers.get("content-length", "")
        if declared.isascii() and declared.isdigit() and int(declared[:20]) > self._max_body_bytes:
            error = BodyTooLarge(
                f"the body has {declared[:20]} bytes, the limit is {self._max_body_bytes}; "
                "send it in several requests"
            )
            await error_response(error, Dialect.of(scope["path"]))(scope, receive, send)
            return
        body = _ArrivingBody(
            receive,
            send,
            max_bytes=self._max_body_bytes,
            deadline_s=asyncio.get_running_loop().time() + self._body_timeout_s,
            timeout_s=self._body_timeout_s,
            drain=self._drain,
        )
        await self._app(scope, body.receive, body.send)


class _ArrivingBody:
    """One request's channels, with the limits on its body."""

    def __init__(
        self,
        receive: Receive,
        send: Send,
        *,
        max_bytes: int,
        deadline_s: float,
        timeout_s: float,
        drain: Drain,
    ) -> None:
        self._receive = receive
        self._send = send
        self._max_bytes = max_bytes
        self._deadline_s = deadline_s
        self._timeout_s = timeout_s
        self._drain = drain
        self._num_bytes = 0
        self._is_complete = False
        self._timed_out = False

    async def receive(self) -> Message:
        if self._is_complete:
            # What comes now is the disconnect, which may well come minutes later.
            return await self._receive()
        try:
            message = await self._drain.receive_by(self._deadline_s, self._receive)
        except TimeoutError:
            self._timed_out = True
            raise BodyTimeout(
                f"the body was not complete after {self._timeout_s:g} s, the limit; send it faster, or less"
            ) from None
        self._is_complete = not message.get("more_body", False)
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._max_bytes:
            raise BodyTooLarge(
                f"the body has more than {self._max_bytes} bytes, the limit; send it in several requests"
            )
        return message

    async def send(self, message: Message) -> None:
        if (self._timed_out or self._drain.begun) and message["type"] == "http.response.start":
            # The rest of the body may still come, and must not be waited for; and whoever keeps a connection
            # to a service that stops would lose the request it sends on it just when the service ends.
            MutableHeaders(scope=message)["Connection"] = "close"
        await self._send(message)
