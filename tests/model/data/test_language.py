"""The rule `language`: sure cases are rejected, short texts not judged, a missing library named."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from app.errors import InvalidOption
from model.data import language as language_module
from model.data.filters import FilterConfig, PairFilter
from model.data.language import LanguageProbability

SENTENCE = "The ships came back to the harbour before the storm began."
FRASE = "Os navios voltaram ao porto antes de a tempestade começar."


@pytest.fixture
def pair_filter() -> PairFilter:
    pytest.importorskip("py3langid")
    return PairFilter(FilterConfig(), source_language="en-GB", target_language="pt-BR")


def test_sentences_of_the_right_languages_pass_and_swapped_ones_do_not(pair_filter: PairFilter) -> None:
    assert pair_filter.rejected_by(SENTENCE, FRASE) is None
    assert pair_filter.rejected_by(FRASE, SENTENCE) == "language"


def test_one_wrong_side_is_enough(pair_filter: PairFilter) -> None:
    german = "Die Schiffe kehrten vor dem Sturm in den Hafen zurück."
    assert pair_filter.rejected_by(SENTENCE, german) == "language"
    assert pair_filter.rejected_by(german, FRASE) == "language"


def test_short_texts_are_not_judged(pair_filter: PairFilter) -> None:
    assert pair_filter.rejected_by("Fechar a janela", "Close the window") is None


def test_probabilities_are_shares_of_one() -> None:
    pytest.importorskip("py3langid")
    english, portuguese = (LanguageProbability.of_language(tag) for tag in ("en", "pt"))
    assert english is not None
    assert portuguese is not None
    assert english(SENTENCE) == 1.0
    assert 0 <= portuguese(SENTENCE) < 0.1


def test_an_unknown_language_is_not_judged_and_that_is_said() -> None:
    pytest.importorskip("py3langid")
    assert LanguageProbability.of_language("tlh") is None
    pair_filter = PairFilter(FilterConfig(), source_language="en", target_language="tlh")
    assert [note.split("`")[1] for note in pair_filter.notes] == ["script", "language"]


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    language_module._identifier.cache_clear()
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    yield
    language_module._identifier.cache_clear()


@pytest.mark.usefixtures("no_library")
def test_a_missing_library_says_what_to_install_or_turn_off() -> None:
    with pytest.raises(InvalidOption, match="pip install py3langid"):
        PairFilter(FilterConfig(), source_language="en", target_language="pt")
    off = FilterConfig(off=frozenset({"language"}))
    assert PairFilter(off, source_language="en", target_language="pt").notes == ()
