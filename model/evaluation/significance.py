"""Whether systems differ by more than chance: paired bootstrap resampling against the first of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sacrebleu import BLEU, CHRF
from sacrebleu.significance import PairedTest, Result

DEFAULT_NUM_SAMPLES = 1000


@dataclass(frozen=True)
class Certainty:
    """What resampling the test set says of one system's score.

    Attributes:
        mean: of the score over the samples.
        confidence: half the width of its 95 % confidence interval.
        p_value: how often a system as good as the first one would differ so much; None for the first.
    """

    mean: float
    confidence: float
    p_value: float | None


@dataclass(frozen=True)
class Comparison:
    """The certainties of all systems on one test set.

    Attributes:
        bleu: system -> certainty.
        chrf: likewise.
        bleu_signature: with the number of samples and the seed.
        chrf_signature: likewise.
    """

    bleu: Mapping[str, Certainty]
    chrf: Mapping[str, Certainty]
    bleu_signature: str
    chrf_signature: str


def compare(
    translations_of: Mapping[str, Sequence[str]],
    references: Sequence[str],
    *,
    num_samples: int = DEFAULT_NUM_SAMPLES,
) -> Comparison:
    """Compare systems by paired bootstrap resampling (Koehn 2004), as sacrebleu computes it.

    Systems with the very same score have the p-value 1; there we differ from sacrebleu, which takes a
    difference that is 0 in every sample for one that never came about by chance, so 1 / (samples + 1).

    The seed is sacrebleu's, 12345 unless its variable SACREBLEU_SEED says otherwise; the signatures name it.

    Args:
        translations_of: system -> its N lines, the one to compare with first; two systems at least.
        references: N lines.
        num_samples: how often the test set is drawn anew; takes 112 bytes a line and sample of memory.
    """
    names = list(translations_of)
    test = PairedTest(
        [(name, list(lines)) for name, lines in translations_of.items()],
        {"BLEU": BLEU(), "chrF": CHRF()},
        [list(references)],
        test_type="bs",
        n_samples=num_samples,
    )
    signatures, results = test()
    (bleu, bleu_results), (chrf, chrf_results) = (
        (name, [result for result in found if isinstance(result, Result)])
        for name, found in results.items()
        if name != "System"
    )
    return Comparison(
        bleu=_certainties(names, bleu_results),
        chrf=_certainties(names, chrf_results),
        bleu_signature=str(signatures[bleu]),
        chrf_signature=str(signatures[chrf]),
    )


def _certainties(names: Sequence[str], results: Sequence[Result]) -> dict[str, Certainty]:
    return {
        name: _certainty(result, differs=result.score != results[0].score)
        for name, result in zip(names, results, strict=True)
    }


def _certainty(result: Result, *, differs: bool) -> Certainty:
    assert result.mean is not None, "the bootstrap gives every system an interval"
    assert result.ci is not None
    p_value = result.p_value
    if p_value is not None:
        p_value = float(p_value) if differs else 1.0
    return Certainty(float(result.mean), float(result.ci), p_value)
