"""How many decoder steps a row still takes after its client left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from running_service import ENDLESS, StepLog, running_service

from app.runtime.engine import Engine

pytestmark = pytest.mark.live

MAX_STEPS = 2
NUM_TRIALS = 7
"""The median of so many: a machine that is busy with others may hold up any single one."""
Leave = Callable[[asyncio.StreamWriter], Awaitable[None]]


def question(text: str) -> bytes:
    body = json.dumps({"q": text, "source": "en", "target": "pt"}).encode()
    return (
        f"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode() + body


async def read_answer(reader: asyncio.StreamReader) -> str:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    assert head.startswith("http/1.1 200")
    length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
    answer: str = json.loads(await reader.readexactly(length))["translatedText"]
    return answer


@contextlib.asynccontextmanager
async def reverse_proxy(upstream_port: int) -> AsyncIterator[int]:
    """Passes bytes on as they come, and the end of one side to the other."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(65536):
            writer.write(piece)
            await writer.drain()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", upstream_port)
        directions = {
            asyncio.create_task(copy(reader, up_writer)),
            asyncio.create_task(copy(up_reader, writer)),
        }
        try:
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for direction in directions:
                direction.cancel()
            await asyncio.gather(*directions, return_exceptions=True)
            up_writer.close()
            writer.close()

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()


async def half_close(writer: asyncio.StreamWriter) -> None:
    writer.write_eof()


async def abort(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def steps_after_leaving(
    engine: Engine, port: int, log: StepLog, leave: Leave, *, others: int = 0
) -> int:
    """Ask on a connection that was used before, leave in the middle, and count."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(question("Good morning."))
    assert await read_answer(reader) == "Good morning."
    num_rows = len(log.stepped_at_s)
    writer.write(question(f"The {ENDLESS} left."))
    async with asyncio.timeout(60):
        while len(log.stepped_at_s) == num_rows or len(log.stepped_at_s[-1]) < 3:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0)
    steps = log.stepped_at_s[-1]
    left_at_s = time.monotonic()
    await leave(writer)
    async with asyncio.timeout(60):
        while engine.num_running_requests > others:  # noqa: ASYNC110 - its end has no event
            await asyncio.sleep(0)
    # Whoever is answered now took steps after it, so the row is gone or would have taken them, too.
    fresh_reader, fresh_writer = await asyncio.open_connection("127.0.0.1", port)
    fresh_writer.write(question("Good evening."))
    assert await read_answer(fresh_reader) == "Good evening."
    fresh_writer.close()
    with contextlib.suppress(OSError):
        writer.close()
        await writer.wait_closed()
    return sum(at_s > left_at_s for at_s in steps)


@pytest.mark.parametrize("leave", [close, half_close, abort])
@pytest.mark.parametrize("through_a_proxy", [False, True], ids=["directly", "through a proxy"])
async def test_a_row_takes_two_more_steps_at_most_after_its_client_left(
    leave: Leave, through_a_proxy: bool
) -> None:
    log = StepLog()
    async with contextlib.AsyncExitStack() as stack:
        engine, port = await stack.enter_async_context(running_service(log))
        if through_a_proxy:
            port = await stack.enter_async_context(reverse_proxy(port))
        counts = [await steps_after_leaving(engine, port, log, leave) for _ in range(NUM_TRIALS)]
        assert statistics.median(counts) <= MAX_STEPS, counts
        assert engine.num_running_requests == engine.num_waiting_tokens == 0


async def test_a_client_that_stays_is_answered_beside_one_that_leaves() -> None:
    log = StepLog()
    async with running_service(log) as (engine, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        leaving = asyncio.create_task(steps_after_leaving(engine, port, log, close, others=1))
        for number in range(20):
            writer.write(question(f"Good morning, number {number}."))
            assert await read_answer(reader) == f"Good morning, number {number}."
        await leaving
        writer.close()
        assert engine.num_running_requests == 0
