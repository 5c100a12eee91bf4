"""Work is worth doing only while somebody waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request

from app.errors import RequestCancelled

T = TypeVar("T")


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, but cancel it as soon as the client disconnects.

    A client that closes only its sending side (``shutdown(SHUT_WR)``) counts as one that left: both send
    the same FIN, the difference shows only when something is written, and translating for nobody costs
    more than such clients, which no HTTP library is, are worth.

    Args:
        request: its body must have been read; what is received after it can only be a disconnect.
        work: the engine call.

    Raises:
        RequestCancelled: the client left first.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise RequestCancelled("the client closed the connection before the answer was ready")
        return task.result()
    finally:
        # Also reached when this very call is cancelled: neither task may outlive it.
        for pending in (task, watcher):
            pending.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
