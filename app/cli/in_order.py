"""Many translations in flight, their results in the order of the lines, memory bounded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Window:
    """How much may be in flight: read, and not yet handed on.

    Attributes:
        max_items: most items.
        max_size: most of their sizes' sum; a single item may exceed it, alone.
    """

    max_items: int
    max_size: int


class _Room:
    """What is left of a window."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._num_items = 0
        self._size = 0
        self._freed = asyncio.Event()

    async def take(self, size: int) -> None:
        while self._num_items and (
            self._num_items >= self._window.max_items or self._size + size > self._window.max_size
        ):
            self._freed.clear()
            await self._freed.wait()
        self._num_items += 1
        self._size += size

    def give_back(self, size: int) -> None:
        self._num_items -= 1
        self._size -= size
        self._freed.set()


async def in_order(
    items: AsyncIterator[T], work: Callable[[T], Awaitable[R]], *, size_of: Callable[[T], int], window: Window
) -> AsyncGenerator[tuple[T, R], None]:
    """Work on items concurrently; yield each with its result, in their order.

    When reading fails, the items before the fault are finished and yielded before the error is raised.
    Closing the generator cancels what is in flight.

    Args:
        items: read only as far as the window allows.
        work: called once for each item.
        size_of: an item's share of the window's `max_size`.
        window: the bound.
    """
    room = _Room(window)
    started: asyncio.Queue[tuple[T, asyncio.Future[R]] | None] = asyncio.Queue()
    futures: set[asyncio.Future[R]] = set()

    async def read() -> None:
        try:
            async for item in items:
                await room.take(size_of(item))
                future = asyncio.ensure_future(work(item))
                futures.add(future)
                started.put_nowait((item, future))
        finally:
            started.put_nowait(None)

    reader = asyncio.ensure_future(read())
    try:
        while (entry := await started.get()) is not None:
            item, future = entry
            result = await future
            futures.discard(future)
            yield item, result
            room.give_back(size_of(item))
        await reader
    finally:
        reader.cancel()
        for future in futures:
            future.cancel()
        await asyncio.gather(reader, *futures, return_exceptions=True)
