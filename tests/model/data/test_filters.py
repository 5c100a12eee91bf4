"""Filters: each rule rejects what it is for and keeps its neighbours, and counts add up."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from rich.console import Console

from app.errors import InvalidOption
from model.data.exclusions import Exclusions
from model.data.filter_counts import FilterCounts, SourceCounts
from model.data.filters import RULES, FilterConfig, PairFilter, Rule, counts_of
from model.data.placeholders import placeholders
from model.data.scripts import ScriptShare
from model.data.seen import SeenTexts

SENTENCE = "The ships came back to the harbour before the storm began."
FRASE = "Os navios voltaram ao porto antes de a tempestade começar."


def judged(
    source: str, target: str, *, languages: tuple[str, str] = ("en", "pt"), **fields: object
) -> Rule | None:
    config = FilterConfig.model_validate({"off": ["language"]} | fields)
    pair_filter = PairFilter(config, source_language=languages[0], target_language=languages[1])
    return pair_filter.rejected_by(source, target)


@pytest.mark.parametrize(
    ("source", "target", "rule"),
    [
        (SENTENCE, FRASE, None),
        ("", FRASE, "empty"),
        (SENTENCE, " \u3000", "empty"),
        ("a" * 1001, "b" * 900, "characters"),
        ("OK", "Está bem assim", None),
        ("No", "Não, de modo nenhum, nem pensar nisso", "length-ratio"),
        (SENTENCE, SENTENCE, "copied"),
        (SENTENCE, SENTENCE.upper().replace(" ", "  "), "copied"),
        ("LibreOffice 25.8", "LibreOffice 25.8", None),
        ("https://example.org/a/very/long/address", "https://example.org/a/very/long/address", "copied"),
        ("Open {name}", "Abrir {nome}", "placeholders"),
        ("Open {name}", "Abrir {name}", None),
        (SENTENCE, "Корабли вернулись в гавань до начала бури.", "script"),
        ("Plot α and β on the axes", "Trace α e β nos eixos", None),
        ("12:30", "12:30", None),
    ],
)
def test_each_rule_rejects_what_it_is_for(source: str, target: str, rule: Rule | None) -> None:
    assert judged(source, target) == rule


@pytest.mark.parametrize(
    ("source", "target", "rule"),
    [
        ("", FRASE, "empty"),
        ("a" * 1001, "b" * 900, "characters"),
        ("No", "Não, de modo nenhum, nem pensar nisso", "length-ratio"),
        (SENTENCE, SENTENCE, "copied"),
        ("Open {name}", "Abrir {nome}", "placeholders"),
        (SENTENCE, "Корабли вернулись в гавань до начала бури.", "script"),
    ],
)
def test_a_rule_that_is_off_rejects_nothing(source: str, target: str, rule: Rule) -> None:
    assert judged(source, target) == rule
    assert judged(source, target, off=["language", rule]) != rule


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("${HOME} and {0}, { $count } {}", ["${HOME}", "{0}", "{$count}", "{}"]),
        ("%s of %2$d at %.1f or %(name)s, %lu", ["%s", "%2$d", "%.1f", "%(name)s", "%lu"]),
        ("100%, 20% discount, 5%de, 20 %discount, %%s", []),
        ('<a href="x" title="Help">text</a><br/>', ["<a>", "</a>", "<br>"]),
        ("a < b and c > d", []),
        ("Tom &amp; Jerry &#8212; R&D; &c", ["&amp;", "&#8212;", "&D;"]),
        ("See https://example.org/a?b=c. Or (ftp://x.y/).", ["https://example.org/a?b=c", "ftp://x.y"]),
        ("write it between { and } or { one two }", []),
        ("the ed2k:// links", []),
    ],
)
def test_placeholders_are_found(text: str, found: list[str]) -> None:
    assert placeholders(text) == Counter(found)


def test_the_number_of_a_placeholder_counts() -> None:
    assert judged("%s and %s", "%s e") == "placeholders"


def test_the_order_of_placeholders_is_free() -> None:
    assert judged("%s of {x}", "{x} de %s") is None


def test_attributes_of_tags_may_be_translated() -> None:
    assert judged('<b title="Help">x</b> it is', '<b title="Ajuda">x</b> assim') is None


@pytest.mark.parametrize(
    ("language", "text", "share"),
    [
        ("pt-BR", "ação", 1.0),
        ("ru", "дом house", 3 / 8),
        ("zh-Hans", "房子", 1.0),
        ("ja", "家かカー", 1.0),
        ("sr-Latn", "дом", 0.0),
        ("hi", "हिन्दी", 1.0),
        ("ko", "집", 1.0),
        ("en", "123", 1.0),
    ],
)
def test_the_share_of_a_script_is_that_of_the_letters(language: str, text: str, share: float) -> None:
    judge = ScriptShare.of_language(language)
    assert judge is not None
    assert judge(text) == pytest.approx(share)


def test_a_language_of_unknown_script_is_not_judged_and_that_is_said() -> None:
    config = FilterConfig(off=frozenset({"language"}))
    pair_filter = PairFilter(config, source_language="en", target_language="xx")
    assert pair_filter.rejected_by("house", "дом") is None
    assert pair_filter.notes == (
        "the rule `script` does not know the language xx: that side is not judged by it",
    )


def test_a_duplicate_is_a_pair_equal_up_to_case_and_space() -> None:
    pair_filter = PairFilter(
        FilterConfig(off=frozenset({"language"})), source_language="en", target_language="pt"
    )
    assert pair_filter.rejected_by("Red house", "Casa vermelha") is None
    assert pair_filter.rejected_by("red  house ", "casa vermelha") == "duplicate"
    assert pair_filter.rejected_by("Red house", "casa rubra") is None
    assert pair_filter.rejected_by("Red house!", "Casa vermelha!") is None


@given(st.lists(st.text(st.sampled_from("abc"), max_size=4), max_size=60))
def test_known_texts_are_those_that_were_added(texts: list[str]) -> None:
    seen = SeenTexts()
    known: set[str] = set()
    for text in texts:
        assert (text in seen) == (text in known)
        seen.add(text)
        known.add(text)
    assert len(seen) == len(known)


def test_known_texts_stay_known_when_the_table_grows() -> None:
    seen = SeenTexts()
    for number in range(20_000):
        seen.add(str(number))
    assert len(seen) == 20_000
    assert all(str(number) in seen for number in range(20_000))
    assert not any(str(number) in seen for number in range(20_000, 40_000))


def test_a_test_sentence_passes_on_neither_side() -> None:
    exclusions = Exclusions([SENTENCE, "É assim."])
    pair_filter = PairFilter(
        FilterConfig(off=frozenset({"language"})),
        source_language="en",
        target_language="pt",
        exclusions=exclusions,
    )
    assert pair_filter.rejected_by(SENTENCE.upper(), FRASE) == "excluded"
    assert pair_filter.rejected_by("So it is", "é  ASSIM") == "excluded"
    assert pair_filter.rejected_by("So it is", "É assim mesmo") is None


def test_counts_say_what_each_rule_took_and_add_up() -> None:
    config = FilterConfig(off=frozenset({"language"}))
    pair_filter = PairFilter(config, source_language="en", target_language="pt")
    counter: Counter[str] = Counter()
    pairs = [("red", "vermelho"), ("Red", "Vermelho"), ("", "x"), ("blue", "azul")]
    assert list(pair_filter.kept(pairs, counter=counter)) == [("red", "vermelho"), ("blue", "azul")]
    counts = counts_of("a", counter)
    assert counts.of_source["a"] == SourceCounts(4, {"duplicate": 1, "empty": 1})
    assert counts.total.num_kept == 2
    both = counts + counts + counts_of("b", {"kept": 1})
    assert both.of_source["a"] == SourceCounts(8, {"duplicate": 2, "empty": 2})
    assert (both.total.num_read, both.total.num_kept) == (9, 5)
    assert FilterCounts.from_json(both.to_json()) == both


def test_the_table_shows_every_source_and_every_rule_that_rejected_something() -> None:
    counts = counts_of("manuals", {"kept": 1200, "script": 3}) + counts_of("talks", {"empty": 1})
    console = Console(width=100, force_terminal=False)
    with console.capture() as capture:
        console.print(counts.table(RULES))
    lines = [line.split() for line in capture.get().splitlines()]
    assert lines == [
        ["source", "read", "kept", "empty", "script"],
        ["manuals", "1,203", "1,200", "0", "3"],
        ["talks", "1", "0", "1", "0"],
        ["all", "1,204", "1,200", "1", "3"],
    ]


def test_counts_that_are_none_are_refused() -> None:
    with pytest.raises(InvalidOption, match="no counts"):
        FilterCounts.from_json([1])


@pytest.mark.parametrize(
    "fields", [{"off": ["langauge"]}, {"max_length_ratio": 0.5}, {"min_script_share": 2}, {"colour": 1}]
)
def test_an_impossible_configuration_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        FilterConfig.model_validate(fields)
