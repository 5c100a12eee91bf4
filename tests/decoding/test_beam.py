"""Beam search against exhaustive search, greedy search and hand-made cases, over a table of probabilities."""

from __future__ import annotations

import itertools
import math

import numpy as np
import numpy.typing as npt
import pytest
from beam_reference import LogProbs, Prefix, search_beams
from hypothesis import given, settings
from hypothesis import strategies as st

from app.decoding.beam import BeamOptions, BeamSearch
from app.decoding.greedy import GreedySearch
from app.decoding.hypothesis import FinishReason, Hypothesis, LengthNormalisation

EOS_ID = 0


def random_model(vocabulary_size: int, seed: int) -> LogProbs:
    """Log-probabilities that depend on the whole prefix, the same for the same prefix."""

    def log_probs(prefix: Prefix) -> npt.NDArray[np.float64]:
        generator = np.random.default_rng([seed, len(prefix), *prefix])
        logits = generator.normal(size=vocabulary_size) * 2
        return np.asarray(logits - np.log(np.exp(logits).sum()))

    return log_probs


def options(beam_size: int, **changes: object) -> BeamOptions:
    values: dict[str, object] = {
        "beam_size": beam_size,
        "num_hypotheses": 1,
        "length_penalty": 1.0,
        "normalisation": LengthNormalisation.POWER,
        "patience": 1.0,
        "max_target_tokens": 4,
    }
    return BeamOptions(**{**values, **changes})  # type: ignore[arg-type]


def every_target(log_probs: LogProbs, vocabulary_size: int, search_options: BeamOptions) -> list[Hypothesis]:
    """All targets up to the limit, as the search may end them, best first."""
    limit = search_options.max_target_tokens
    found = []
    for length in range(limit + 1):
        for tokens in itertools.product(range(1, vocabulary_size), repeat=length):
            total = math.fsum(log_probs(tokens[:i])[token] for i, token in enumerate(tokens))
            if length == limit:
                reason = FinishReason.LENGTH
            else:
                total += log_probs(tokens)[EOS_ID]
                reason = FinishReason.EOS
            penalty, normalisation = search_options.length_penalty, search_options.normalisation
            found.append(Hypothesis(tokens, total, reason, penalty, normalisation))
    return sorted(found, key=lambda hypothesis: -hypothesis.score)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    vocabulary_size=st.integers(2, 4),
    max_target_tokens=st.integers(1, 3),
    length_penalty=st.sampled_from([0.6, 1.0, 2.0]),
    normalisation=st.sampled_from(LengthNormalisation),
)
def test_a_beam_wide_enough_for_every_target_finds_what_exhaustive_search_finds(
    seed: int,
    vocabulary_size: int,
    max_target_tokens: int,
    length_penalty: float,
    normalisation: LengthNormalisation,
) -> None:
    log_probs = random_model(vocabulary_size, seed)
    search_options = options(
        beam_size=vocabulary_size**max_target_tokens,  # wider than a user may ask for, so nothing is lost
        num_hypotheses=3,
        max_target_tokens=max_target_tokens,
        length_penalty=length_penalty,
        normalisation=normalisation,
        patience=100.0,
    )
    expected = every_target(log_probs, vocabulary_size, search_options)[:3]
    found = search_beams(log_probs, search_options)
    assert [h.token_ids for h in found] == [h.token_ids for h in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.score == pytest.approx(other.score, abs=1e-9)
        assert one.finish_reason is other.finish_reason


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), vocabulary_size=st.integers(2, 5), limit=st.integers(1, 4))
def test_a_beam_of_one_is_greedy_search(seed: int, vocabulary_size: int, limit: int) -> None:
    log_probs = random_model(vocabulary_size, seed)
    greedy = GreedySearch(eos_id=EOS_ID, max_target_tokens=limit)
    prefix: Prefix = ()
    while not greedy.finished:
        row = log_probs(prefix)
        token = int(row.argmax())
        greedy.advance(token, float(row[token]))
        prefix = (*prefix, token)
    (found,) = search_beams(log_probs, options(1, max_target_tokens=limit))
    (expected,) = greedy.hypotheses()
    assert found.token_ids == expected.token_ids
    assert found.finish_reason is expected.finish_reason
    assert found.sum_log_probs == pytest.approx(expected.sum_log_probs)


def test_an_ended_beam_gives_its_place_to_the_next_best_that_goes_on() -> None:
    search = BeamSearch(eos_id=EOS_ID, options=options(2, patience=2.0))
    assert not search.advance([5, EOS_ID, EOS_ID, 7], [0, 0, 1, 0], [-1.0, -1.1, -1.2, -2.0])
    assert search.last_ids == [5, 7]
    assert search.scores == [-1.0, -2.0]
    assert search.parents == [0, 0]


def test_an_ended_beam_never_goes_on_even_if_nothing_can_take_its_place() -> None:
    search = BeamSearch(eos_id=EOS_ID, options=options(2, patience=2.0))
    assert not search.advance([5, EOS_ID], [0, 0], [-1.0, -1.1])
    assert search.scores == [-1.0, float("-inf")]


def test_a_search_whose_beams_have_all_ended_is_finished() -> None:
    search = BeamSearch(eos_id=EOS_ID, options=options(2, patience=5.0, num_hypotheses=2))
    assert not search.advance([5, 6, 7, 8], [0, 0, 0, 0], [-1.0, -1.1, -1.2, -1.3])
    assert search.advance([EOS_ID, EOS_ID], [0, 1], [-1.5, -1.6])
    assert [hypothesis.token_ids for hypothesis in search.hypotheses()] == [(5,), (6,)]


def test_without_length_penalty_the_search_ends_as_soon_as_the_best_has_ended() -> None:
    search = BeamSearch(eos_id=EOS_ID, options=options(3, length_penalty=0.0))
    assert not search.advance([5, EOS_ID, 6, 7, 8, 9], [0] * 6, [-1.0, -1.1, -1.2, -2.0, -3.0, -4.0])
    assert search.advance([EOS_ID, 5, 6, 7, 8, 9], [0] * 6, [-1.05, -1.2, -1.3, -2.0, -3.0, -4.0])
    assert search.hypotheses()[0].sum_log_probs == -1.05


def test_at_the_limit_every_live_beam_becomes_a_hypothesis_that_says_so() -> None:
    search = BeamSearch(eos_id=EOS_ID, options=options(2, num_hypotheses=2, max_target_tokens=1))
    assert search.advance([5, EOS_ID, 6, 7], [0, 0, 0, 0], [-1.0, -1.5, -2.0, -3.0])
    assert [(h.token_ids, h.finish_reason) for h in search.hypotheses()] == [
        ((5,), FinishReason.LENGTH),
        ((), FinishReason.EOS),
    ]


def test_scores_follow_the_two_published_formulas() -> None:
    power = Hypothesis((1, 2, 3), -6.0, FinishReason.EOS, 0.5, LengthNormalisation.POWER)
    assert power.score == pytest.approx(-6.0 / 4**0.5)
    gnmt = Hypothesis((1, 2, 3), -6.0, FinishReason.EOS, 0.5, LengthNormalisation.GNMT)
    assert gnmt.score == pytest.approx(-6.0 / ((5 + 4) / 6) ** 0.5)
    assert Hypothesis((1,), -6.0, FinishReason.LENGTH, 0.0).score == -6.0


def test_an_unfinished_search_has_no_hypotheses() -> None:
    with pytest.raises(RuntimeError):
        BeamSearch(eos_id=EOS_ID, options=options(2)).hypotheses()
