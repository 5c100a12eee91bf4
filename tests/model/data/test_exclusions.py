"""Sentences that must not be trained on are found in whatever spelling, alone or inside a longer text."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from model.data.exclusions import Exclusions, held_out, sentence_key

LONG = "The ships came back to the harbour before the storm began."


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("It’s “so” – isn't it?", "it s so, isn t it"),
        ("ＡＢＣ  ﬁne…", "abc fine"),
        ("Straße", "STRASSE"),
        ("cafe\u0301", "café"),
        ("a\u00a0b\u200bc", "a b c"),
        ("snake_case", "snake case"),
        ("हिन्दी, भाषा", "हिन्दी भाषा"),
    ],
)
def test_spellings_of_one_sentence_have_one_key(one: str, other: str) -> None:
    assert sentence_key(one) == sentence_key(other)


@pytest.mark.parametrize(("one", "other"), [("a b", "ab"), ("हिन्दी", "हन्दी"), ("का", "क"), ("1.5", "15")])
def test_other_sentences_have_other_keys(one: str, other: str) -> None:
    assert sentence_key(one) != sentence_key(other)


@given(st.text())
@example("\u0345\u0301")
@example("ǰ\u0345")
def test_a_key_is_its_own_key(text: str) -> None:
    assert sentence_key(sentence_key(text)) == sentence_key(text)


def test_a_long_sentence_is_found_inside_a_longer_text() -> None:
    exclusions = Exclusions([LONG])
    assert exclusions.holds(f"Look! {LONG.upper()} And then?")
    assert exclusions.holds(f"Look! {LONG}")
    assert not exclusions.holds(LONG.replace("storm", "rain"))
    assert not exclusions.holds(LONG.removesuffix("began.") + "beganning")
    assert not exclusions.holds(LONG.removesuffix(" began."))


def test_a_short_sentence_is_found_only_as_a_whole() -> None:
    exclusions = Exclusions(["It is so."])
    assert exclusions.holds("IT IS SO")
    assert not exclusions.holds("It is so, he said")


def test_lines_without_letters_exclude_nothing() -> None:
    exclusions = Exclusions(["", "---", "..."])
    assert len(exclusions) == 0
    assert not exclusions.holds("...")


def test_files_are_read_line_by_line(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("One thing.\nAnother.\n")
    (tmp_path / "b").write_text("Outra coisa.\n")
    exclusions = Exclusions.from_files([tmp_path / "a", tmp_path / "b"])
    assert len(exclusions) == 3
    assert exclusions.holds("outra coisa")


def test_the_digest_follows_from_the_sentences_alone() -> None:
    assert Exclusions(["a", "B."]).digest() == Exclusions(["b", "A!", "a"]).digest()
    assert Exclusions(["a"]).digest() != Exclusions(["b"]).digest()


def test_held_out_pairs_do_not_depend_on_the_order_and_have_different_sources() -> None:
    pairs = [(f"word {number % 60}", f"palavra {number % 60}") for number in range(100)]
    chosen = list(held_out(pairs, num_pairs=20, seed=3))
    assert len({source for source, _ in chosen}) == 20
    random.Random(1).shuffle(pairs)
    assert list(held_out(pairs, num_pairs=20, seed=3)) == chosen
    assert list(held_out(pairs, num_pairs=20, seed=4)) != chosen
