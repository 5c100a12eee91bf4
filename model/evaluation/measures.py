"""What is measured of one system on one test set: BLEU, chrF, lengths, faults, speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sacrebleu

from model.evaluation.faults import Faults, find_faults
from model.evaluation.testset import TestSet


@dataclass(frozen=True)
class Speed:
    """How long the translation took.

    Attributes:
        elapsed_s: seconds.
        num_lines: lines translated in that time.
        num_target_tokens: target tokens, ends of sentences included, as the model counts them.
        what: what the time covers, for people.
    """

    elapsed_s: float
    num_lines: int
    num_target_tokens: int
    what: str

    @property
    def lines_per_s(self) -> float:
        """Lines a second."""
        return self.num_lines / self.elapsed_s

    @property
    def target_tokens_per_s(self) -> float:
        """Target tokens a second."""
        return self.num_target_tokens / self.elapsed_s


@dataclass(frozen=True)
class Measures:
    """Scores and counts of one system on one test set.

    Attributes:
        num_lines: lines scored.
        bleu: sacrebleu's corpus BLEU, 0 to 100.
        bleu_signature: how it was computed.
        chrf: sacrebleu's corpus chrF, 0 to 100.
        chrf_signature: likewise.
        length_ratio: tokens of the translations by those of the references, in BLEU's tokenisation.
        faults: lines that are wrong on their face.
    """

    num_lines: int
    bleu: float
    bleu_signature: str
    chrf: float
    chrf_signature: str
    length_ratio: float
    faults: Faults


def measure(testset: TestSet, translations: Sequence[str]) -> Measures:
    """Score one system's translations, N lines for the N of the test set."""
    bleu, chrf = sacrebleu.BLEU(), sacrebleu.CHRF()
    references = [list(testset.references)]
    bleu_score = bleu.corpus_score(list(translations), references)
    chrf_score = chrf.corpus_score(list(translations), references)
    return Measures(
        num_lines=len(translations),
        bleu=float(bleu_score.score),
        bleu_signature=str(bleu.get_signature()),
        chrf=float(chrf_score.score),
        chrf_signature=str(chrf.get_signature()),
        length_ratio=float(bleu_score.ratio),
        faults=find_faults(testset.sources, translations, testset.references),
    )
