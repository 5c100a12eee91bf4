"""Two sides do the same work in turns: what a round is, and what is made of the rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """One timed run of one side.

    Attributes:
        num_tokens: target tokens made, of the best hypotheses.
        wall_s: seconds on the clock.
        cpu_s: CPU seconds of the side's whole process, all threads.
    """

    num_tokens: int
    wall_s: float
    cpu_s: float


def timed(work: Callable[[], int]) -> Run:
    """Run work that returns the tokens it made."""
    cpu_before_s, started_at_s = time.process_time(), time.perf_counter()
    num_tokens = work()
    return Run(
        num_tokens=num_tokens,
        wall_s=time.perf_counter() - started_at_s,
        cpu_s=time.process_time() - cpu_before_s,
    )


@dataclass(frozen=True)
class Contest:
    """One thing both sides do.

    Attributes:
        name: what, for the table.
        ours: one run of our side.
        theirs: one run of the other.
        warm_up: brings our side to its working state; the other's was warmed when it was tuned.
        equal_tokens: whether both must make exactly the same number of tokens.
        their_setting: how the other side was tuned.
    """

    name: str
    ours: Callable[[], Run]
    theirs: Callable[[], Run]
    warm_up: Callable[[], None]
    equal_tokens: bool
    their_setting: str


@dataclass(frozen=True)
class SideResult:
    """Medians over the rounds of one side.

    Attributes:
        num_tokens: target tokens of a run.
        wall_s: seconds of a run.
        cpu_s: CPU seconds of a run.
        tokens_per_s: target tokens a second.
        tokens_per_cpu_s: target tokens a CPU second.
    """

    num_tokens: float
    wall_s: float
    cpu_s: float
    tokens_per_s: float
    tokens_per_cpu_s: float


@dataclass(frozen=True)
class ContestResult:
    """What a contest came to; ratios above 1 are in our favour.

    Attributes:
        name: the contest's.
        ours: our medians.
        theirs: the other side's.
        ratio: median over the rounds of our tokens a second over theirs.
        ratio_range: least and largest of them.
        cpu_ratio: the same for tokens a CPU second.
        their_setting: how the other side was tuned.
    """

    name: str
    ours: SideResult
    theirs: SideResult
    ratio: float
    ratio_range: tuple[float, float]
    cpu_ratio: float
    their_setting: str


def compete(
    contests: Sequence[Contest], *, num_rounds: int, progress: Callable[[str], None]
) -> list[ContestResult]:
    """Run every contest once a round, the sides one right after the other, taking turns at going first.

    Args:
        contests: in the order of the table.
        num_rounds: at least one.
        progress: told of every round.

    Raises:
        ValueError: a contest's sides must make equally many tokens and did not.
    """
    rounds: list[list[tuple[Run, Run]]] = [[] for _ in contests]
    for contest in contests:
        contest.warm_up()
    for round_index in range(num_rounds):
        progress(f"round {round_index + 1} of {num_rounds}")
        for contest, runs in zip(contests, rounds, strict=True):
            if round_index % 2:
                theirs = contest.theirs()
                ours = contest.ours()
            else:
                ours = contest.ours()
                theirs = contest.theirs()
            if contest.equal_tokens and ours.num_tokens != theirs.num_tokens:
                raise ValueError(
                    f"{contest.name}: we made {ours.num_tokens} tokens and the other side "
                    f"{theirs.num_tokens}; they must be equal, so the sides do not do the same work"
                )
            runs.append((ours, theirs))
    return [result_of(contest, runs) for contest, runs in zip(contests, rounds, strict=True)]


def result_of(contest: Contest, runs: Sequence[tuple[Run, Run]]) -> ContestResult:
    """Medians and ratios of a contest's rounds, each a pair (ours, theirs).

    The ratio is the median of the rounds' ratios, not the ratio of the medians: what slows the machine
    for a while slows both sides of a round.
    """
    ratios = [_per(ours, ours.wall_s) / _per(theirs, theirs.wall_s) for ours, theirs in runs]
    cpu_ratios = [_per(ours, ours.cpu_s) / _per(theirs, theirs.cpu_s) for ours, theirs in runs]
    return ContestResult(
        name=contest.name,
        ours=_side([ours for ours, _ in runs]),
        theirs=_side([theirs for _, theirs in runs]),
        ratio=statistics.median(ratios),
        ratio_range=(min(ratios), max(ratios)),
        cpu_ratio=statistics.median(cpu_ratios),
        their_setting=contest.their_setting,
    )


def _side(runs: Sequence[Run]) -> SideResult:
    return SideResult(
        num_tokens=statistics.median(run.num_tokens for run in runs),
        wall_s=statistics.median(run.wall_s for run in runs),
        cpu_s=statistics.median(run.cpu_s for run in runs),
        tokens_per_s=statistics.median(_per(run, run.wall_s) for run in runs),
        tokens_per_cpu_s=statistics.median(_per(run, run.cpu_s) for run in runs),
    )


def _per(run: Run, seconds: float) -> float:
    return run.num_tokens / seconds
