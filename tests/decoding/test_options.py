from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.decoding.options import MAX_FORBIDDEN_CHARACTERS, MAX_FORBIDDEN_PHRASES, DecodingOptions
from app.errors import InvalidOption

ratios = st.floats(0.1, 10.0)
tokens = st.integers(1, 600)


@st.composite
def lengths(draw: st.DrawFn) -> dict[str, Any]:
    wanted: dict[str, Any] = {}
    if draw(st.booleans()):
        wanted["max_target_tokens"] = draw(tokens)
    if draw(st.booleans()):
        wanted["max_target_ratio"] = draw(ratios)
    if draw(st.booleans()):
        wanted["min_target_tokens"] = draw(st.integers(0, wanted.get("max_target_tokens", 600)))
    if draw(st.booleans()):
        wanted["min_target_ratio"] = draw(st.floats(0.0, wanted.get("max_target_ratio", 10.0)))
    return wanted


@given(wanted=lengths(), num_source_tokens=st.integers(1, 128), default_ratio=ratios, model_limit=tokens)
def test_of_clashing_bounds_the_model_s_comes_first_then_the_named_most_then_the_least(
    wanted: dict[str, Any], num_source_tokens: int, default_ratio: float, model_limit: int
) -> None:
    bounds = DecodingOptions(**wanted).target_bounds(
        num_source_tokens, default_ratio=default_ratio, model_limit=model_limit
    )
    least = max(
        wanted.get("min_target_tokens", 0), math.ceil(wanted.get("min_target_ratio", 0.0) * num_source_tokens)
    )
    named = [
        model_limit,
        wanted.get("max_target_tokens", math.inf),
        math.ceil(wanted.get("max_target_ratio", math.inf) * num_source_tokens)
        if "max_target_ratio" in wanted
        else math.inf,
    ]
    default = math.ceil(default_ratio * num_source_tokens)
    assert 1 <= bounds.max_tokens <= min(named)
    assert bounds.min_tokens == min(least, *named)
    if "max_target_ratio" in wanted or least >= default_ratio * num_source_tokens:
        assert bounds.max_tokens == min(named) or bounds.max_tokens == least + default
    if not least:
        ratio_limit = named[2] if "max_target_ratio" in wanted else default
        assert bounds == (0, min(ratio_limit, *named[:2]))


def test_a_least_length_raises_the_bundle_s_default_but_not_what_the_request_names() -> None:
    def bounds(**options: Any) -> tuple[int, int]:
        return DecodingOptions(**options).target_bounds(10, default_ratio=2.0, model_limit=50)

    assert bounds() == (0, 20)
    assert bounds(min_target_tokens=25) == (25, 45)
    assert bounds(min_target_ratio=3.0) == (30, 50)
    assert bounds(min_target_tokens=30, max_target_tokens=40) == (30, 40)
    assert bounds(min_target_tokens=30, max_target_ratio=2.5) == (25, 25)
    assert bounds(min_target_ratio=3.0, max_target_tokens=24) == (24, 24)
    assert bounds(min_target_ratio=9.0) == (50, 50)
    assert bounds(min_target_tokens=5, max_target_ratio=3.0) == (5, 30)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"min_target_tokens": 9, "max_target_tokens": 8}, ["9", "8", "Lower one"]),
        ({"min_target_ratio": 1.5, "max_target_ratio": 1.25}, ["1.5", "1.25", "Lower one"]),
        ({"min_target_tokens": -1}, ["-1", "0 (none) and 4096"]),
        ({"min_target_tokens": 4097}, ["4097", "4096"]),
        ({"min_target_ratio": -0.5}, ["-0.5", "between 0 (none) and 10"]),
        ({"min_target_ratio": 10.5}, ["10.5", "10"]),
        ({"no_repeat_ngram_size": -1}, ["-1", "between 0 (off) and 64"]),
        ({"no_repeat_ngram_size": 10**30}, ["64"]),
        ({"repetition_penalty": 0.5}, ["0.5", "between 1 (off) and 10"]),
        ({"repetition_penalty": 1e300}, ["10"]),
        ({"forbidden": ("word",) * 101}, ["101", "100"]),
    ],
)
def test_what_no_decoder_can_honour_is_refused_with_value_limit_and_remedy(
    options: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(InvalidOption) as caught:
        DecodingOptions(**options)
    for part in [*options, *parts]:
        assert part in caught.value.message


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "name",
    ["min_target_ratio", "max_target_ratio", "repetition_penalty", "length_penalty", "patience"],
)
def test_no_number_that_is_none_passes(name: str, value: float) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(InvalidOption, match=name):
        DecodingOptions(**options)


@pytest.mark.parametrize(
    ("phrase", "reason"),
    [
        ("", "blank"),
        (" \u00a0\t", "blank"),
        ("secret\x00", "control character"),
        ("sec\nret", "control character"),
        ("secret\x85word", "control character"),
        ("secret\ud800", "surrogate"),
        ("secret" * 20, "120 characters, the limit is 100"),
    ],
)
def test_an_unusable_phrase_is_refused_by_its_index_and_without_its_text(phrase: str, reason: str) -> None:
    with pytest.raises(InvalidOption, match=reason) as caught:
        DecodingOptions(forbidden=("fine", phrase))
    assert caught.value.message.startswith("forbidden[1] ")
    assert "secret" not in caught.value.message


def test_as_many_and_as_long_phrases_as_the_limits_say_pass() -> None:
    phrases = ("é" * MAX_FORBIDDEN_CHARACTERS,) * MAX_FORBIDDEN_PHRASES
    assert DecodingOptions(forbidden=phrases).forbidden == phrases


GUIDING: list[dict[str, Any]] = [
    {"min_target_tokens": 1},
    {"min_target_ratio": 0.1},
    {"no_repeat_ngram_size": 1},
    {"repetition_penalty": 1.01},
    {"forbidden": ("a",)},
    {"alignment": True},
]


@pytest.mark.parametrize("options", GUIDING, ids=lambda options: next(iter(options)))
def test_each_guiding_option_is_told_from_the_others(options: dict[str, Any]) -> None:
    assert DecodingOptions(**options).guides


def test_no_other_option_guides() -> None:
    others = DecodingOptions(
        max_target_tokens=4,
        max_target_ratio=1.0,
        beam_size=4,
        num_hypotheses=2,
        length_penalty=0.5,
        patience=2.0,
    )
    assert not others.guides
    changed = {field.name for field in dataclasses.fields(others)} - {"normalisation"}
    changed -= {name for options in GUIDING for name in options}
    assert all(getattr(others, name) != getattr(DecodingOptions(), name) for name in changed)
