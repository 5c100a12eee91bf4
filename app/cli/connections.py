"""Connections that send nothing, send a head without end or take an answer without end do not stay.

Nor do idle ones when the process runs short of files. Uvicorn bounds only the pause between two requests.
Bodies are bounded in `app.api.body_limits`, readers that take nothing at all in `app.cli.listening`.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
import structlog
from uvicorn.protocols.http.h11_impl import H11Protocol

from app.cli.idle_connections import IdleConnections
from app.cli.request_lines import LenientConnection

_ANSWER_TIMEOUT_S = 60.0
_MIN_ANSWER_BYTES_PER_S = 4096.0
"""A telephone line's; slower readers would hold an answer in memory for as long as they like."""

_log: structlog.stdlib.BoundLogger = structlog.get_logger("dragoman.serve")


class BoundedConnection(H11Protocol):
    """A connection whose first byte, whose requests' heads and whose answers have their time.

    Attributes:
        head_timeout_s: seconds from the first byte of a request's head to its last.
        max_head_bytes: of a request's head; at most twice that much is read before it is refused.
        answer_timeout_s: seconds that a client gets to take what does not go out at once of an answer, and
            `min_answer_bytes_per_s`: as many more as that takes at this rate.
        idle: the connections without a request, of all.
    """

    head_timeout_s: float
    max_head_bytes: int
    answer_timeout_s: float
    min_answer_bytes_per_s: float
    idle: IdleConnections
    _head_timer: asyncio.TimerHandle | None = None
    _answer_timer: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """As uvicorn makes it."""
        super().__init__(*arguments, **named)
        self.conn = LenientConnection(h11.SERVER, self.max_head_bytes)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Wait for the first request no longer than for each later one."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that we are told of every answer that has to wait
        self.idle.make_room(len(self.connections))
        self._wait_for_request()

    def _wait_for_request(self) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )
        self.idle.add(self)

    def _unset_keepalive_if_required(self) -> None:
        """A request came, or the connection goes."""
        super()._unset_keepalive_if_required()
        self.idle.discard(self)

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
        self._note_idle()

    def _watch_head(self) -> None:
        """The time for a head runs from its first byte, however many follow."""
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._forget_head()
        elif not self.conn.trailing_data[0]:
            self._forget_head()
            if self.timeout_keep_alive_task is None:  # all that came was an empty line
                self._wait_for_request()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout_s, self._end_slow_head)

    def _note_idle(self) -> None:
        if self.timeout_keep_alive_task is not None and not self.flow.write_paused:
            self.idle.add(self)
            self.idle.make_room(len(self.connections))

    def pause_writing(self) -> None:
        """What was written did not go out at once."""
        super().pause_writing()
        if self._answer_timer is None:
            num_bytes = self.transport.get_write_buffer_size()
            allowed_s = self.answer_timeout_s + num_bytes / self.min_answer_bytes_per_s
            self._answer_timer = self.loop.call_later(allowed_s, self._end_slow_answer)

    def resume_writing(self) -> None:
        """All of it has gone out."""
        super().resume_writing()
        self._forget_answer()
        self._note_idle()

    def _end_slow_answer(self) -> None:
        self._answer_timer = None
        _log.warning("answer_not_taken", num_bytes_left=self.transport.get_write_buffer_size())
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Hold nothing of a connection that is gone."""
        self._forget_head()
        self._forget_answer()
        # Uvicorn does so only where the client left in good order; its timer would keep the rest in memory.
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def _forget_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _forget_answer(self) -> None:
        if self._answer_timer is not None:
            self._answer_timer.cancel()
            self._answer_timer = None

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


def bounded_connections(
    *,
    head_timeout_s: float,
    max_head_bytes: int,
    answer_timeout_s: float = _ANSWER_TIMEOUT_S,
    min_answer_bytes_per_s: float = _MIN_ANSWER_BYTES_PER_S,
) -> type[asyncio.Protocol]:
    """The class of connections for `uvicorn.Config`, which makes them itself and passes no options.

    Call it once all other files are open: how many connections there may be follows from how many are left.
    """
    attributes: dict[str, Any] = {
        "head_timeout_s": head_timeout_s,
        "max_head_bytes": max_head_bytes,
        "answer_timeout_s": answer_timeout_s,
        "min_answer_bytes_per_s": min_answer_bytes_per_s,
        "idle": IdleConnections(),
    }
    return type("BoundedConnection", (BoundedConnection,), attributes)
