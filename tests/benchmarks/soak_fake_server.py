"""A server for tests of the soak test: the real web layer before an engine that upper-cases, with faults.

python soak_fake_server.py PORT [leak] [files] [threads] [fault] [wrong]
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import uvicorn
from prometheus_client import CollectorRegistry

sys.path.append(str(Path(__file__).resolve().parents[1] / "http"))
sys.path.append(str(Path(__file__).resolve().parents[2]))

from fake_engine import FakeEngine

from app.api import ApiOptions, create_app
from app.observability import Metrics
from app.runtime.events import AdmissionEvent
from app.runtime.request import TranslationRequest, TranslationResult

_LEAK_BYTES = 500_000


class CountedEngine(FakeEngine):
    """Counts its segments as the real one does, and does wrong what it is asked to."""

    def __init__(self, metrics: Metrics, faults: Sequence[str]) -> None:
        super().__init__()
        self._metrics = metrics
        self._faults = frozenset(faults)
        self._numbers = itertools.count(1)
        self._held: list[bytes] = []

    async def translate(self, request: TranslationRequest) -> TranslationResult:
        number = next(self._numbers)
        self._do_wrong(number)
        result = await super().translate(request)
        self.requests.clear()
        for text in request.texts:
            for part in text.split("\n\n"):
                if part.strip():
                    self._count(kept=not request.options.guides)
        if "wrong" in self._faults and number % 40 == 0:
            return replace(result, texts=tuple(replace(text, text=f"{number}") for text in result.texts))
        return result

    def _count(self, *, kept: bool) -> None:
        if kept:
            self._metrics.on_cache_lookup("fake", "miss")
        self._metrics.on_admission(
            AdmissionEvent(
                "fake", queue_s=(0.001,), num_source_tokens=3, num_padded_tokens=8, duration_s=0.001
            )
        )
        self._metrics.on_finished("fake", num_target_tokens=3, finish_reason="eos")

    def _do_wrong(self, number: int) -> None:
        if "leak" in self._faults:
            self._held.append(b"x" * _LEAK_BYTES)
        if "files" in self._faults:
            os.open("/dev/null", os.O_RDONLY)
        if "threads" in self._faults:
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        if "fault" in self._faults and number % 50 == 0:
            raise ValueError("a fault of ours")


def main() -> None:
    metrics = Metrics(CollectorRegistry())
    engine = CountedEngine(metrics, sys.argv[2:])
    app = create_app(engine, ApiOptions(), metrics=metrics)  # type: ignore[arg-type]  # a fake one
    # uvicorn raises the signal again once it has shut down; the service ends with 0.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    uvicorn.run(app, port=int(sys.argv[1]), log_config=None, access_log=False)


if __name__ == "__main__":
    main()
