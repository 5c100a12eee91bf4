from __future__ import annotations

import unicodedata

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from app.errors import InvalidOption
from app.text import Tokenizer, wrap

PIECES = (
    *"abIé.,;:!?()“”—-… \t\n\u00a0\u3000、。漢字かなقया1234",
    *(
        "e\u0301\u0302",
        "👨\u200d👩\u200d👧",
        "👍🏽",
        "🇵🇹🇧🇷",
        "word ",
        "another, ",
        "clause; ",
        "\r\n",
        "\ud83d\ude00",
    ),
)
messy_text = st.lists(st.sampled_from(PIECES), max_size=200).map("".join)


def count_characters(text: str) -> int:
    """One token a character and one for EOS: the densest vocabulary."""
    return len(text) + 1


@settings(max_examples=300, deadline=None)
@given(text=st.one_of(messy_text, st.text(max_size=200)), max_tokens=st.integers(2, 40))
def test_pieces_fit_and_join_to_the_segment(text: str, max_tokens: int) -> None:
    parts = wrap(text, max_tokens=max_tokens, count_tokens=count_characters)
    assert parts.join(parts.segments) == text
    assert all(count_characters(piece) <= max_tokens for piece in parts.segments)
    if count_characters(text) > max_tokens:
        assert all(any(map(str.isalpha, piece)) for piece in parts.segments)
        assert not any(any(map(str.isalpha, gap)) for gap in parts.gaps)


@settings(max_examples=100, deadline=None)
@given(text=messy_text.filter(str.isprintable), max_tokens=st.integers(8, 40))
def test_pieces_fit_as_the_tokenizer_counts_them(
    byte_tokenizer: Tokenizer, text: str, max_tokens: int
) -> None:
    parts = wrap(text, max_tokens=max_tokens, count_tokens=byte_tokenizer.count)
    assert parts.join(parts.segments) == text
    assert all(len(ids) <= max_tokens for ids in byte_tokenizer.encode_sources(parts.segments))


@settings(max_examples=200, deadline=None)
@given(
    words=st.lists(
        st.sampled_from(["a", "be", "word", "longer", "clause;", "comma,", "x" * 30]), min_size=25
    ),
    separator=st.sampled_from([" ", ""]),
    max_tokens=st.integers(30, 60),
)
def test_no_piece_is_a_small_rest(words: list[str], separator: str, max_tokens: int) -> None:
    text = separator.join(words)
    assume(count_characters(text) > max_tokens)
    parts = wrap(text, max_tokens=max_tokens, count_tokens=count_characters)
    assert min(map(count_characters, parts.segments)) >= 0.3 * max_tokens


def test_a_segment_that_fits_is_returned_as_it_is() -> None:
    parts = wrap("  short; enough ", max_tokens=17, count_tokens=count_characters)
    assert parts.segments == ("  short; enough ",)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        (
            "We went out to the lake; it was late, but still warm there.",
            ("We went out to the lake;", "it was late, but still warm there."),
        ),
        (
            "We went out to the big lake, it was late but still warm out.",
            ("We went out to the big lake,", "it was late but still warm out."),
        ),
        (
            "we went out to the big lake and it was late but still warm out",
            ("we went out to the big lake and", "it was late but still warm out"),
        ),
        ("x" * 60, ("x" * 30, "x" * 30)),
        ("日" * 28 + "、" + "本" * 31, ("日" * 28 + "、", "本" * 31)),
    ],
    ids=["clause mark", "comma", "white space", "one word", "full-width comma"],
)
def test_the_best_border_near_the_middle_is_taken(text: str, pieces: tuple[str, ...]) -> None:
    assert wrap(text, max_tokens=45, count_tokens=count_characters).segments == pieces


def test_a_comma_far_from_the_middle_is_not_taken() -> None:
    text = "oh, " + "word " * 20
    pieces = wrap(text, max_tokens=70, count_tokens=count_characters).segments
    assert len(pieces) == 2
    assert min(map(len, pieces)) > 35


@pytest.mark.parametrize(
    "cluster", ["e\u0301\u0302", "👨\u200d👩\u200d👧a", "👍🏽a", "किa", "한", "🇵🇹🇧🇷a", "❤\ufe0fa"]
)
def test_a_hard_cut_parts_no_grapheme_cluster(cluster: str) -> None:
    text = unicodedata.normalize("NFD", cluster) * 50
    parts = wrap(text, max_tokens=20, count_tokens=count_characters)
    assert len(parts.segments) > 1
    for piece in parts.segments:
        assert unicodedata.combining(piece[0]) == 0
        assert piece[0] not in "\u200d\ufe0f🏽"
        assert piece[-1] != "\u200d"
        assert sum("\U0001f1e6" <= c <= "\U0001f1ff" for c in piece) % 2 == 0
        assert not "\u1160" <= piece[0] <= "\u11ff"


def test_a_cluster_longer_than_the_limit_is_parted_rather_than_refused() -> None:
    text = "e" + "\u0301" * 500
    parts = wrap(text, max_tokens=20, count_tokens=count_characters)
    assert parts.join(parts.segments) == text
    assert all(count_characters(piece) <= 20 for piece in parts.segments)


def test_a_character_that_cannot_fit_is_an_error_that_names_the_limit() -> None:
    with pytest.raises(InvalidOption, match=r"max_tokens 3 .* needs 5 tokens") as raised:
        wrap("qqq", max_tokens=3, count_tokens=lambda text: 4 * len(text) + 1)
    assert "qqq" not in raised.value.message


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(InvalidOption, match="max_tokens is 0"):
        wrap("a", max_tokens=0, count_tokens=count_characters)


@pytest.mark.parametrize(
    "unit", ["x", "a ", "word, and more; ", "e\u0301", "🇵🇹", "q9" * 500 + " the" * 500], ids=ascii
)
def test_the_characters_counted_grow_linearly(unit: str) -> None:
    def characters_counted(length: int) -> int:
        counted = 0

        def count(text: str) -> int:
            nonlocal counted
            counted += len(text)
            return count_characters(text)

        wrap((unit * length)[:length], max_tokens=64, count_tokens=count)
        return counted

    assert characters_counted(32_000) <= 6 * 32_000
    assert characters_counted(64_000) <= 2.2 * characters_counted(32_000)
