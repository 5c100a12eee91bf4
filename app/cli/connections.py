"""Connections that send nothing, or a request's head without end, do not stay for ever.

Uvicorn bounds only the pause between two requests. Bodies are bounded in `app.api.body_limits`, readers
that do not read in `app.cli.listening`.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class BoundedConnection(H11Protocol):
    """A connection whose first byte and whose requests' heads have a time to arrive.

    Attributes:
        head_timeout_s: seconds from the first byte of a request's head to its last.
        max_head_bytes: of a request's head; at most twice that much is read before it is refused.
    """

    head_timeout_s: float
    max_head_bytes: int
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Wait for the first request no longer than for each later one."""
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def data_received(self, data: bytes) -> None:
        """Read on; in pieces, since h11 measures only heads that have not arrived whole."""
        for start in range(0, len(data), self.max_head_bytes):
            if self.transport.is_closing():
                break
            super().data_received(data[start : start + self.max_head_bytes])
        self._watch_head()

    def on_response_complete(self) -> None:
        """Go on with what was sent behind the request; it may be another head's beginning."""
        super().on_response_complete()
        self._watch_head()

    def _watch_head(self) -> None:
        """The time for a head runs from its first byte, however many follow."""
        if (
            not self.conn.trailing_data[0]
            or self.conn.their_state is not h11.IDLE
            or self.transport.is_closing()
        ):
            self._forget_head()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout_s, self._end_slow_head)

    def connection_lost(self, exc: Exception | None) -> None:
        """Hold nothing of a connection that is gone."""
        self._forget_head()
        # Uvicorn does so only where the client left in good order; its timer would keep the rest in memory.
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def _forget_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _end_slow_head(self) -> None:
        self._head_timer = None
        if self.transport.is_closing() or self.conn.their_state is not h11.IDLE:
            return
        reason = (
            f"the request's head was not complete after {self.head_timeout_s:g} s, the limit; send it faster"
        )
        head = h11.Response(
            status_code=408,
            reason=b"Request Timeout",
            headers=[(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")],
        )
        for event in (head, h11.Data(data=reason.encode()), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def bounded_connections(*, head_timeout_s: float, max_head_bytes: int) -> type[asyncio.Protocol]:
    """The class of connections for `uvicorn.Config`, which makes them itself and passes no options."""
    attributes: dict[str, Any] = {"head_timeout_s": head_timeout_s, "max_head_bytes": max_head_bytes}
    return type("BoundedConnection", (BoundedConnection,), attributes)
