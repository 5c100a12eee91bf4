"""One lane over any runner, driven by the calling thread: the decoding of the service without its threads."""

from __future__ import annotations

import time
from collections.abc import Sequence

from app.bundle import Manifest
from app.decoding.options import DecodingOptions
from app.decoding.search import make_search
from app.runtime.entry import Entry, Outcome
from app.runtime.events import SilentObserver
from app.runtime.lane import Lane
from app.runtime.runner import ModelRunner
from benchmarks.local_engine import Hypotheses, hypotheses_of


class DrivenLane:
    """Translates token ids with a runner; one thread only."""

    def __init__(
        self, manifest: Manifest, runner: ModelRunner, *, max_rows: int, max_admission_tokens: int
    ) -> None:
        """Put a lane around a runner.

        Args:
            manifest: the model's.
            runner: owned by the lane from now on.
            max_rows: the runner's.
            max_admission_tokens: padded source tokens encoded between two steps.
        """
        self._manifest = manifest
        self._lane = Lane(
            manifest.id,
            runner,
            max_admission_tokens=max_admission_tokens,
            min_newcomers=max(1, max_rows // 4),
            observer=SilentObserver(),
        )

    def translate(
        self,
        sources: Sequence[Sequence[int]],
        limits: Sequence[int],
        options: DecodingOptions | None = None,
    ) -> list[Hypotheses]:
        """Translate all sources, queued at once in their order; results in that order.

        Args:
            sources: token ids, each with the final end-of-sentence.
            limits: most target tokens of each.
            options: greedy search unless given.

        Raises:
            DragomanError: the first failure of a segment.
        """
        options = options or DecodingOptions()
        outcomes: list[list[Outcome]] = [[] for _ in sources]
        for source, limit, outcome in zip(sources, limits, outcomes, strict=True):
            self._lane.add(
                Entry(
                    source,
                    make_search(
                        options, eos_id=self._manifest.tokens.eos_id, max_target_tokens=limit, guidance=None
                    ),
                    max_target_tokens=limit,
                    submitted_at_s=time.monotonic(),
                    deliver=outcome.append,
                )
            )
        while self._lane.has_work:
            self._lane.tick()
        return [hypotheses_of(of_source[0]) for of_source in outcomes]

    def one_by_one(
        self,
        sources: Sequence[Sequence[int]],
        limits: Sequence[int],
        options: DecodingOptions | None = None,
    ) -> list[Hypotheses]:
        """As `translate`, each source alone."""
        return [
            self.translate([source], [limit], options)[0]
            for source, limit in zip(sources, limits, strict=True)
        ]
