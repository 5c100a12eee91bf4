"""An engine that translates by upper-casing, and asserts what it should see."""

from __future__ import annotations

import asyncio

from app.decoding.hypothesis import FinishReason
from app.errors import ShuttingDown
from app.runtime.request import (
    Alignment,
    Alternative,
    PairInfo,
    SegmentResult,
    TextResult,
    Timings,
    TranslationRequest,
    TranslationResult,
    TranslationWarning,
    WarningCode,
)


class FakeEngine:
    """Behaves as the engine's interface says.

    Attributes:
        fault: raised instead of translating.
        gate: translation waits until it is set.
        entered: set when a translation has begun to wait.
        cancelled: set when a waiting translation was cancelled.
    """

    def __init__(self, pairs: tuple[tuple[str, str], ...] = (("en", "pt"), ("pt", "en"))) -> None:
        self.pairs = tuple(PairInfo(source, target, f"{source}-{target}") for source, target in pairs)
        self.requests: list[TranslationRequest] = []
        self.fault: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.entered = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.draining = False
        self.alive = True
        self.was_started = False
        self.started = True
        self.stopped_with: list[float] = []
        self.num_running_requests = 0
        self.heartbeat_ages_s: tuple[float, ...] = (0.0,)

    @property
    def num_waiting_tokens(self) -> int:
        return 7 * self.num_running_requests

    def start(self) -> None:
        assert not self.was_started
        self.was_started = True

    async def supervise(self, *, max_heartbeat_age_s: float) -> str:
        await asyncio.Event().wait()
        raise AssertionError("an event nobody sets was set")

    async def stop(self, *, drain_s: float) -> bool:
        self.draining = True
        self.stopped_with.append(drain_s)
        return True

    def begin_drain(self) -> None:
        self.draining = True

    def healthy(self, *, max_heartbeat_age_s: float) -> bool:
        assert max_heartbeat_age_s > 0
        return self.alive

    async def translate(self, request: TranslationRequest) -> TranslationResult:
        assert any((request.source, request.target) == (pair.source, pair.target) for pair in self.pairs)
        for text in request.texts:
            text.encode()  # a lone surrogate must never get this far
        if self.draining:
            raise ShuttingDown("the service is stopping; try another instance")
        self.requests.append(request)
        if self.fault is not None:
            raise self.fault
        self.num_running_requests += 1
        try:
            self.entered.set()
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        finally:
            self.num_running_requests -= 1
        return TranslationResult(
            texts=tuple(
                _translated(text, request.options.num_hypotheses, aligned=request.options.alignment)
                for text in request.texts
            ),
            model=f"{request.source}-{request.target}",
            timings=Timings(total_s=0.3, queue_s=0.1, decode_s=0.2),
        )


def _translated(text: str, num_hypotheses: int = 1, *, aligned: bool = False) -> TextResult:
    if not text.strip():
        return TextResult(text=text, segments=(), warnings=())
    others = tuple(Alternative(f"{text} {rank}", -0.5 * rank) for rank in range(1, num_hypotheses))
    alignment = Alignment(("▁a", "</s>"), ("▁A",), ((0.875, 0.125),)) if aligned else None
    segment = SegmentResult(text, text.upper(), 3, 4, -0.25, FinishReason.EOS, others, alignment)
    warnings = (
        (TranslationWarning(WarningCode.UNKNOWN_CHARACTERS, 0, "1 character is not known to the model"),)
        if "☃" in text
        else ()
    )
    return TextResult(
        text=text.upper(),
        segments=(segment,),
        warnings=warnings,
        alternatives=tuple(other.target for other in others),
    )
