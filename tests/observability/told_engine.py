"""An engine that answers as it is told, for tests of what surrounds one."""

from __future__ import annotations

from app.decoding.hypothesis import FinishReason
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


class ToldEngine:
    """Translates en-pt by upper-casing.

    Attributes:
        fault: raised instead of translating.
        timings: what it says it took.
    """

    def __init__(self) -> None:
        self.pairs = (PairInfo("en", "pt", "told"),)
        self.draining = False
        self.num_waiting_tokens = 0
        self.num_running_requests = 0
        self.started = True
        self.heartbeat_ages_s = (0.0,)
        self.fault: Exception | None = None
        self.timings = Timings(
            total_s=0.75,
            queue_s=0.125,
            decode_s=0.375,
            prepared_s=0.0625,
            first_row_s=0.125,
            first_encoded_s=0.25,
            decoded_s=0.5,
        )

    def start(self) -> None:
        """Nothing to start."""

    async def stop(self, *, drain_s: float) -> bool:
        self.draining = True
        return True

    def begin_drain(self) -> None:
        self.draining = True

    def healthy(self, *, max_heartbeat_age_s: float) -> bool:
        return True

    async def translate(self, request: TranslationRequest) -> TranslationResult:
        if self.fault is not None:
            raise self.fault
        return TranslationResult(
            texts=tuple(
                TextResult(
                    text=text.upper(),
                    segments=(SegmentResult(text, text.upper(), 3, 4, -0.25, FinishReason.EOS),),
                    warnings=(TranslationWarning(WarningCode.SEGMENT_WRAPPED, 0, "in 2 pieces"),),
                )
                for text in request.texts
            ),
            model="told",
            timings=self.timings,
        )
