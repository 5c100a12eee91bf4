from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.decoding.greedy import GreedySearch
from app.decoding.hypothesis import FinishReason, Hypothesis
from app.decoding.options import MAX_TARGET_TOKENS_LIMIT, DecodingOptions
from app.errors import InvalidOption

EOS_ID = 3


@given(
    tokens=st.lists(st.tuples(st.integers(0, 9), st.floats(-20, 0)), min_size=12, max_size=12),
    limit=st.integers(1, 10),
)
def test_a_search_takes_tokens_until_the_end_or_its_limit(
    tokens: list[tuple[int, float]], limit: int
) -> None:
    search = GreedySearch(eos_id=EOS_ID, max_target_tokens=limit)
    taken: list[tuple[int, float]] = []
    for token_id, log_prob in tokens:
        assert search.num_decoded == len(taken)
        assert search.last_id == (taken[-1][0] if taken else EOS_ID)
        taken.append((token_id, log_prob))
        if search.advance(token_id, log_prob):
            break
    ids = [token_id for token_id, _ in taken]
    hypothesis = search.hypotheses()[0]
    ended = ids[-1] == EOS_ID
    assert EOS_ID not in ids[:-1]
    assert len(ids) <= limit
    assert ended or len(ids) == limit
    assert hypothesis.token_ids == tuple(ids[:-1] if ended else ids)
    assert hypothesis.finish_reason is (FinishReason.EOS if ended else FinishReason.LENGTH)
    assert hypothesis.num_decoded == len(taken)
    assert math.isclose(hypothesis.score * len(taken), sum(p for _, p in taken), abs_tol=1e-9)


def test_an_end_of_sentence_at_the_very_limit_is_an_end() -> None:
    search = GreedySearch(eos_id=EOS_ID, max_target_tokens=2)
    assert not search.advance(5, -1.0)
    assert search.advance(EOS_ID, -1.0)
    assert search.hypotheses()[0].finish_reason is FinishReason.EOS


def test_an_unfinished_search_has_no_hypothesis() -> None:
    with pytest.raises(RuntimeError, match="not finished"):
        GreedySearch(eos_id=EOS_ID, max_target_tokens=2).hypotheses()


def test_an_empty_translation_has_the_score_of_its_end() -> None:
    assert Hypothesis((), -0.5, FinishReason.EOS).score == -0.5


@pytest.mark.parametrize("tokens", [0, -1, MAX_TARGET_TOKENS_LIMIT + 1])
def test_a_limit_no_decoder_can_honour_is_refused(tokens: int) -> None:
    with pytest.raises(InvalidOption, match=str(tokens)):
        DecodingOptions(max_target_tokens=tokens)


@pytest.mark.parametrize("ratio", [0.0, -1.0, 0.09, 10.1, math.nan, math.inf])
def test_a_ratio_no_decoder_can_honour_is_refused(ratio: float) -> None:
    with pytest.raises(InvalidOption, match="between 0.1 and 10"):  # noqa: RUF043
        DecodingOptions(max_target_ratio=ratio)


@given(
    num_source_tokens=st.integers(1, 500),
    tokens=st.none() | st.integers(1, MAX_TARGET_TOKENS_LIMIT),
    ratio=st.none() | st.floats(0.1, 10),
    default_ratio=st.floats(0.1, 10),
    model_limit=st.integers(1, 500),
)
def test_a_segment_may_take_no_more_than_any_limit_and_at_least_one_token(
    num_source_tokens: int, tokens: int | None, ratio: float | None, default_ratio: float, model_limit: int
) -> None:
    options = DecodingOptions(max_target_tokens=tokens, max_target_ratio=ratio)
    limit = options.target_limit(num_source_tokens, default_ratio=default_ratio, model_limit=model_limit)
    by_ratio = math.ceil((default_ratio if ratio is None else ratio) * num_source_tokens)
    assert limit == min(by_ratio, model_limit, *([] if tokens is None else [tokens]))
    assert limit >= 1
