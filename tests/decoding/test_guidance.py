"""What guidance changes at a step, against each rule's definition tried on every token."""

from __future__ import annotations

import numpy as np
import pytest
from beam_reference import guided_log_probs, is_forbidden, log_softmax, with_adjustments
from hypothesis import given, settings
from hypothesis import strategies as st

from app.decoding.guidance import FORBIDDEN, Adjustment, Guidance, adjustments

EOS_ID = 0
VOCABULARY_SIZE = 5

words = st.integers(1, VOCABULARY_SIZE - 1)
targets = st.lists(words, max_size=9).map(tuple)
guidances = st.builds(
    Guidance,
    min_target_tokens=st.integers(0, 11),
    no_repeat_ngram_size=st.integers(0, 5),
    repetition_penalty=st.sampled_from([1.0, 1.2, 3.0]),
    forbidden=st.lists(st.lists(words, min_size=1, max_size=4).map(tuple), max_size=6).map(tuple),
)


def forbidden_after(guidance: Guidance, *target: int) -> set[int]:
    changes = adjustments(guidance, target, eos_id=EOS_ID)
    return {change.token_id for change in changes if change.addend == FORBIDDEN}


@settings(max_examples=100, deadline=None)
@given(guidance=guidances, target=targets)
def test_exactly_the_tokens_that_break_a_rule_are_forbidden_and_the_other_repeated_ones_penalised(
    guidance: Guidance, target: tuple[int, ...]
) -> None:
    changes = adjustments(guidance, target, eos_id=EOS_ID)
    expected = {
        token_id
        for token_id in range(VOCABULARY_SIZE)
        if is_forbidden(token_id, guidance, target, eos_id=EOS_ID)
    }
    assert {change.token_id for change in changes if change.addend != 0.0} == expected
    penalised = {change.token_id for change in changes if change.divisor != 1.0}
    assert penalised == (set(target) - expected if guidance.repetition_penalty != 1.0 else set())
    assert len({change.token_id for change in changes}) == len(changes) == len(expected | penalised)


@settings(max_examples=50, deadline=None)
@given(
    guidance=guidances,
    target=targets,
    logits=st.lists(st.floats(-20, 20), min_size=VOCABULARY_SIZE, max_size=VOCABULARY_SIZE),
)
def test_the_changed_logits_share_all_probability_among_what_is_allowed(
    guidance: Guidance, target: tuple[int, ...], logits: list[float]
) -> None:
    expected = guided_log_probs(np.array(logits), guidance, target, eos_id=EOS_ID)
    allowed = np.isfinite(expected)
    changes = adjustments(guidance, target, eos_id=EOS_ID)
    found = log_softmax(with_adjustments(np.array(logits), changes))
    if allowed.any():
        assert found[allowed] == pytest.approx(expected[allowed], abs=1e-5)
        assert np.exp(found[~allowed]).sum() == 0.0


@settings(max_examples=20, deadline=None)
@given(target=targets)
def test_who_asks_for_nothing_changes_nothing(target: tuple[int, ...]) -> None:
    assert adjustments(Guidance(), target, eos_id=EOS_ID) == []


def test_the_prefix_and_the_wish_for_attention_change_no_logit() -> None:
    assert adjustments(Guidance(prefix=(3, 4), keeps_attention=True), (3, 4, 2), eos_id=EOS_ID) == []


def test_the_minimum_counts_the_end_of_the_sentence() -> None:
    guidance = Guidance(min_target_tokens=3)
    assert forbidden_after(guidance) == {EOS_ID}
    assert forbidden_after(guidance, 2) == {EOS_ID}
    assert forbidden_after(guidance, 2, 4) == set()  # with end-of-sentence the target has its three


def test_a_forbidden_sequence_costs_only_its_last_token_and_only_right_behind_the_others() -> None:
    guidance = Guidance(forbidden=((3, 4, 2),))
    assert forbidden_after(guidance) == set()
    assert forbidden_after(guidance, 4) == set()
    assert forbidden_after(guidance, 3, 4) == {2}
    assert forbidden_after(guidance, 1, 3, 4) == {2}
    assert forbidden_after(guidance, 3, 4, 1) == set()
    assert forbidden_after(guidance, 3, 1, 4) == set()


def test_a_forbidden_token_is_forbidden_everywhere() -> None:
    guidance = Guidance(forbidden=((3,), (2, 2)))
    assert forbidden_after(guidance) == {3}
    assert forbidden_after(guidance, 2) == {2, 3}


def test_an_ngram_may_come_once_even_where_two_of_them_overlap() -> None:
    assert forbidden_after(Guidance(no_repeat_ngram_size=1), 2, 4) == {2, 4}
    assert forbidden_after(Guidance(no_repeat_ngram_size=2), 2) == set()
    assert forbidden_after(Guidance(no_repeat_ngram_size=2), 2, 2) == {2}
    assert forbidden_after(Guidance(no_repeat_ngram_size=2), 2, 3, 2, 4, 2) == {3, 4}
    assert forbidden_after(Guidance(no_repeat_ngram_size=3), 1, 1, 1) == {1}
    assert forbidden_after(Guidance(no_repeat_ngram_size=3), 1, 2, 3, 4, 1, 2) == {3}


def test_a_token_is_penalised_once_however_often_it_came() -> None:
    changes = adjustments(Guidance(repetition_penalty=1.5), (4, 2, 4, 4), eos_id=EOS_ID)
    assert changes == [Adjustment(2, 1.5, 0.0), Adjustment(4, 1.5, 0.0)]


def test_a_token_that_is_forbidden_is_not_penalised_too() -> None:
    guidance = Guidance(repetition_penalty=1.5, forbidden=((4,),))
    assert adjustments(guidance, (4, 2), eos_id=EOS_ID) == [
        Adjustment(4, 1.0, FORBIDDEN),
        Adjustment(2, 1.5, 0.0),
    ]


def test_what_may_not_follow_the_prefix_may_come_later() -> None:
    guidance = Guidance(prefix=(3, 4), not_after_prefix=frozenset({5, 6}))
    assert adjustments(guidance, (3, 4), eos_id=0) == [
        Adjustment(5, 1.0, FORBIDDEN),
        Adjustment(6, 1.0, FORBIDDEN),
    ]
    assert adjustments(guidance, (3, 4, 7), eos_id=0) == []
