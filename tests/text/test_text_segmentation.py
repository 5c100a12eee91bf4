from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from segmentation_cases import ENGLISH, ENGLISH_UNSEEN, KNOWN_MISSES, PORTUGUESE, PORTUGUESE_UNSEEN

from app.text import SegmentedText, split

LANGUAGES = ("en", "pt-BR", "de", "ja", "ar", "xx", "")

# Characters that decide something, far more often than chance would draw them.
PIECES = (
    *"aIé.!?…,;:()[]{}<>\"'“”«»‘’-–—*•#_1230 \t\n\r\v\f\x00\x1b\x85\u2028\u2029\u00a0\u3000",
    *"。！？、漢字का।؟مИß\u0301\u200b\u200d\u202e\u202c\ufeff\u00ad😀👍🏽🇵\ufffd",
    *("\r\n", "\n\n", " \n ", "...", ". ", "? ", "! ", " :)", "Dr. ", "e.g. ", "U.S. ", "1. ", "- ", "a) "),
    *("Sra. ", "J. K. ", "“Oi.” ", "3.14", "👨\u200d👩\u200d👧", "etc. ", "The ", "no "),
)
messy_text = st.lists(st.sampled_from(PIECES), max_size=40).map("".join)
any_text = st.one_of(st.text(max_size=60), messy_text, st.text(st.characters(categories=["Cs", "Cc", "Cf"])))


# List markers "a) ", "(b) ", "iv) ", "[x] " and the smileys with a letter.
LETTERS_ALLOWED_IN_GAPS = re.compile(r"\(?([A-Za-z]|[ivx]{1,5})\)(?=\s)|\[[xX]\](?=\s)|[:;=]['’]?-?[DPpOo]")


def is_letter(character: str) -> bool:
    return character.isalpha()


@settings(max_examples=400, deadline=None)
@given(text=any_text, language=st.sampled_from(LANGUAGES))
@example(text="A.\u00a0B", language="en")
@example(text="\ud800. A", language="en")
def test_joining_the_segments_gives_back_the_text(text: str, language: str) -> None:
    parts = split(text, language)
    assert parts.join(parts.segments) == text


@settings(max_examples=400, deadline=None)
@given(text=any_text, language=st.sampled_from(LANGUAGES))
def test_every_letter_is_in_a_segment_or_a_list_marker(text: str, language: str) -> None:
    parts = split(text, language)
    for segment in parts.segments:
        assert any(map(is_letter, segment))
        assert segment == segment.strip()
        assert not any(ord(c) < 32 or 127 <= ord(c) < 160 or c in "\u2028\u2029" for c in segment)
    for gap in parts.gaps:
        assert not any(map(is_letter, LETTERS_ALLOWED_IN_GAPS.sub("", gap)))


@settings(max_examples=200, deadline=None)
@given(lines=st.lists(messy_text, min_size=1, max_size=5))
def test_a_line_is_split_the_same_alone_and_among_other_lines(lines: list[str]) -> None:
    together = split("\n".join(lines), "en").segments
    alone = tuple(segment for line in lines for segment in split(line, "en").segments)
    assert together == alone


def table(language: str, cases: tuple[tuple[str, ...], ...]) -> list[object]:
    return [
        pytest.param(
            language,
            case,
            id=f"{language}: {case[0]}",
            marks=[pytest.mark.xfail(strict=True)] * (case in KNOWN_MISSES),
        )
        for case in cases
    ]


@pytest.mark.parametrize(
    ("language", "sentences"),
    [
        *table("en", ENGLISH),
        *table("en", ENGLISH_UNSEEN),
        *table("pt", PORTUGUESE),
        *table("pt-BR", PORTUGUESE_UNSEEN),
    ],
)
def test_a_paragraph_is_split_where_a_reader_would(language: str, sentences: tuple[str, ...]) -> None:
    assert split(" ".join(sentences), language).segments == sentences


