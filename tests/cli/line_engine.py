import asyncio
import itertools

from app.decoding.hypothesis import FinishReason
from app.decoding.options import DecodingOptions
from app.errors import QueueFull
from app.runtime.request import (
    PairInfo,
    SegmentResult,
    TextResult,
    Timings,
    TranslationRequest,
    TranslationResult,
    TranslationWarning,
    WarningCode,
)


class LineEngine:
    """Upper-cases lines, later ones sooner; refuses more than it was promised.

    Attributes:
        most_running: the most requests it has had at once.
        interrupt_at: request at which it acts as if Ctrl-C had been pressed.
        most_allowed: refuses more requests at once than this.
        hold_until: answers nothing until it has had this many requests at once.
        options: all that it was asked with.
    """

    pairs = (PairInfo("en", "pt", "en-pt"),)

    def __init__(self) -> None:
        self.num_running_requests = self.most_running = 0
        self.num_requests = 0
        self.interrupt_at: int | None = None
        self.most_allowed = 256
        self.hold_until = 0
        self.options: set[DecodingOptions] = set()
        self._full = asyncio.Event()
        self.started = self.stopped = False
        self._delays = itertools.cycle([9, 4, 7, 0, 2])

    def start(self) -> None:
        self.started = True
        self.stopped = False
        self.num_requests = 0

    async def stop(self, *, drain_s: float) -> bool:
        self.stopped = True
        return True

    async def translate(self, request: TranslationRequest) -> TranslationResult:
        assert self.started
        assert not self.stopped
        assert (request.source, request.target) == ("en", "pt")
        (text,) = request.texts
        assert "\n" not in text
        self.num_requests += 1
        self.options.add(request.options)
        if self.num_requests == self.interrupt_at:
            raise KeyboardInterrupt
        self.num_running_requests += 1
        self.most_running = max(self.most_running, self.num_running_requests)
        if self.num_running_requests > self.most_allowed:
            raise QueueFull("too many", retry_after_s=1)
        if self.num_running_requests >= self.hold_until:
            self._full.set()
        try:
            await asyncio.wait_for(self._full.wait(), timeout=10)
            for _ in range(next(self._delays)):
                await asyncio.sleep(0)
        finally:
            self.num_running_requests -= 1
        warnings = (TranslationWarning(WarningCode.TARGET_TRUNCATED, 0, "limit"),) if "long" in text else ()
        translated = text.upper().replace("|", "\n")
        segment = SegmentResult(text, translated, 2, 2, -0.5, FinishReason.EOS)
        return TranslationResult(
            (TextResult(translated, (segment,), warnings),), "en-pt", Timings(0.1, 0, 0.1)
        )
