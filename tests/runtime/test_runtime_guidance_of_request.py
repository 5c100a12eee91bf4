from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.decoding.guidance import Guidance
from app.decoding.options import DecodingOptions
from app.errors import InvalidOption, InvalidRequest
from app.runtime.guidance_of_request import TargetPlan, forbidden_spellings, plan_targets, prefix_ids
from app.runtime.preparation import prepare
from app.runtime.request import TranslationRequest
from app.text import Tokenizer

MODEL_LIMIT = 40


def plans_of(
    tokenizer: Tokenizer, *texts: str, prefixes: tuple[str, ...] = (), **options: Any
) -> list[TargetPlan]:
    prepared = [prepare(text, language="en", tokenizer=tokenizer, max_source_tokens=16) for text in texts]
    request = TranslationRequest(texts, "en", "pt", DecodingOptions(**options), target_prefixes=prefixes)
    return plan_targets(request, prepared, tokenizer=tokenizer, default_ratio=2.0, model_limit=MODEL_LIMIT)


def refusal(tokenizer: Tokenizer, *texts: str, prefixes: tuple[str, ...] = (), **options: Any) -> str:
    with pytest.raises(InvalidOption) as caught:
        plans_of(tokenizer, *texts, prefixes=prefixes, **options)
    for said in (*texts, *prefixes, *options.get("forbidden", ())):
        assert not said.strip() or said.strip() not in caught.value.message
    return caught.value.message


def guidance_of(plan: TargetPlan) -> Guidance:
    assert plan.guidance is not None
    return plan.guidance


def test_a_request_that_asks_for_nothing_is_not_guided(tokenizer: Tokenizer) -> None:
    plans = plans_of(tokenizer, "The cat sees. A bird.", " ", "the door", prefixes=("", "", ""), beam_size=3)
    assert [plan.guidance for plan in plans] == [None, None, None]


def test_a_prefix_belongs_to_the_first_segment_of_its_own_text_only(tokenizer: Tokenizer) -> None:
    plans = plans_of(tokenizer, "The cat. A bird.", "A door. The cat.", prefixes=("", "one cat"))
    assert [plan.guidance is not None for plan in plans] == [False, False, True, False]
    assert guidance_of(plans[2]) == Guidance(prefix=prefix_ids("one cat", tokenizer, name="prefix"))


def test_options_hold_for_every_segment_and_bounds_follow_its_length(tokenizer: Tokenizer) -> None:
    plans = plans_of(
        tokenizer,
        "The cat. A small red bird.",
        min_target_ratio=0.5,
        no_repeat_ngram_size=3,
        repetition_penalty=1.5,
        alignment=True,
    )
    for plan, source in zip(plans, ("The cat.", "A small red bird."), strict=True):
        size = len(tokenizer.encode_source(source))
        assert plan.max_target_tokens == min(2 * size, MODEL_LIMIT)
        assert plan.guidance == Guidance(
            min_target_tokens=-(-size // 2),
            no_repeat_ngram_size=3,
            repetition_penalty=1.5,
            keeps_attention=True,
        )


def test_segments_that_are_asked_the_same_share_one_guidance(tokenizer: Tokenizer) -> None:
    plans = plans_of(
        tokenizer, "The cat. A small red bird.", "The cat.", forbidden=("door",), min_target_tokens=3
    )
    assert len(plans) == 3
    assert len({id(plan.guidance) for plan in plans}) == 1
    first, second = plans_of(tokenizer, "The cat. A bird.", prefixes=("one",), forbidden=("door",))
    assert guidance_of(first).prefix == prefix_ids("one", tokenizer, name="prefix")
    assert guidance_of(second).prefix == ()


words = st.sampled_from(["the", "cat", "a", "red", "bird", "ca", "se", "every", "one", "."])


@settings(max_examples=100, deadline=None)
@given(parts=st.lists(words, min_size=1, max_size=6), ends_word=st.booleans())
def test_a_prefix_comes_back_from_its_tokens_byte_for_byte(
    tokenizer: Tokenizer, parts: list[str], ends_word: bool
) -> None:
    prefix = " ".join(parts)
    ids = prefix_ids(prefix + " " * ends_word, tokenizer, name="prefix")
    assert tokenizer.decode(ids) == prefix
    assert tokenizer.eos_id not in ids


@settings(max_examples=200, deadline=None)
@given(prefix=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12))
def test_any_prefix_is_kept_or_refused_without_its_text(tokenizer: Tokenizer, prefix: str) -> None:
    try:
        kept = tokenizer.decode(prefix_ids(prefix, tokenizer, name="it"))
    except InvalidOption as error:
        message = error.message
    else:
        assert kept == prefix.removesuffix(" ")
        return

    def refusal_of(text: str) -> str:
        with pytest.raises(InvalidOption) as caught:
            prefix_ids(text, tokenizer, name="it")
        return caught.value.message

    def without_numbers(text: str) -> str:
        return re.sub(r"\d+", "N", text)

    # The prefix may be " or ", which stands in every message: what is asked is that the text changes nothing.
    assert without_numbers(message) in {without_numbers(refusal_of(other)) for other in (" ", "\u4e00")}