@pytest.mark.parametrize(
    ("text", "segments", "gaps"),
    [
        ("", (), ("",)),
        ("  \n", (), ("  \n",)),
        ("42 % ... 🎉 *** 3.14", (), ("42 % ... 🎉 *** 3.14",)),
        ("\r\n\r\nOne.  Two.\rThree\n", ("One.", "Two.", "Three"), ("\r\n\r\n", "  ", "\r", "\n")),
        ("wrapped at\nsome column.", ("wrapped at", "some column."), ("", "\n", "")),
        ("1. Open it.\n2. Close it.", ("Open it.", "Close it."), ("1. ", "\n2. ", "")),
        ("  - one\n  * two\n  a) three", ("one", "two", "three"), ("  - ", "\n  * ", "\n  a) ", "")),
        ("> - 1. nested", ("nested",), ("> - 1. ", "")),
        ("## Title", ("Title",), ("## ", "")),
        ("3.5 million people", ("3.5 million people",), ("", "")),
        ("Good night 😀", ("Good night",), ("", " 😀")),
        ("Great! 🎉 See you.", ("Great!", "See you."), ("", " 🎉 ", "")),
        ("Thanks! :) See you.", ("Thanks!", "See you."), ("", " :) ", "")),
        ("I 😀 it", ("I 😀 it",), ("", "")),
        ("— Quem é? — Sou eu.", ("Quem é?", "Sou eu."), ("— ", " — ", "")),
        ("name\tage\nAna\t31", ("name", "age", "Ana"), ("", "\t", "\n", "\t31")),
        ("a\x00b", ("a", "b"), ("", "\x00", "")),
        ("\ufeffHi\u200b", ("Hi",), ("\ufeff", "\u200b")),
        ("\u202eabc\u202c", ("abc",), ("\u202e", "\u202c")),
        ("Well. 42. Yes.", ("Well.", "Yes."), ("", " 42. ", "")),
    ],
)
def test_gaps_hold_what_is_not_to_be_translated(
    text: str, segments: tuple[str, ...], gaps: tuple[str, ...]
) -> None:
    assert split(text, "pt") == SegmentedText(segments=segments, gaps=gaps)


@pytest.mark.parametrize(
    ("language", "sentences", "separator"),
    [
        ("ja", ("今日は晴れです。", "散歩に行く！", "「本当？」", "はい。"), ""),
        ("zh", ("你好!", "我在这里?", "是的。"), ""),
        ("hi", ("मैं यहाँ हूँ।", "तुम कहाँ हो?"), " "),
        ("ar", ("أين أنت؟", "أنا هنا."), " "),
        ("ru", ("Где ты?", "Я здесь."), " "),
        ("de", ("Am 3. Oktober ist frei.", "Das gilt z.B. in Berlin."), " "),
        ("fr", ("M. Petit est là.", "Il attend !"), " "),
        ("es", ("¿Dónde está la Sra. Ruiz?", "¡Aquí!"), " "),
        ("it", ("Il sig. Neri parla.", "Nessuno ascolta."), " "),
        ("sw", ("Dr. Juma yupo.", "Anasubiri."), " "),
        ("en", ("i am here.", "where are you?", "e.g. at home."), " "),
    ],
)
def test_other_scripts_and_languages_are_split_too(
    language: str, sentences: tuple[str, ...], separator: str
) -> None:
    assert split(separator.join(sentences), language).segments == sentences


def test_the_region_of_a_language_tag_makes_no_difference() -> None:
    text = "A Sra. Nunes saiu. Voltou."
    assert split(text, "pt_BR") == split(text, "PT-br") == split(text, "pt")


def test_join_puts_translations_between_the_original_gaps() -> None:
    parts = split("1. One.\r\n\r\n\t2) Two?  ", "en")
    assert parts.join(["Um.", ""]) == "1. Um.\r\n\r\n\t2)   "


def test_join_refuses_a_wrong_number_of_translations() -> None:
    with pytest.raises(ValueError, match="1 translations for 2 segments"):
        split("One. Two.", "en").join(["Um."])


def test_a_value_with_too_few_gaps_is_refused() -> None:
    with pytest.raises(ValueError, match="one gap more"):
        SegmentedText(segments=("a",), gaps=("",))
