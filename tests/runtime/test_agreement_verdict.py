"""The judge of `benchmarks.agreement`: rounding ties are excused, faults are not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from beam_reference import Prefix, guided_log_probs, search_beams
from tiny_models import tiny_checkpoint

from app.decoding.beam import BeamOptions
from app.decoding.guidance import Guidance
from app.decoding.options import DecodingOptions
from benchmarks.float64_search import Asked, Float64Search, Outcome
from benchmarks.verdict import Found, Judge, first_difference
from exporters.checkpoint import Checkpoint
from exporters.torch_reference import to_module

LIMIT = 7
SOURCES = [[40, 41, 7, 0], [50, 51, 52, 0], [9, 0], [60, 23, 11, 88, 30, 0]]
GREEDY = DecodingOptions()
BEAMS = DecodingOptions(beam_size=3, num_hypotheses=3, length_penalty=0.6)

EVERYTHING = Guidance(
    min_target_tokens=6,
    no_repeat_ngram_size=1,
    repetition_penalty=1.3,
    forbidden=((40,), (7, 23)),
    prefix=(12, 30),
)
GUIDANCES: dict[str, Callable[[tuple[int, ...]], Guidance]] = {
    "least length": lambda target: Guidance(min_target_tokens=len(target) + 2),
    "no repeats": lambda _: Guidance(no_repeat_ngram_size=1),
    "repetition penalty": lambda _: Guidance(repetition_penalty=3.0),
    "forbidden token": lambda target: Guidance(forbidden=(target[:1],)),
    "forbidden pair": lambda target: Guidance(forbidden=(target[:2],)),
    "prefix": lambda _: Guidance(prefix=(12, 30)),
}
"""What changes the answer, given the answer without it."""


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    torch.set_num_threads(1)
    return tiny_checkpoint(norm="pre", activation="gelu", start_id=5, eos_bias=0.0)


def asked(source: Sequence[int], options: DecodingOptions, guidance: Guidance | None = None) -> Asked:
    return Asked(source, options, LIMIT, guidance)


def answers(checkpoint: Checkpoint, what: Asked) -> list[Outcome]:
    return list(Float64Search(checkpoint).outcomes(what, tie=1e-4))


def found(outcome: Outcome) -> list[Found]:
    return [Found(hypothesis.token_ids, hypothesis.score) for hypothesis in outcome.hypotheses]


def is_tie(checkpoint: Checkpoint, what: Asked, ours: Sequence[Found], theirs: Sequence[Found]) -> bool:
    difference = first_difference(ours, theirs)
    assert difference is not None
    judge = Judge(Float64Search(checkpoint))
    verdict, lines = judge.explain(what, difference, sides={"ours": ours, "theirs": theirs})
    assert len(lines) >= 4
    return verdict


@pytest.mark.parametrize("guidance", [None, EVERYTHING])
def test_the_float64_search_over_a_cache_finds_what_an_uncached_search_finds(
    checkpoint: Checkpoint, guidance: Guidance | None
) -> None:
    module = to_module(checkpoint).double()
    defined = guidance or Guidance()
    for source in SOURCES:

        @torch.no_grad()
        def log_probs(prefix: Prefix, source: list[int] = source) -> np.ndarray:
            if len(prefix) < len(defined.prefix):
                certain = np.full(checkpoint.config.vocabulary_size, -np.inf)
                certain[defined.prefix[len(prefix)]] = 0.0
                return certain
            source_ids = torch.tensor([source])
            logits = module(source_ids, torch.ones_like(source_ids) > 0, torch.tensor([[*prefix, 0]]))
            return guided_log_probs(logits[0, len(prefix)].numpy(), defined, prefix)

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
        what = asked(source, BEAMS, guidance)
        first = answers(checkpoint, what)[0]
        assert first.decisions == ()
        assert [one.token_ids for one in first.hypotheses] == [one.token_ids for one in expected]
        scores = [one.score for one in expected]
        assert [one.score for one in first.hypotheses] == pytest.approx(scores, abs=1e-9)
        forced = [Float64Search(checkpoint).force(what, one.token_ids) for one in expected]
        assert [one.score for one in forced] == pytest.approx(scores, abs=1e-9)


def with_twin(checkpoint: Checkpoint, token: int, twin: int) -> Checkpoint:
    """Two tokens that the model cannot tell apart."""
    embedding, bias = (np.array(checkpoint.weights[name]) for name in ("embedding.weight", "output_bias"))
    embedding[twin], bias[twin] = embedding[token], bias[token]
    weights = {**checkpoint.weights, "embedding.weight": embedding, "output_bias": bias}
    return dataclasses.replace(checkpoint, weights=weights)


@pytest.mark.parametrize("guidance", [None, EVERYTHING])
@pytest.mark.parametrize("options", [GREEDY, BEAMS])
def test_where_two_tokens_are_equally_probable_either_is_an_answer_and_a_third_is_a_fault(
    checkpoint: Checkpoint, options: DecodingOptions, guidance: Guidance | None
) -> None:
    what = asked(SOURCES[0], options, guidance)
    chosen_at = len(guidance.prefix) if guidance else 0
    token = answers(checkpoint, what)[0].hypotheses[0].token_ids[chosen_at]
    twins = with_twin(checkpoint, token, 93)
    all_answers = answers(twins, what)
    chosen = {outcome.hypotheses[0].token_ids[chosen_at] for outcome in all_answers}
    assert chosen == {token, 93}
    one, other = (
        next(outcome for outcome in all_answers if outcome.hypotheses[0].token_ids[chosen_at] == choice)
        for choice in (token, 93)
    )
    assert is_tie(twins, what, found(one), found(other))
    wrong = [
        dataclasses.replace(
            item, token_ids=(*item.token_ids[:chosen_at], 12, *item.token_ids[chosen_at + 1 :])
        )
        for item in found(other)
    ]
    assert not is_tie(twins, what, found(one), wrong)
    assert not is_tie(twins, what, wrong, found(one))


@pytest.mark.parametrize("options", [GREEDY, BEAMS])
@pytest.mark.parametrize("name", GUIDANCES)
def test_a_side_that_does_not_do_what_is_asked_or_does_it_unasked_is_at_fault(
    checkpoint: Checkpoint, options: DecodingOptions, name: str
) -> None:
    free = asked(SOURCES[0], options)
    unguided = found(answers(checkpoint, free)[0])
    what = asked(SOURCES[0], options, GUIDANCES[name](unguided[0].token_ids))
    guided = found(answers(checkpoint, what)[0])
    assert not is_tie(checkpoint, what, guided, unguided)
    assert not is_tie(checkpoint, what, unguided, guided)
    assert not is_tie(checkpoint, free, unguided, guided)


@pytest.mark.parametrize("options", [GREEDY, BEAMS])
def test_a_side_that_charges_for_the_prefix_is_at_fault(
    checkpoint: Checkpoint, options: DecodingOptions
) -> None:
    what = asked(SOURCES[0], options, Guidance(prefix=(12, 30)))
    free = found(answers(checkpoint, what)[0])
    search, unguided = Float64Search(checkpoint), asked(SOURCES[0], options)
    charged = [dataclasses.replace(item, score=search.force(unguided, item.token_ids).score) for item in free]
    assert not is_tie(checkpoint, what, free, charged)


@pytest.mark.parametrize("options", [GREEDY, BEAMS])
def test_a_wrong_score_or_a_missing_hypothesis_is_a_fault(
    checkpoint: Checkpoint, options: DecodingOptions
) -> None:
    what = asked(SOURCES[0], options)
    right = found(answers(checkpoint, what)[0])
    assert first_difference(right, right) is None
    rounded = [dataclasses.replace(item, score=item.score + 1e-6) for item in right]
    assert first_difference(right, rounded) is None
    wrong = [dataclasses.replace(item, score=item.score + 0.01) for item in right]
    assert not is_tie(checkpoint, what, right, wrong)
    assert not is_tie(checkpoint, what, right, right[:-1])
