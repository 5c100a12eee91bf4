"""What the runtime tells whoever watches it (metrics, logs). No texts, no addresses, no keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class StepEvent:
    """One decoder step.

    Attributes:
        model: bundle id.
        num_rows: R, rows that took the step.
        source_length: S, the padded source length of the row group.
        num_source_tokens: real source tokens in those rows; R * S minus it is padding.
        duration_s: seconds of the step, token choice included.
    """

    model: str
    num_rows: int
    source_length: int
    num_source_tokens: int
    duration_s: float


@dataclass(frozen=True)
class AdmissionEvent:
    """Newcomers encoded together.

    Attributes:
        model: bundle id.
        queue_s: seconds each newcomer waited.
        num_source_tokens: real source tokens encoded.
        num_padded_tokens: source tokens including padding.
        duration_s: seconds of the encoder pass.
    """

    model: str
    queue_s: tuple[float, ...]
    num_source_tokens: int
    num_padded_tokens: int
    duration_s: float


class RuntimeObserver(Protocol):
    """Called from the worker threads; implementations are thread-safe, quick and do not raise."""

    def on_admission(self, event: AdmissionEvent) -> None:
        """Newcomers were encoded."""
        ...

    def on_step(self, event: StepEvent) -> None:
        """Rows took a step."""
        ...

    def on_finished(self, model: str, *, num_target_tokens: int, finish_reason: str) -> None:
        """A segment finished."""
        ...

    def on_cancelled(self, model: str, *, num_segments: int) -> None:
        """Cancelled segments left."""
        ...

    def on_expired(self, model: str, *, num_segments: int) -> None:
        """Segments left because their deadline passed."""
        ...

    def on_failure(self, model: str, *, num_segments: int, error: Exception) -> None:
        """A graph call raised; `num_segments` entries were answered with an error."""
        ...


class SilentObserver:
    """Watches nothing: for command lines and tests."""

    def on_admission(self, event: AdmissionEvent) -> None:
        """Ignore."""

    def on_step(self, event: StepEvent) -> None:
        """Ignore."""

    def on_finished(self, model: str, *, num_target_tokens: int, finish_reason: str) -> None:
        """Ignore."""

    def on_cancelled(self, model: str, *, num_segments: int) -> None:
        """Ignore."""

    def on_expired(self, model: str, *, num_segments: int) -> None:
        """Ignore."""

    def on_failure(self, model: str, *, num_segments: int, error: Exception) -> None:
        """Ignore."""
