"""What is added to a translation server in an afternoon: whoever waits is translated together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

Pieces = list[str]
TranslateBatch = Callable[[list[Pieces]], Sequence[Pieces]]


class MicroBatcher:
    """As many batches at a time as the engine has replicas; each takes what waits when it begins."""

    def __init__(self, translate_batch: TranslateBatch, *, num_replicas: int, max_batch: int) -> None:
        """Start the workers; inside a running loop."""
        self._translate_batch = translate_batch
        self._max_batch = max_batch
        self._pool = ThreadPoolExecutor(num_replicas)
        self._waiting: asyncio.Queue[tuple[Pieces, asyncio.Future[Pieces]]] = asyncio.Queue()
        self._workers = [asyncio.ensure_future(self._work()) for _ in range(num_replicas)]

    async def translate(self, pieces: Pieces) -> Pieces:
        """Translate one sentence in whatever company there is."""
        answer: asyncio.Future[Pieces] = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait((pieces, answer))
        return await answer

    async def _work(self) -> None:
        while True:
            batch = [await self._waiting.get()]
            while len(batch) < self._max_batch and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            sources = [pieces for pieces, _ in batch]
            try:
                results = await asyncio.get_running_loop().run_in_executor(
                    self._pool, self._translate_batch, sources
                )
            except Exception as error:  # noqa: BLE001 - whatever the engine raises becomes the answer
                for _, answer in batch:
                    if not answer.done():
                        answer.set_exception(error)
                continue
            for (_, answer), result in zip(batch, results, strict=True):
                if not answer.done():
                    answer.set_result(result)

    async def close(self) -> None:
        """End the workers; nobody may be waiting."""
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        self._pool.shutdown()
