"""The shipped engine behind a real socket, in this process, with every row's steps on record."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import uvicorn
from prometheus_client import CollectorRegistry

from app.api import ApiOptions, create_app
from app.bundle import default_directory, open_bundle
from app.observability import Metrics
from app.runtime.engine import Engine, EngineOptions
from app.runtime.request import PairInfo
from app.runtime.runner import Int64Array, RowGroup, SourceRow, StepOutput
from app.runtime.served_model import ServedModel
from app.text import Tokenizer

ENDLESS = "boats"
"""A text that says so is translated for as long as its client waits."""
STEP_S = 0.002
"""As long as a real step of a few rows takes."""


@dataclass
class StepLog:
    """What the runner was asked to do.

    Attributes:
        stepped_at_s: for every endless row, by admission, when each of its steps began.
        on_step: called before each step, on the worker's thread.
    """

    stepped_at_s: list[list[float]] = field(default_factory=list)
    on_step: Callable[[], None] = lambda: time.sleep(STEP_S)


class LoggedRunner:
    """Repeats its source; an endless one never ends."""

    def __init__(self, tokenizer: Tokenizer, log: StepLog) -> None:
        self.vocabulary_size = tokenizer.vocabulary_size
        self.groups = (RowGroup(64, 8),)
        self._endless_id = tokenizer.encode_sources([ENDLESS])[0][0]
        self._log = log
        self._rows: list[tuple[Sequence[int], list[float] | None]] = []

    def admit(self, group: int, newcomers: Sequence[SourceRow]) -> None:
        del self._rows[newcomers[0].slot :]
        for row in newcomers:
            is_endless = self._endless_id in row.source_ids
            self._rows.append((row.source_ids, [] if is_endless else None))
            if is_endless:
                self._log.stepped_at_s.append(self._rows[-1][1])  # type: ignore[arg-type]

    def step(self, group: int, last_ids: Int64Array, positions: Int64Array) -> StepOutput:
        now_s = time.monotonic()
        token_ids = []
        for (source_ids, steps), position in zip(self._rows, positions.tolist(), strict=False):
            if steps is not None:
                steps.append(now_s)
            token_ids.append(source_ids[0] if steps is not None else source_ids[position])
        self._log.on_step()
        return StepOutput(np.array(token_ids, dtype=np.int64), np.full(len(token_ids), -0.5, np.float32))

    def move(self, group: int, *, from_slot: int, to_slot: int) -> None:
        self._rows[to_slot] = self._rows[from_slot]


@contextlib.asynccontextmanager
async def running_service(log: StepLog) -> AsyncIterator[tuple[Engine, int]]:
    """An engine over a logged runner and the port it is served on."""
    bundle = open_bundle(default_directory() / "en-pt", verify=False)
    tokenizer = Tokenizer.open(bundle.file(bundle.manifest.tokenizer), eos_id=bundle.manifest.tokens.eos_id)
    model = ServedModel(
        id="en-pt",
        pairs=(PairInfo("en", "pt", "en-pt"),),
        tokenizer=tokenizer,
        shortlist=None,
        eos_id=tokenizer.eos_id,
        max_source_tokens=64,
        max_target_tokens=100_000,
        max_target_ratio=10_000.0,
        make_runner=lambda _worker: LoggedRunner(tokenizer, log),
    )
    engine = Engine([model], EngineOptions(num_workers=1))
    app = create_app(engine, ApiOptions(), metrics=Metrics(CollectorRegistry()))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, http="h11"))
        serving = asyncio.create_task(server.serve([listener]))
        async with asyncio.timeout(60):
            while not server.started:  # noqa: ASYNC110 - the server has no event for it
                await asyncio.sleep(0)
        try:
            yield engine, listener.getsockname()[1]
        finally:
            server.should_exit = True
            await serving
