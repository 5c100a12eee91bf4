"""Two engines' answers to one sentence: are they the same, and if not, a rounding tie or a fault?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.float64_search import Asked, Decision, Float64Search, ForcedTarget

MAX_SCORE_DIFFERENCE = 1e-3
"""Largest accepted difference between the two sides' scores of the same hypothesis."""
TIE = 1e-4
"""Natural log-probabilities nearer than this may be decided either way by float32 rounding."""


@dataclass(frozen=True)
class Found:
    """One side's hypothesis: target tokens without end-of-sentence, and its normalised score."""

    token_ids: tuple[int, ...]
    score: float


@dataclass(frozen=True)
class Difference:
    """The first hypothesis of a sentence on which the sides differ; None: this side has none there."""

    rank: int
    ours: Found | None
    theirs: Found | None


def first_difference(ours: Sequence[Found], theirs: Sequence[Found]) -> Difference | None:
    """Compare two lists of hypotheses, best first; None when tokens and scores are the same."""
    for rank in range(max(len(ours), len(theirs))):
        mine = ours[rank] if rank < len(ours) else None
        other = theirs[rank] if rank < len(theirs) else None
        if mine is None or other is None or mine.token_ids != other.token_ids:
            return Difference(rank, mine, other)
        if not abs(mine.score - other.score) <= MAX_SCORE_DIFFERENCE:
            return Difference(rank, mine, other)
    return None


class Judge:
    """Explains differences by the PyTorch model in float64."""

    def __init__(self, search: Float64Search) -> None:
        """Take the third opinion, over the weights that both sides compute with."""
        self._search = search

    def explain(
        self, asked: Asked, difference: Difference, *, sides: Mapping[str, Sequence[Found]]
    ) -> tuple[bool, list[str]]:
        """Whether the difference is a tie, and lines that show why or why not.

        Args:
            asked: the sentence and what both sides were asked for.
            difference: where they differ.
            sides: each side's hypotheses, by its name.
        """
        lines = list(self._forced_lines(asked, difference))
        verdicts = [self._verdict(asked, hypotheses, name, lines) for name, hypotheses in sides.items()]
        return all(verdicts), lines

    def _forced_lines(self, asked: Asked, difference: Difference) -> Iterator[str]:
        mine, other = difference.ours, difference.theirs
        yield f"hypothesis {difference.rank}: scores {_score(mine)} ours, {_score(other)} theirs"
        forced = {
            name: self._search.force(asked, side.token_ids)
            for name, side in (("ours", mine), ("theirs", other))
            if side is not None
        }
        for name, target in forced.items():
            yield f"  float64 score of {name}: {target.score:.7f}"
        if len(forced) == 2 and forced["ours"].token_ids != forced["theirs"].token_ids:
            yield "  " + _parting(forced["ours"], forced["theirs"])

    def _verdict(self, asked: Asked, hypotheses: Sequence[Found], name: str, lines: list[str]) -> bool:
        for outcome in self._search.outcomes(asked, tie=TIE):
            ties = list(outcome.decisions)
            if len(outcome.hypotheses) != len(hypotheses):
                continue
            for side, expected in zip(hypotheses, outcome.hypotheses, strict=True):
                exact = self._search.force(asked, side.token_ids)
                if abs(side.score - exact.score) > MAX_SCORE_DIFFERENCE:
                    break
                if side.token_ids == expected.token_ids:
                    continue
                # In sums of log-probabilities, whatever the length penalty makes of them.
                gap = abs(exact.score - expected.score) * abs(exact.sum_log_probs / exact.score)
                if gap > TIE:
                    break
                ties.append(Decision("ranking", len(side.token_ids), gap))
            else:
                lines.append(f"  {name}: the float64 search says the same{_deciding(ties)}")
                return True
        lines.append(f"  {name}: NOT an answer of the float64 search, whichever way ties under {TIE} go")
        return False


def _parting(ours: ForcedTarget, theirs: ForcedTarget) -> str:
    """Where two targets part, and how probable the model finds either token there."""
    mine, other = ours.decoded_ids, theirs.decoded_ids
    position = next(
        (at for at, (one, two) in enumerate(zip(mine, other, strict=False)) if one != two),
        min(len(mine), len(other)),
    )
    if position >= min(len(mine), len(other)):
        return f"one ends at token {position} where the other goes on at the limit"
    one, two = ours.log_probs[position], theirs.log_probs[position]
    return (
        f"first differing token {position}: log-probability {one:.7f} of our token {mine[position]}, "
        f"{two:.7f} of theirs, {other[position]}; they differ by {abs(one - two):.2e}"
    )


def _deciding(decisions: Sequence[Decision]) -> str:
    if not decisions:
        return " without deciding any tie"
    told = ", ".join(f"{item.what} at token {item.position} by {item.gap:.1e}" for item in decisions)
    return f", with these ties decided so: {told}"


def _score(found: Found | None) -> str:
    return "none" if found is None else f"{found.score:.7f} ({len(found.token_ids)} tokens)"
