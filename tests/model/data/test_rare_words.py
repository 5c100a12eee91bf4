"""Texts chosen for their words: which words are wanted, and what is taken for them."""

from __future__ import annotations

from random import Random

import pytest

from model.data.rare_words import RareWords, count_words


def test_words_are_letters_with_hyphens_and_apostrophes_between_them() -> None:
    counts = count_words(["O guarda-chuva d'água, o guarda-chuva!", "x2 foo_bar 'quoted' coração -lado-"])
    assert counts["guarda-chuva"] == 2
    assert counts["d'água"] == 1
    assert {"quoted", "coração", "lado", "foo", "bar"} <= set(counts)


def test_wanted_are_frequent_words_that_other_text_lacks() -> None:
    counts = {
        "otter": 7,
        "parrot": 9,
        "common": 90,
        "once": 1,
        "NATO": 8,
        "ls": 8,
        "camelCase": 8,
        "Paris": 7,
    }
    wanted = RareWords(10, known_fewer_than=3).words(counts, {"common": 3, "parrot": 2})
    assert wanted == ["parrot", "Paris", "otter"]
    assert RareWords(2, known_fewer_than=3).words(counts, {"common": 3}) == ["parrot", "Paris"]


def test_a_word_gets_so_many_texts_and_one_text_serves_all_its_words() -> None:
    texts = [f"the otter number {['one', 'two', 'three', 'four', 'five', 'six'][n]} swims" for n in range(6)]
    chosen = RareWords(5, texts_each=2).texts(["otter", "swims"], texts)
    assert len(chosen) == len(set(chosen)) == 2
    assert set(chosen) <= set(texts)


def test_of_a_long_text_the_part_around_the_word_is_taken() -> None:
    words = [f"{letter}aaa" for letter in "bcdfghjklmnpqrst"]
    text = " ".join([*words[:8], "otter,", *words[8:]])
    (part,) = RareWords(5, longest=13).texts(["otter"], [text])
    assert part == " ".join([*words[4:8], "otter,", *words[8:12]])
    assert RareWords(5, longest=20).texts(["otter"], [text]) == [text]
    (at_the_start,) = RareWords(5).texts(["baaa"], [text])
    assert at_the_start == " ".join(words[:5])


@pytest.mark.parametrize(
    "text",
    [
        "otter = 7; x[3] := {2, 4} # 99",
        "otter " + "o" * 120,
        "the others",
        "",
        "ottering",
        "12 otter 34 56 78 90 11",
    ],
)
def test_what_is_no_prose_or_lacks_the_word_is_not_taken(text: str) -> None:
    assert RareWords(5).texts(["otter"], [text]) == []


def test_the_same_texts_come_whatever_their_order_and_others_for_another_seed() -> None:
    texts = [
        f"an otter and a {first}{second}" for first in "bcdfg" for second in ("ear", "ull", "arn", "ock")
    ]
    words = ["otter", "bear", "gull"]
    chosen = RareWords(5).texts(words, texts)
    shuffled = texts * 2
    Random(3).shuffle(shuffled)
    assert RareWords(5).texts(words, shuffled) == chosen
    assert RareWords(5, seed=2).texts(words, texts) != chosen
    for word in words:
        assert any(word in text for text in chosen)


def test_every_word_between_two_spaces_can_be_found_and_a_long_line_takes_no_longer_than_its_length() -> None:
    assert RareWords(5).texts(["otter"], ["the parrot/otter sleeps", "x"]) == ["the parrot/otter sleeps"]
    line = " ".join(["otter swims"] * 20_000)
    assert 0 < len(RareWords(5).texts(["otter"], [line])) <= 2


def test_a_known_word_is_known_at_the_beginning_of_a_sentence_too() -> None:
    counts = {"Click": 9, "Otter": 9}
    assert RareWords(5).words(counts, {"click": 10}) == ["Otter"]


def test_scripts_without_upper_case_have_words_too() -> None:
    assert set(RareWords(5).words({"переводчик": 3, "翻訳機械": 3, "مترجمون": 3}, {})) == {
        "переводчик",
        "翻訳機械",
        "مترجمون",
    }
