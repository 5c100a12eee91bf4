"""Scores in manifests: how they were decoded is stated, and older manifests still open."""

import json

import pytest
from pydantic import ValidationError

from app.bundle import MANIFEST_NAME, Manifest, default_directory
from app.bundle.manifest import QualityScore, Verification

OLD = {
    "test_set": "pud",
    "variant": "cpu-int8",
    "shortlist": True,
    "num_segments": 1000,
    "bleu": 52.32,
    "bleu_signature": "b",
    "chrf": 74.04,
    "chrf_signature": "c",
}


def test_a_score_that_does_not_say_how_it_was_decoded_is_a_greedy_one() -> None:
    score = QualityScore.model_validate_json(json.dumps(OLD))
    assert (score.beam_size, score.length_penalty) == (1, 1.0)


def test_a_score_keeps_its_decoding() -> None:
    score = QualityScore.model_validate_json(json.dumps(OLD | {"beam_size": 4, "length_penalty": 0}))
    assert (score.beam_size, score.length_penalty) == (4, 0.0)
    assert QualityScore.model_validate_json(score.model_dump_json()) == score


@pytest.mark.parametrize("wrong", [{"beam_size": 0}, {"length_penalty": -1}, {"beam": 4}])
def test_a_score_of_an_impossible_decoding_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        QualityScore.model_validate_json(json.dumps(OLD | wrong))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["bleu", "chrf", "length_penalty"])
def test_a_score_that_is_no_number_is_refused_since_it_would_be_unlike_itself(
    field: str, number: str
) -> None:
    document = json.dumps(OLD | {field: 0}).replace(f'"{field}": 0', f'"{field}": {number}')
    with pytest.raises(ValidationError, match="finite number"):
        QualityScore.model_validate_json(document)


def test_a_verification_that_is_no_number_is_refused_too() -> None:
    facts = '{"variant": "cpu-fp32", "num_segments": 1, "num_identical": 0, "max_score_difference": NaN}'
    with pytest.raises(ValidationError, match="finite number"):
        Verification.model_validate_json(facts)


def test_a_manifest_from_before_opens() -> None:
    path = default_directory() / "en-pt" / MANIFEST_NAME
    facts = json.loads(path.read_text()) | {"quality": [OLD]}
    (score,) = Manifest.model_validate_json(json.dumps(facts)).quality
    assert score.beam_size == 1
