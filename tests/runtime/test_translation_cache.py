"""What the cache keeps, for which key, in how many bytes, and what it lets go."""

from __future__ import annotations

import dataclasses
import gc
import random
import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.decoding.guidance import Guidance
from app.decoding.hypothesis import FinishReason, Hypothesis, LengthNormalisation
from app.decoding.options import DecodingOptions
from app.runtime.guidance_of_request import TargetPlan
from app.runtime.translation_cache import CacheLookup, Hypotheses, TranslationCache

MODEL = "en-pt"
SOURCE = (5, 70_000, 3, 0)


def hypothesis_of(
    number: int, *, num_tokens: int = 8, finish_reason: FinishReason = FinishReason.EOS
) -> Hypothesis:
    draw = random.Random(number)
    ids = tuple(draw.randrange(1 << 20) for _ in range(num_tokens))
    return Hypothesis(ids, -draw.random() * 10, finish_reason)


def key_of(
    cache: TranslationCache,
    source_ids: Sequence[int] = SOURCE,
    *,
    model: str = MODEL,
    options: DecodingOptions | None = None,
    plan: TargetPlan | None = None,
) -> bytes:
    key = cache.keys(model, options or DecodingOptions()).key(source_ids, plan or TargetPlan(20))
    assert key is not None
    return key


def put(cache: TranslationCache, number: int, num_tokens: int = 8) -> bytes:
    key = key_of(cache, (number, 0))
    cache.keep(key, (hypothesis_of(number, num_tokens=num_tokens),))
    return key


def found(cache: TranslationCache, number: int) -> Hypotheses | None:
    return cache.find(key_of(cache, (number, 0)), model=MODEL)


BASE_OPTIONS = DecodingOptions(beam_size=4, max_target_tokens=60)
OTHER_OPTIONS = {
    "max_target_tokens": 61,
    "max_target_ratio": 2.5,
    "min_target_tokens": 1,
    "min_target_ratio": 0.1,
    "beam_size": 5,
    "num_hypotheses": 2,
    "length_penalty": 0.9999999999999999,
    "normalisation": LengthNormalisation.GNMT,
    "patience": 1.5,
    "no_repeat_ngram_size": 3,
    "repetition_penalty": 1.2,
    "forbidden": ("word",),
}
BASE_GUIDANCE = Guidance(forbidden=((1, 2),), prefix=(9,))
OTHER_GUIDANCE = {
    "min_target_tokens": 2,
    "no_repeat_ngram_size": 2,
    "repetition_penalty": 1.1,
    "forbidden": ((1,), (2,)),
    "prefix": (9, 9),
    "not_after_prefix": frozenset({4}),
}


@pytest.mark.parametrize(
    "field", [field.name for field in dataclasses.fields(DecodingOptions) if field.name != "alignment"]
)
def test_another_value_of_any_option_is_another_key(field: str) -> None:
    cache = TranslationCache(10_000)
    options = dataclasses.replace(BASE_OPTIONS, **{field: OTHER_OPTIONS[field]})
    assert key_of(cache, options=options) != key_of(cache, options=BASE_OPTIONS)


@pytest.mark.parametrize(
    "field", [field.name for field in dataclasses.fields(Guidance) if field.name != "keeps_attention"]
)
def test_another_value_of_anything_a_segment_is_held_to_is_another_key(field: str) -> None:
    cache = TranslationCache(10_000)
    guidance = dataclasses.replace(BASE_GUIDANCE, **{field: OTHER_GUIDANCE[field]})
    keys = cache.keys(MODEL, BASE_OPTIONS)
    assert keys.key(SOURCE, TargetPlan(20, guidance)) != keys.key(SOURCE, TargetPlan(20, BASE_GUIDANCE))


def test_a_plan_has_no_more_than_a_limit_and_guidance() -> None:
    cache = TranslationCache(10_000)
    assert {field.name for field in dataclasses.fields(TargetPlan)} == {"max_target_tokens", "guidance"}
    assert key_of(cache, plan=TargetPlan(20)) != key_of(cache, plan=TargetPlan(21))
    assert key_of(cache, plan=TargetPlan(20)) != key_of(cache, plan=TargetPlan(20, Guidance()))


