"""The contests: one sentence at a time and everything at once, greedy and with beams, for both sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from app.decoding.options import DecodingOptions
from benchmarks.contest import Contest, timed
from benchmarks.local_engine import LocalEngine, num_tokens
from benchmarks.peers.ctranslate2_process import peer_job
from benchmarks.peers.tuning import TunedCTranslate2
from benchmarks.workload import Workload

BEAM_SIZES = (1, 4)
_WARM_UP_STRIDE = 16


@dataclass(frozen=True)
class Sides:
    """Our engine and the other one, over the same weights.

    Attributes:
        ours: started; its threads are used for contests of everything at once.
        peer: running.
        peer_folder: the other side's int8 model.
        pieces: the vocabulary by id.
        num_threads: of both sides, everything at once.
        shortlist: whether ours was loaded with its shortlist; the other side then uses its vmap.
    """

    ours: LocalEngine
    peer: TunedCTranslate2
    peer_folder: Path
    pieces: Sequence[str]
    num_threads: int
    shortlist: bool = False

    def alone(self, what: str, workload: Workload, *, beam_size: int) -> Contest:
        """One sentence after another on one thread."""
        return self._contest(f"{what}, one sentence, 1 thread", workload, beam_size, one_by_one=True)

    def saturated(self, what: str, workload: Workload, *, beam_size: int) -> Contest:
        """Everything at once on all threads."""
        name = f"{what}, saturated, {count_of_threads(self.num_threads)}"
        return self._contest(name, workload, beam_size, one_by_one=False)

    def _contest(self, name: str, workload: Workload, beam_size: int, *, one_by_one: bool) -> Contest:
        options = DecodingOptions(beam_size=beam_size)
        translate = self.ours.one_by_one if one_by_one else self.ours.translate

        def ours(part: Workload) -> int:
            return num_tokens(translate(part.sources, options, max_target_tokens=part.limits))

        tuned = self.peer.tune(
            peer_job(
                self.peer_folder,
                workload,
                self.pieces,
                beam_size=beam_size,
                use_vmap=self.shortlist,
                num_threads=1 if one_by_one else self.num_threads,
                one_by_one=one_by_one,
            )
        )
        kind = "greedy" if beam_size == 1 else f"beam {beam_size}"
        return Contest(
            name=f"{kind}, {name}{', shortlist' if self.shortlist else ''}",
            ours=lambda: timed(lambda: ours(workload)),
            theirs=tuned.run,
            warm_up=lambda: _discard(ours(workload.every(_WARM_UP_STRIDE))),
            equal_tokens=workload.forced,
            their_setting=tuned.setting,
        )


def count_of_threads(number: int) -> str:
    """The number and its noun."""
    return f"{number} thread{'s' if number > 1 else ''}"


def _discard(_: object) -> None:
    """A warm-up's result is of no interest."""
