import math

import pytest

from model.evaluation.measures import Speed, measure
from model.evaluation.significance import compare
from model.evaluation.testset import TestSet

WORDS = [f"word{letter}" for letter in "abcdefghijkl"]
REFERENCES = tuple(
    " ".join(WORDS[(start + step * offset) % 12] for offset in range(8))
    for start in range(12)
    for step in (1, 5, 7)
)
TESTSET = TestSet("t", tuple(f"source {number}" for number in range(len(REFERENCES))), REFERENCES)


def test_the_references_themselves_have_full_scores() -> None:
    found = measure(TESTSET, REFERENCES)
    assert (found.bleu, found.chrf) == (pytest.approx(100), pytest.approx(100))
    assert found.length_ratio == 1
    assert found.num_lines == len(REFERENCES)
    assert "tok:13a" in found.bleu_signature
    assert "nc:6" in found.chrf_signature


def test_short_translations_pay_the_brevity_penalty_and_have_a_low_length_ratio() -> None:
    """All n-grams are right, so BLEU is the penalty alone (Papineni et al. 2002, section 2.2.2)."""
    found = measure(TESTSET, [" ".join(line.split(" ")[:6]) for line in REFERENCES])
    assert found.length_ratio == pytest.approx(6 / 8)
    assert found.bleu == pytest.approx(100 * math.exp(1 - 8 / 6))


def test_speed_is_work_by_time() -> None:
    speed = Speed(elapsed_s=2.0, num_lines=10, num_target_tokens=300, what="all")
    assert (speed.lines_per_s, speed.target_tokens_per_s) == (5, 150)


def spoiled(every: int) -> list[str]:
    return [line[::-1] if number % every == 0 else line for number, line in enumerate(REFERENCES)]


def test_a_clear_difference_is_significant_and_none_is_not() -> None:
    found = compare(
        {"good": spoiled(12), "same": spoiled(12), "bad": spoiled(2)}, REFERENCES, num_samples=200
    )
    for certainties in (found.bleu, found.chrf):
        assert list(certainties) == ["good", "same", "bad"]
        assert certainties["good"].p_value is None
        assert certainties["same"].p_value == 1
        assert (certainties["bad"].p_value or 1) < 0.01
        assert certainties["good"].mean > certainties["bad"].mean
        assert certainties["bad"].confidence > 0


def test_the_bootstrap_repeats_itself_and_names_its_seed() -> None:
    runs = [compare({"a": spoiled(3), "b": spoiled(4)}, REFERENCES, num_samples=100) for _ in range(2)]
    assert runs[0] == runs[1]
    assert "bs:100|seed:12345" in runs[0].bleu_signature
