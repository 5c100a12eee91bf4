"""The judge of `benchmarks.agreement`: rounding ties are excused, faults are not."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from beam_reference import Prefix, search_beams
from tiny_models import tiny_checkpoint

from app.decoding.beam import BeamOptions
from app.decoding.options import DecodingOptions
from benchmarks.float64_search import Float64Search, Outcome
from benchmarks.verdict import Found, Judge, first_difference
from exporters.checkpoint import Checkpoint
from exporters.torch_reference import to_module

LIMIT = 7
SOURCES = [[40, 41, 7, 0], [50, 51, 52, 0], [9, 0], [60, 23, 11, 88, 30, 0]]
GREEDY = DecodingOptions()
BEAMS = DecodingOptions(beam_size=3, num_hypotheses=3, length_penalty=0.6)


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    torch.set_num_threads(1)
    return tiny_checkpoint(norm="pre", activation="gelu", start_id=5, eos_bias=0.0)


def answers(checkpoint: Checkpoint, source: Sequence[int], options: DecodingOptions) -> list[Outcome]:
    return list(Float64Search(checkpoint).outcomes(source, options, max_target_tokens=LIMIT, tie=1e-4))


def found(outcome: Outcome) -> list[Found]:
    return [Found(hypothesis.token_ids, hypothesis.score) for hypothesis in outcome.hypotheses]


def is_tie(
    checkpoint: Checkpoint, options: DecodingOptions, ours: Sequence[Found], theirs: Sequence[Found]
) -> bool:
    difference = first_difference(ours, theirs)
    assert difference is not None
    judge = Judge(Float64Search(checkpoint), max_target_tokens=LIMIT)
    verdict, lines = judge.explain(SOURCES[0], options, difference, {"ours": ours, "theirs": theirs})
    assert len(lines) >= 4
    return verdict


def test_the_float64_search_over_a_cache_finds_what_an_uncached_search_finds(checkpoint: Checkpoint) -> None:
    module = to_module(checkpoint)
    for source in SOURCES:

        @torch.no_grad()
        def log_probs(prefix: Prefix, source: list[int] = source) -> np.ndarray:
            source_ids = torch.tensor([source])
            logits = module(source_ids, torch.ones_like(source_ids) > 0, torch.tensor([[*prefix, 0]]))
            return np.asarray(logits[0, len(prefix)].log_softmax(0).numpy())

        expected = search_beams(
            log_probs,
            BeamOptions(
                beam_size=3,
                num_hypotheses=3,
                length_penalty=0.6,
                normalisation=BEAMS.normalisation,
                patience=1.0,
                max_target_tokens=LIMIT,
            ),
        )
        first = answers(checkpoint, source, BEAMS)[0]
        assert first.decisions == ()
        assert [one.token_ids for one in first.hypotheses] == [one.token_ids for one in expected]
        assert [one.score for one in first.hypotheses] == pytest.approx([h.score for h in expected], abs=1e-4)


def with_twin(checkpoint: Checkpoint, token: int, twin: int) -> Checkpoint:
    """Two tokens that the model cannot tell apart."""
    embedding, bias = (np.array(checkpoint.weights[name]) for name in ("embedding.weight", "output_bias"))
    embedding[twin], bias[twin] = embedding[token], bias[token]
    weights = {**checkpoint.weights, "embedding.weight": embedding, "output_bias": bias}
    return dataclasses.replace(checkpoint, weights=weights)


@pytest.mark.parametrize("options", [GREEDY, BEAMS])
def test_where_two_tokens_are_equally_probable_either_is_an_answer_and_a_third_is_a_fault(
    checkpoint: Checkpoint, options: DecodingOptions
) -> None:
    token = answers(checkpoint, SOURCES[0], options)[0].hypotheses[0].token_ids[0]
    twins = with_twin(checkpoint, token, 93)
    all_answers = answers(twins, SOURCES[0], options)
    firsts = {outcome.hypotheses[0].token_ids[0] for outcome in all_answers}
    assert firsts == {token, 93}
    one, other = (
        next(outcome for outcome in all_answers if outcome.hypotheses[0].token_ids[0] == first)
        for first in (token, 93)
    )
    assert is_tie(twins, options, found(one), found(other))
    wrong = [dataclasses.replace(item, token_ids=(12, *item.token_ids[1:])) for item in found(other)]
    assert not is_tie(twins, options, found(one), wrong)
    assert not is_tie(twins, options, wrong, found(one))


@pytest.mark.parametrize("options", [GREEDY, BEAMS])
def test_a_wrong_score_or_a_missing_hypothesis_is_a_fault(
    checkpoint: Checkpoint, options: DecodingOptions
) -> None:
    right = found(answers(checkpoint, SOURCES[0], options)[0])
    assert first_difference(right, right) is None
    rounded = [dataclasses.replace(item, score=item.score + 1e-6) for item in right]
    assert first_difference(right, rounded) is None
    wrong = [dataclasses.replace(item, score=item.score + 0.01) for item in right]
    assert not is_tie(checkpoint, options, right, wrong)
    assert not is_tie(checkpoint, options, right, right[:-1])
