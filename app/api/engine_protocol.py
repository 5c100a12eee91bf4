"""What the web layer asks of the engine; the tests' engine is the second implementation."""

from __future__ import annotations

from typing import Protocol

from app.runtime.request import PairInfo, TranslationRequest, TranslationResult


class TranslationEngine(Protocol):
    """The part of `app.runtime.engine.Engine` that requests, probes and shutdown use."""

    @property
    def pairs(self) -> tuple[PairInfo, ...]:
        """The pairs it translates."""
        ...

    @property
    def draining(self) -> bool:
        """Whether it refuses new work."""
        ...

    @property
    def num_waiting_tokens(self) -> int:
        """Source tokens accepted and not yet finished."""
        ...

    @property
    def num_running_requests(self) -> int:
        """Requests accepted and not yet answered."""
        ...

    @property
    def started(self) -> bool:
        """Whether every worker has translated something with every model."""
        ...

    @property
    def heartbeat_ages_s(self) -> tuple[float, ...]:
        """Seconds since each busy worker's last sign of life, 0 for an idle one."""
        ...

    def start(self) -> None:
        """Start the workers, inside a running loop."""
        ...

    async def stop(self, *, drain_s: float) -> bool:
        """Refuse new work, finish admitted work; True if all of it finished in time."""
        ...

    def begin_drain(self) -> None:
        """Refuse new work at once; admitted work goes on."""
        ...

    def healthy(self, *, max_heartbeat_age_s: float) -> bool:
        """Whether every worker lives and gave a recent sign of life."""
        ...

    async def supervise(self, *, max_heartbeat_age_s: float) -> str:
        """Prove each worker, replace those that fail; returns why the process had better end."""
        ...

    async def translate(self, request: TranslationRequest) -> TranslationResult:
        """Translate; cancelling the awaiting task cancels the work."""
        ...