def test_model_and_source_are_in_the_key_and_equal_requests_share_it() -> None:
    cache = TranslationCache(10_000)
    key = key_of(cache)
    assert key == key_of(cache, list(SOURCE), options=DecodingOptions(), plan=TargetPlan(20))
    assert key != key_of(cache, model="en-pt2")
    assert key != key_of(cache, SOURCE[1:])
    assert key != key_of(cache, (SOURCE[1], SOURCE[0], *SOURCE[2:]))


def test_equal_guidance_of_two_requests_is_the_same_key() -> None:
    cache = TranslationCache(10_000)
    again = dataclasses.replace(BASE_GUIDANCE)
    assert again is not BASE_GUIDANCE
    assert key_of(cache, plan=TargetPlan(9, again)) == key_of(cache, plan=TargetPlan(9, BASE_GUIDANCE))


def test_guidance_that_dies_lends_its_digest_to_no_other() -> None:
    keys = TranslationCache(10_000).keys(MODEL, DecodingOptions())
    seen = {keys.key(SOURCE, TargetPlan(20, Guidance(prefix=(number,)))) for number in range(200)}
    assert len(seen) == 200


@pytest.mark.parametrize(
    ("options", "plan"),
    [
        (DecodingOptions(alignment=True), TargetPlan(20)),
        (DecodingOptions(), TargetPlan(20, Guidance(keeps_attention=True))),
    ],
)
def test_alignments_have_no_key(options: DecodingOptions, plan: TargetPlan) -> None:
    assert TranslationCache(10_000).keys(MODEL, options).key(SOURCE, plan) is None


def test_a_hypothesis_with_weights_is_not_kept() -> None:
    cache = TranslationCache(10_000)
    key = key_of(cache)
    cache.keep(key, (Hypothesis((1,), -1.0, FinishReason.EOS, attention=np.ones((1, 4), np.float32)),))
    assert cache.num_entries == cache.num_bytes == 0


@given(
    st.lists(
        st.builds(
            Hypothesis,
            token_ids=st.lists(st.integers(0, (1 << 20) - 1), max_size=40).map(tuple),
            sum_log_probs=st.floats(allow_nan=False),
            finish_reason=st.sampled_from(FinishReason),
            length_penalty=st.floats(0, 5),
            normalisation=st.sampled_from(LengthNormalisation),
        ),
        min_size=1,
        max_size=4,
    ).map(tuple)
)
def test_hypotheses_come_back_as_they_were_kept(hypotheses: Hypotheses) -> None:
    cache = TranslationCache(100_000)
    key = key_of(cache)
    cache.keep(key, hypotheses)
    again = cache.find(key, model=MODEL)
    assert again == hypotheses
    assert [item.score for item in again] == [item.score for item in hypotheses]
    assert {field.name for field in dataclasses.fields(Hypothesis)} - {"attention"} == {
        "token_ids",
        "sum_log_probs",
        "finish_reason",
        "length_penalty",
        "normalisation",
    }, "a new field must be kept too"


def test_what_is_kept_first_stays() -> None:
    cache = TranslationCache(10_000)
    key = key_of(cache)
    first, second = (hypothesis_of(1),), (hypothesis_of(2),)
    cache.keep(key, first)
    size = cache.num_bytes
    cache.keep(key, second)
    assert cache.find(key, model=MODEL) == first
    cache.keep(key, second)
    assert cache.find(key, model=MODEL) == first
    assert (cache.num_bytes, cache.num_entries) == (size, 1)


def test_size_zero_has_no_keys_and_keeps_nothing() -> None:
    cache = TranslationCache(0)
    assert not cache.enabled
    assert cache.keys(MODEL, DecodingOptions()).key(SOURCE, TargetPlan(20)) is None
    assert cache.find(None, model=MODEL) is None
    cache.keep(None, (hypothesis_of(1),))
    cache.keep(b"key", (hypothesis_of(1),))
    assert cache.num_entries == 0


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        TranslationCache(-1)


def test_what_does_not_fit_alone_is_not_kept_and_drives_nothing_out() -> None:
    cache = TranslationCache(2_000)
    put(cache, 1)
    put(cache, 2, num_tokens=1_000)
    assert found(cache, 1) is not None
    assert found(cache, 2) is None


