"""`dragoman serve` with an engine whose work takes a set time.

    python fake_service.py WORK OPTIONS...

WORK is a number of seconds, or ``drain+SECONDS``: as long after the drain has begun. With BREAK_AFTER_S in
the environment the engine is found beyond repair after so long.
"""

import asyncio
import os
import sys
from pathlib import Path

from app.__main__ import main
from app.cli import serve as serve_module
from app.cli import web_server
from app.errors import ShuttingDown
from app.runtime.request import TranslationRequest, TranslationResult

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "http"))

from fake_engine import FakeEngine

after_drain = sys.argv[1].startswith("drain+")
work_s = float(sys.argv[1].removeprefix("drain+"))


class SlowEngine(FakeEngine):
    """Each request takes as long as WORK says; stopping works as the real engine's does."""

    def __init__(self) -> None:
        super().__init__()
        self.drain_begun = asyncio.Event()
        self.tasks: set[asyncio.Future[TranslationResult]] = set()

    async def translate(self, request: TranslationRequest) -> TranslationResult:
        if self.draining:
            raise ShuttingDown("the service is stopping; try another instance")
        work = asyncio.ensure_future(self._slowly(request))
        self.tasks.add(work)
        try:
            await asyncio.wait({work})
            if work.cancelled():
                raise ShuttingDown("the service stopped before this was done; try another instance")
            return work.result()
        finally:
            work.cancel()
            self.tasks.discard(work)

    async def _slowly(self, request: TranslationRequest) -> TranslationResult:
        self.num_running_requests += 1
        try:
            if after_drain:
                await self.drain_begun.wait()
            await asyncio.sleep(work_s)
        finally:
            self.num_running_requests -= 1
        was_draining, self.draining = self.draining, False
        result = await super().translate(request)
        self.draining = was_draining
        return result

    async def supervise(self, *, max_heartbeat_age_s: float) -> str:
        if "BREAK_AFTER_S" not in os.environ:
            return await super().supervise(max_heartbeat_age_s=max_heartbeat_age_s)
        await asyncio.sleep(float(os.environ["BREAK_AFTER_S"]))
        return "decoding thread 0 died, as did the one before it"

    def begin_drain(self) -> None:
        super().begin_drain()
        self.drain_begun.set()

    async def stop(self, *, drain_s: float) -> bool:
        self.begin_drain()
        if not self.tasks:
            return True
        _, late = await asyncio.wait(self.tasks, timeout=drain_s)
        for work in late:
            work.cancel()
        return not late


serve_module.discover = lambda directory: ()  # type: ignore[assignment]
web_server.open_engine = lambda *arguments, **named: SlowEngine()  # type: ignore[assignment]
main(["serve", *sys.argv[2:]])
