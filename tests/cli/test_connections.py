"""Connections over a real socket: slow readers, empty lines and targets with a host, in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from structlog.testing import capture_logs
from uvicorn.server import ServerState

from app.cli.connections import BoundedConnection, bounded_connections

SIZE = 20_000_000
"""More than the kernel keeps for both sides."""
PATIENCE_S = 60.0
Send = Callable[[dict[str, Any]], Awaitable[None]]


async def application(scope: dict[str, Any], receive: object, send: Send) -> None:
    """Answers with its path and host, or with many bytes."""
    if scope["path"] == "/large":
        body = b"x" * SIZE
    else:
        body = scope["path"].encode() + b" " + dict(scope["headers"])[b"host"] + b"\n"
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Server:
    """What connections are served with.

    Attributes:
        made: the connections, in order.
        port: where clients connect.
    """

    def __init__(self, **limits: float) -> None:
        kind = bounded_connections(head_timeout_s=PATIENCE_S, max_head_bytes=16_384, **limits)
        self.config = uvicorn.Config(application, http=kind, timeout_keep_alive=3600, lifespan="off")
        self.config.load()
        self.state = ServerState()
        self.made: list[BoundedConnection] = []
        self.port = 0

    def make(self) -> asyncio.Protocol:
        kind: Any = self.config.http_protocol_class
        self.made.append(kind(config=self.config, server_state=self.state, app_state={}))
        return self.made[-1]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110  # sockets of the same process tell nobody
                await asyncio.sleep(0.001)


@asynccontextmanager
async def serving(**limits: float) -> AsyncIterator[Server]:
    server = Server(**limits)
    listening = await asyncio.get_running_loop().create_server(server.make, "127.0.0.1", 0)
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listening.close()
        for connection in server.made:
            connection.transport.abort()
        await server.until(lambda: not server.state.connections)


async def ask(server: Server, content: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=65_536)
    writer.write(content)
    return reader, writer


LARGE = b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n"
SMALL = b"GET /small HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize("close", [b"", b"Connection: close\r\n"])
async def test_a_reader_that_takes_a_few_bytes_at_a_time_is_given_up(close: bytes) -> None:
    with capture_logs() as lines:
        async with serving(answer_timeout_s=0.05, min_answer_bytes_per_s=1e9) as server:
            reader, writer = await ask(server, LARGE.replace(b"\r\n\r\n", b"\r\n" + close + b"\r\n"))
            await server.until(lambda: bool(server.made) and server.made[0].flow.write_paused)
            async with asyncio.timeout(PATIENCE_S):
                while server.state.connections:
                    await reader.read(10)
                    await asyncio.sleep(0.001)
            writer.close()
    (line,) = lines
    assert line["event"] == "answer_not_taken"
    assert 0 < line["num_bytes_left"] <= SIZE


async def test_the_rate_that_is_asked_of_a_reader_gives_large_answers_their_time() -> None:
    async with serving(answer_timeout_s=0.0, min_answer_bytes_per_s=SIZE / PATIENCE_S) as server:
        reader, writer = await ask(server, LARGE)
        await server.until(lambda: bool(server.made) and server.made[0].flow.write_paused)
        await reader.readuntil(b"\r\n\r\n")
        assert len(await reader.readexactly(SIZE)) == SIZE
        writer.write(SMALL)
        assert await reader.readuntil(b"x\n")
        writer.close()


async def test_an_answer_that_was_taken_leaves_no_timer_and_an_idle_connection() -> None:
    async with serving(answer_timeout_s=0.0, min_answer_bytes_per_s=SIZE / PATIENCE_S) as server:
        reader, writer = await ask(server, LARGE)
        await reader.readuntil(b"\r\n\r\n")
        (connection,) = server.made
        assert connection not in connection.idle, "its answer is still being taken"
        await reader.readexactly(SIZE)
        await server.until(lambda: connection._answer_timer is None)
        assert connection in connection.idle
        writer.close()


async def test_empty_lines_and_targets_with_a_host_are_served_on_one_connection() -> None:
    async with serving() as server:
        absolute = b"GET http://other:1/path?q HTTP/1.1\r\nHost: x\r\n\r\n"
        reader, writer = await ask(server, b"\r\n" + SMALL + b"\r\n" + absolute + b"\r\n" + SMALL)
        answers = [(await reader.readuntil(b"\n")) for _ in range(12) if not reader.at_eof()]
        assert [line for line in answers if line.startswith(b"/")] == [
            b"/small x\n",
            b"/path other:1\n",
            b"/small x\n",
        ]
        writer.close()


async def test_a_connection_on_which_only_an_empty_line_came_is_idle_and_ends_like_every_other() -> None:
    async with serving() as server:
        reader, writer = await ask(server, SMALL)
        await reader.readuntil(b"x\n")
        (connection,) = server.made
        writer.write(b"\r\n")
        await server.until(lambda: connection.conn._has_ignored_line)  # type: ignore[attr-defined]
        assert connection.timeout_keep_alive_task is not None
        assert connection in connection.idle
        writer.write(SMALL)
        await reader.readuntil(b"x\n")
        writer.close()


async def test_a_target_with_credentials_is_answered_400() -> None:
    async with serving() as server:
        reader, writer = await ask(server, b"GET http://a:b@c/ HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        writer.close()