@pytest.mark.parametrize(
    "prefix", [" ", "\n", "\u200b", " cat", "the  cat", "cat  ", "cat\n", "cat\t", "\uff43at", "the\u00a0cat"]
)
def test_a_prefix_the_model_would_write_otherwise_is_refused(tokenizer: Tokenizer, prefix: str) -> None:
    message = refusal(tokenizer, "The cat.", "A bird.", prefixes=("", prefix))
    assert message.startswith("target_prefixes[1] cannot be written")
    assert "or send an empty one" in message


def test_a_prefix_with_unknown_characters_says_how_many(tokenizer: Tokenizer) -> None:
    message = refusal(tokenizer, "The cat.", prefixes=("the 漢字 cat",))
    assert "target_prefixes[0] has 2 characters that the model does not know" in message


def test_a_lone_surrogate_in_a_prefix_is_refused_by_its_place(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match=r"target_prefixes\[0\] holds a lone surrogate"):
        plans_of(tokenizer, "The cat.", prefixes=("a\ud800",))


def test_a_space_at_the_end_forbids_what_would_join_the_last_word_but_not_the_end(
    tokenizer: Tokenizer,
) -> None:
    free, ended = (guidance_of(plans_of(tokenizer, "The cat.", prefixes=(p,))[0]) for p in ("a ca", "a ca "))
    assert free.prefix == ended.prefix
    assert free.forbidden == ()
    joining = ended.not_after_prefix
    assert ended.forbidden == ()
    assert joining is tokenizer.joining_ids, "one set for all prefixes: it may hold thousands"
    for token_id in range(tokenizer.vocabulary_size):
        if token_id == tokenizer.unknown_id or token_id == tokenizer.eos_id:
            continue
        text = tokenizer.decode([*ended.prefix, token_id])
        assert (token_id in joining) == (text != "a ca" and not text.startswith("a ca "))
    assert tokenizer.eos_id not in joining


@pytest.mark.parametrize("text", ["", " \n", "\u00a0"])
def test_a_prefix_for_a_text_without_words_is_refused(tokenizer: Tokenizer, text: str) -> None:
    assert "texts[1] holds nothing to translate" in refusal(tokenizer, "The cat.", text, prefixes=("", "the"))
    assert len(plans_of(tokenizer, "The cat.", text, prefixes=("the", ""))) == 1


def test_a_prefix_must_leave_room_below_the_segments_limit(tokenizer: Tokenizer) -> None:
    size = len(prefix_ids("the cat", tokenizer, name="prefix"))
    message = refusal(tokenizer, "A bird.", prefixes=("the cat",), max_target_tokens=size)
    assert f"has {size} tokens" in message
    assert f"at most {size}, the end included" in message
    (plan,) = plans_of(tokenizer, "A bird.", prefixes=("the cat",), max_target_tokens=size + 1)
    assert plan.max_target_tokens == size + 1


@pytest.mark.parametrize("prefixes", [("a",), ("a", "", "a"), ("",) * 5])
def test_as_many_prefixes_as_texts_are_wanted(prefixes: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequest, match=f"has {len(prefixes)} items and texts has 2"):
        TranslationRequest(("a", "b"), "en", "pt", target_prefixes=prefixes)


def test_a_phrase_is_forbidden_however_it_is_spelled(tokenizer: Tokenizer) -> None:
    (plan,) = plans_of(tokenizer, "The cat.", forbidden=("cat", "red bird"))
    assert set(guidance_of(plan).forbidden) == {
        ids for phrase in ("cat", "red bird") for ids in tokenizer.spellings(phrase, limit=32)
    }


def test_many_phrases_share_one_bound_on_their_spellings(tokenizer: Tokenizer) -> None:
    phrases = tuple(f"the {a} {b}" for a in ("cat", "bird") for b in ("house", "train", "red") * 9)
    assert len(phrases) == 54
    spellings = forbidden_spellings(phrases, tokenizer)
    assert all(spellings)
    assert sum(map(len, spellings)) <= 1000
    for phrase, found in zip(phrases, spellings, strict=True):
        assert [*found[0], tokenizer.eos_id] == tokenizer.encode_source(phrase)


@pytest.mark.parametrize(
    ("phrase", "reason"), [("\u200b", "no character that the model writes"), ("a漢字", "has 2 characters")]
)
def test_a_phrase_the_model_cannot_write_is_refused_by_its_index(
    tokenizer: Tokenizer, phrase: str, reason: str
) -> None:
    message = refusal(tokenizer, "The cat.", forbidden=("cat", phrase))
    assert message.startswith("forbidden[1] ")
    assert reason in message
    assert "leave it out" in message


def test_a_prefix_that_contains_a_forbidden_phrase_contradicts_it(tokenizer: Tokenizer) -> None:
    message = refusal(tokenizer, "A bird.", prefixes=("the cat sees",), forbidden=("door", "cat"))
    assert "target_prefixes[0] contains forbidden[1]" in message