def test_the_longest_unused_newcomer_goes_first() -> None:
    cache = TranslationCache(100_000)
    put(cache, 0)
    one = cache.num_bytes
    cache = TranslationCache(4 * one)
    for number in range(6):
        put(cache, number)
    assert [found(cache, number) is not None for number in range(6)] == [False, False, True, True, True, True]


def test_a_long_document_does_not_drive_out_what_came_twice() -> None:
    cache = TranslationCache(40_000)
    for number in range(20):
        put(cache, number)
    assert all(found(cache, number) for number in range(20))
    for number in range(1_000, 6_000):
        put(cache, number)
    assert all(found(cache, number) for number in range(20))
    assert cache.num_bytes <= 40_000


def test_what_comes_often_now_drives_out_what_came_often_once() -> None:
    cache = TranslationCache(20_000)
    for number in range(20):
        put(cache, number)
        found(cache, number)
    for number in range(100, 200):
        put(cache, number)
        found(cache, number)
    assert not any(found(cache, number) for number in range(20))
    assert all(found(cache, number) for number in range(190, 200))


@settings(max_examples=40, deadline=None)
@given(
    max_bytes=st.integers(0, 6_000),
    operations=st.lists(
        st.tuples(st.sampled_from(["keep", "find"]), st.integers(0, 25), st.integers(0, 60)),
        max_size=150,
    ),
)
def test_the_bound_holds_and_nothing_wrong_is_found_after_any_operations(
    max_bytes: int, operations: Sequence[tuple[str, int, int]]
) -> None:
    watcher = Watcher()
    cache = TranslationCache(max_bytes, observer=watcher)
    kept: dict[int, Hypotheses] = {}
    for operation, number, num_tokens in operations:
        if not cache.enabled:
            assert cache.keys(MODEL, DecodingOptions()).key((number, 0), TargetPlan(20)) is None
        elif operation == "find":
            assert found(cache, number) in (None, kept.get(number))
        else:
            hypotheses = (hypothesis_of(number, num_tokens=num_tokens),)
            key = key_of(cache, (number, 0))
            if found(cache, number) is None:
                kept[number] = hypotheses
            cache.keep(key, hypotheses)
        assert 0 <= cache.num_bytes <= max_bytes
        assert cache.num_entries <= len(kept)
        if watcher.size is not None:
            assert watcher.size == (cache.num_bytes, cache.num_entries)


class Watcher:
    def __init__(self) -> None:
        self.size: tuple[int, int] | None = None
        self.results: list[tuple[str, CacheLookup]] = []

    def on_cache_lookup(self, model: str, result: CacheLookup) -> None:
        self.results.append((model, result))

    def on_cache_size(self, *, num_bytes: int, num_entries: int) -> None:
        self.size = num_bytes, num_entries


@pytest.mark.parametrize("num_entries", [680, 690, 1_360, 1_370])
@pytest.mark.parametrize("num_hypotheses", [1, 4])
def test_the_bytes_it_counts_are_the_bytes_it_takes(num_entries: int, num_hypotheses: int) -> None:
    """Right before and right after the dictionaries grow, half of the entries protected."""
    draw = np.random.default_rng(1)
    tokens = draw.integers(300, 32_000, size=(num_entries, 30)).tolist()
    keys = TranslationCache(1).keys(MODEL, DecodingOptions())
    gc.collect()
    tracemalloc.start()
    try:
        cache = TranslationCache(1 << 30)
        for index, ids in enumerate(tokens):
            key = keys.key([index, *ids], TargetPlan(20))
            hypotheses = tuple(
                Hypothesis(tuple(ids), -0.1 * index, FinishReason.EOS, length_penalty=0.5 * rank)
                for rank in range(num_hypotheses)
            )
            cache.keep(key, hypotheses)
            if index % 2:
                cache.find(key, model=MODEL)
            del key, hypotheses
        gc.collect()
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert cache.num_entries == num_entries
    # tracemalloc sees what was asked of the allocator, before it rounds up: 4 % less than is taken.
    assert taken <= cache.num_bytes <= 1.25 * taken
