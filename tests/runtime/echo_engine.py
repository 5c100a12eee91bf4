"""An engine with real worker threads, over a model that repeats its source."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

import numpy as np

from app.decoding.options import DecodingOptions
from app.runtime.engine import Engine
from app.runtime.request import TranslationRequest
from app.runtime.runner import Int64Array, RowGroup, SourceRow, StepOutput

PATIENCE_S = 30.0


class EchoRunner:
    """Translates a source into itself; `before_step` may block or raise."""

    def __init__(self, vocabulary_size: int, before_step: Callable[[], None]) -> None:
        self.vocabulary_size = vocabulary_size
        self.groups = (RowGroup(8, 4), RowGroup(16, 4))
        self._before_step = before_step
        self._sources: list[list[Sequence[int]]] = [[], []]

    def admit(self, group: int, newcomers: Sequence[SourceRow]) -> None:
        del self._sources[group][newcomers[0].slot :]
        self._sources[group] += [row.source_ids for row in newcomers]

    def step(self, group: int, last_ids: Int64Array, positions: Int64Array) -> StepOutput:
        self._before_step()
        rows = zip(self._sources[group], positions.tolist(), strict=False)
        token_ids = np.array([source[position] for source, position in rows], dtype=np.int64)
        return StepOutput(token_ids, np.full(len(token_ids), -0.5, dtype=np.float32))

    def move(self, group: int, *, from_slot: int, to_slot: int) -> None:
        self._sources[group][to_slot] = self._sources[group][from_slot]


class Gate:
    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()
        self.num_steps = 0

    def __call__(self) -> None:
        self.num_steps += 1
        self.reached.set()
        assert self.opened.wait(PATIENCE_S)

    async def wait_reached(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, PATIENCE_S)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


MakeEngine = Callable[..., Engine]


def request(*texts: str, **options: object) -> TranslationRequest:
    return TranslationRequest(
        texts,
        "en",
        "pt",
        DecodingOptions(**options),  # type: ignore[arg-type]
    )


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until something holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0)
