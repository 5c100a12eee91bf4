"""Guided beam search against exhaustive and greedy search under the same definitions, over toy models."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from beam_reference import (
    Logits,
    Prefix,
    guided_log_probs,
    guided_sum,
    log_softmax,
    search_beams,
    search_guided,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from app.decoding.beam import BeamOptions
from app.decoding.guidance import Guidance
from app.decoding.guided import GuidedBeamSearch
from app.decoding.hypothesis import FinishReason, Float32Array, LengthNormalisation

EOS_ID = 0


def random_logits(vocabulary_size: int, seed: int) -> Logits:
    """Logits of either sign that depend on the whole target so far."""

    @functools.cache
    def logits(target: Prefix) -> npt.NDArray[np.float64]:
        generator = np.random.default_rng([seed, len(target), *target])
        return np.asarray(generator.normal(size=vocabulary_size) * 2)

    return logits


class Case(NamedTuple):
    """A toy model, what is asked of it, and for how many tokens."""

    vocabulary_size: int
    logits: Logits
    guidance: Guidance
    max_target_tokens: int


@st.composite
def cases(draw: st.DrawFn, *, max_vocabulary: int = 5, max_tokens: int = 4) -> Case:
    vocabulary_size = draw(st.integers(2, max_vocabulary))
    max_target_tokens = draw(st.integers(1, max_tokens))
    words = st.integers(1, vocabulary_size - 1)
    sequences = st.lists(words, min_size=1, max_size=3).map(tuple)
    guidance = Guidance(
        min_target_tokens=draw(st.integers(0, max_target_tokens + 1)),
        no_repeat_ngram_size=draw(st.integers(0, 3)),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 2.5])),
        forbidden=tuple(draw(st.lists(sequences, max_size=4))),
        prefix=tuple(draw(st.lists(words, max_size=max_target_tokens - 1))),
    )
    logits = random_logits(vocabulary_size, draw(st.integers(0, 2**32)))
    return Case(vocabulary_size, logits, guidance, max_target_tokens)


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


class Found(NamedTuple):
    token_ids: Prefix
    reason: FinishReason
    score: float


def score_of(total: float, num_decoded: int, search_options: BeamOptions) -> float:
    length, exponent = max(1, num_decoded), search_options.length_penalty
    power = search_options.normalisation is LengthNormalisation.POWER
    return float(total / (length if power else (5 + length) / 6) ** exponent)


def every_target(case: Case, search_options: BeamOptions) -> list[Found]:
    """All targets that the guidance allows, best first; or, if none can be completed, how far one gets."""
    prefix = case.guidance.prefix
    living: dict[Prefix, float] = {prefix: 0.0}
    ended: list[Found] = []

    def end(target: Prefix, reason: FinishReason, total: float) -> Found:
        num_decoded = len(target) + (reason is FinishReason.EOS)
        return Found(target, reason, score_of(total, num_decoded, search_options))

    for length in range(len(prefix) + 1, case.max_target_tokens + 1):
        longer: dict[Prefix, float] = {}
        for target, total in living.items():
            log_probs = guided_log_probs(case.logits(target), case.guidance, target)
            for token_id in np.flatnonzero(np.isfinite(log_probs)).tolist():
                so_far = total + float(log_probs[token_id])
                if token_id == EOS_ID:
                    ended.append(end(target, FinishReason.EOS, so_far))
                elif length == case.max_target_tokens:
                    ended.append(end((*target, token_id), FinishReason.LENGTH, so_far))
                else:
                    longer[*target, token_id] = so_far
        if not longer and not ended:
            best = max(living, key=living.__getitem__)
            return [end(best, FinishReason.FORBIDDEN, living[best])]
        living = longer
    return sorted(ended, key=lambda found: -found.score)


@settings(max_examples=40, deadline=None)
@given(
    case=cases(),
    length_penalty=st.sampled_from([0.0, 0.6, 1.0, 2.0]),
    normalisation=st.sampled_from(LengthNormalisation),
)
def test_a_beam_wide_enough_finds_what_exhaustive_search_finds_under_the_same_guidance(
    case: Case, length_penalty: float, normalisation: LengthNormalisation
) -> None:
    search_options = options(
        beam_size=case.vocabulary_size ** (case.max_target_tokens - len(case.guidance.prefix)),
        num_hypotheses=3,
        max_target_tokens=case.max_target_tokens,
        length_penalty=length_penalty,
        normalisation=normalisation,
        patience=100.0,
    )
    expected = every_target(case, search_options)[:3]
    found = search_guided(case.logits, search_options, case.guidance)
    assert [(one.token_ids, one.finish_reason) for one in found] == [
        (one.token_ids, one.reason) for one in expected
    ]
    assert [one.score for one in found] == pytest.approx([one.score for one in expected], abs=1e-5)


@settings(max_examples=40, deadline=None)
@given(case=cases(), length_penalty=st.sampled_from([0.0, 1.0, 2.0]))
def test_one_beam_is_greedy_search_under_the_same_guidance(case: Case, length_penalty: float) -> None:
    target, total, reason = case.guidance.prefix, 0.0, FinishReason.LENGTH
    while len(target) < case.max_target_tokens:
        log_probs = guided_log_probs(case.logits(target), case.guidance, target)
        token_id = int(log_probs.argmax())
        if log_probs[token_id] == -math.inf:
            reason = FinishReason.FORBIDDEN
            break
        total += float(log_probs[token_id])
        if token_id == EOS_ID:
            reason = FinishReason.EOS
            break
        target = (*target, token_id)
    search_options = options(1, max_target_tokens=case.max_target_tokens, length_penalty=length_penalty)
    (found,) = search_guided(case.logits, search_options, case.guidance)
    assert (found.token_ids, found.finish_reason) == (target, reason)
    num_decoded = len(target) + (reason is FinishReason.EOS)
    assert found.sum_log_probs == pytest.approx(total, abs=1e-5)
    assert found.score == pytest.approx(score_of(total, num_decoded, search_options), abs=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    case=cases(max_tokens=6),
    beam_size=st.integers(1, 5),
    length_penalty=st.sampled_from([0.0, 1.0]),
    patience=st.sampled_from([1.0, 2.0]),
)
def test_whatever_a_narrow_beam_finds_keeps_every_rule_and_is_scored_by_the_definitions(
    case: Case, beam_size: int, length_penalty: float, patience: float
) -> None:
    search_options = options(
        beam_size,
        num_hypotheses=beam_size,
        max_target_tokens=case.max_target_tokens,
        length_penalty=length_penalty,
        patience=patience,
    )
    found = search_guided(case.logits, search_options, case.guidance)
    assert found
    assert len({(one.token_ids, one.finish_reason) for one in found}) == len(found)
    num_forced = len(case.guidance.prefix)
    for one in found:
        assert one.token_ids[:num_forced] == case.guidance.prefix
        total = guided_sum(case.logits, case.guidance, one)  # -inf if it broke a rule anywhere
        assert one.score == pytest.approx(score_of(total, one.num_decoded, search_options), abs=1e-5)
        assert (len(one.token_ids) == case.max_target_tokens) == (one.finish_reason is FinishReason.LENGTH)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    vocabulary_size=st.integers(2, 5),
    max_target_tokens=st.integers(1, 6),
    beam_size=st.integers(1, 5),
    length_penalty=st.sampled_from([0.0, 1.0, 2.0]),
    patience=st.sampled_from([1.0, 2.0]),
)
def test_a_search_that_is_asked_for_nothing_is_plain_beam_search_to_the_last_bit(
    seed: int,
    vocabulary_size: int,
    max_target_tokens: int,
    beam_size: int,
    length_penalty: float,
    patience: float,
) -> None:
    logits = random_logits(vocabulary_size, seed)
    search_options = options(
        beam_size,
        num_hypotheses=beam_size,
        max_target_tokens=max_target_tokens,
        length_penalty=length_penalty,
        patience=patience,
    )
    plain = search_beams(lambda target: log_softmax(logits(target)), search_options)
    assert search_guided(logits, search_options, Guidance()) == plain


def test_a_prefix_costs_nothing_and_counts_in_the_length() -> None:
    logits = random_logits(5, seed=3)
    guidance = Guidance(prefix=(4, 4, 1))
    (found,) = search_guided(logits, options(3, max_target_tokens=8), guidance)
    assert found.token_ids[:3] == (4, 4, 1)
    behind = [*found.token_ids[3:], *([EOS_ID] if found.finish_reason is FinishReason.EOS else [])]
    steps = [float(log_softmax(logits((4, 4, 1, *behind[:at])))[token]) for at, token in enumerate(behind)]
    assert found.score == pytest.approx(math.fsum(steps) / (3 + len(steps)))


def test_behind_a_prefix_there_is_one_possible_beam_and_every_beam_holds_the_prefix() -> None:
    search = GuidedBeamSearch(eos_id=EOS_ID, options=options(3), guidance=Guidance(prefix=(4, 2)))
    nonsense = [1, EOS_ID, 3, 3, EOS_ID, 1], [2, 0, 1, 1, 0, 2], [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]
    for num_decoded, last_id in ((1, 4), (2, 2)):
        assert search.adjustments() == [[], [], []]
        assert not search.advance(*nonsense)
        assert search.num_decoded == num_decoded
        assert search.last_ids == [last_id] * 3
        assert search.parents == [0, 1, 2]
        assert search.scores == [0.0, -math.inf, -math.inf]


def test_the_prefix_counts_for_rules_about_the_target_so_far() -> None:
    guidance = Guidance(prefix=(4, 2, 4), no_repeat_ngram_size=2, repetition_penalty=2.0, min_target_tokens=6)
    search = GuidedBeamSearch(eos_id=EOS_ID, options=options(1, max_target_tokens=9), guidance=guidance)
    for _ in guidance.prefix:
        search.adjustments()
        search.advance([1, 3], [0, 0], [-1.0, -2.0])
    (changes,) = search.adjustments()
    assert sorted(changes) == [(0, 1.0, -1e9), (2, 1.0, -1e9), (4, 2.0, 0.0)]


@pytest.mark.parametrize("beam_size", [1, 2, 4])
@pytest.mark.parametrize(("prefix", "num_more"), [((), 0), ((), 2), ((3, 3), 0), ((2,), 1)])
def test_when_nothing_may_follow_the_answer_is_what_there_is_so_far_and_says_so(
    beam_size: int, prefix: Prefix, num_more: int
) -> None:
    """Each token may come once, and only so many are not forbidden altogether."""
    words = [word for word in range(1, 5) if word not in prefix]
    guidance = Guidance(
        min_target_tokens=9,
        no_repeat_ngram_size=1,
        prefix=prefix,
        forbidden=tuple((word,) for word in words[num_more:]),
    )
    logits = random_logits(5, seed=5)
    (found,) = search_guided(logits, options(beam_size, max_target_tokens=8), guidance)
    assert found.finish_reason is FinishReason.FORBIDDEN
    assert found.token_ids[: len(prefix)] == prefix
    assert sorted(found.token_ids[len(prefix) :]) == words[:num_more]
    assert found.num_decoded == len(prefix) + num_more
    assert found.sum_log_probs == pytest.approx(guided_sum(logits, guidance, found))


def test_hypotheses_finished_before_nothing_more_may_follow_are_the_answer() -> None:
    guidance = Guidance(forbidden=((1,), (2,)))
    logits = random_logits(3, seed=1)
    (found,) = search_guided(logits, options(2, num_hypotheses=2), guidance)
    assert (found.token_ids, found.finish_reason) == ((), FinishReason.EOS)
    assert found.score == pytest.approx(0.0)


def test_a_beam_that_is_stuck_does_not_end_the_others() -> None:
    """Behind token 1 nothing may follow; behind 2 everything may, at a lower score."""
    logits = np.array([-9.0, 3.0, 1.0, -9.0, -9.0])
    guidance = Guidance(min_target_tokens=4, forbidden=tuple((1, word) for word in range(1, 5)))
    (found,) = search_guided(lambda _: logits, options(2, max_target_tokens=3), guidance)
    assert found.finish_reason is FinishReason.LENGTH
    assert found.token_ids[:1] == (2,)


def recognisable(target: Prefix) -> Float32Array:
    """The attention of the step after a target, which no other step has."""
    return np.random.default_rng([77, len(target), *target]).random(3, dtype=np.float32)


@settings(max_examples=40, deadline=None)
@given(case=cases(max_tokens=6), beam_size=st.integers(1, 5), patience=st.sampled_from([1.0, 2.0]))
def test_each_token_keeps_the_attention_of_the_step_that_chose_it_whatever_its_beam_was_before(
    case: Case, beam_size: int, patience: float
) -> None:
    search_options = options(
        beam_size,
        num_hypotheses=beam_size,
        max_target_tokens=case.max_target_tokens,
        patience=patience,
    )
    guidance = dataclasses.replace(case.guidance, keeps_attention=True)
    found = search_guided(case.logits, search_options, guidance, attention=recognisable)
    assert found == search_guided(case.logits, search_options, case.guidance)
    assume(any(one.token_ids for one in found))
    for one in found:
        expected = [recognisable(one.token_ids[:at]) for at in range(len(one.token_ids))]
        if expected:
            assert one.attention is not None
            assert one.attention.dtype == np.float32
            assert one.attention.tolist() == np.stack(expected).tolist()


def test_attention_is_kept_only_for_who_asks() -> None:
    found = search_guided(
        random_logits(4, seed=2), options(3, num_hypotheses=3), Guidance(), attention=recognisable
    )
    assert [one.attention for one in found] == [None] * len(found)
