import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.evaluation.faults import find_faults, is_copied, is_empty, is_repeated

ROOT = Path(__file__).resolve().parents[3]
CLEAN = sorted(
    [*(ROOT / "exporters" / "verification_texts").glob("*.txt"), ROOT / "tests/data/marian/sentences.en.txt"]
)


@pytest.mark.parametrize(
    "text",
    [
        "the cat and the cat and the cat and the cat and the cat",
        "no no no no no no",
        "Bem, bem, bem, bem, bem.",
        "começo normal e depois " + "de um dos mais importantes do " * 3,
        "Donau" + "dampfschiff" * 6,
        "我们我们我们我们我们我们我们我们我们我们我们我们我们",
        "The CAT sat here. the cat sat here. The cat sat here.",
    ],
)
def test_going_round_in_circles_is_found(text: str) -> None:
    assert is_repeated("A short and clean source.", text)
    assert is_repeated("", text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Yes.",
        "no no no no no",
        "He said that he said that she was right.",
        "Wait... what?!?",
        "one of the most important of the most important",
        "Donaudampfschifffahrtsgesellschaftskapitän",
        "https://example.org/a/b/c?d=e&f=g",
    ],
)
def test_ordinary_text_is_no_repetition(text: str) -> None:
    assert not is_repeated("A short and clean source.", text)


def test_a_repetition_of_the_source_may_be_repeated() -> None:
    source = "No, no, no, no, no, no, no!"
    assert not is_repeated(source, "Não, não, não, não, não, não, não!")
    assert is_repeated(source, "Não" + ", não" * 12)


@given(st.lists(st.text("abcdefg", min_size=1, max_size=8), min_size=1, max_size=6), st.integers(6, 12))
def test_a_loop_of_any_words_is_found(words: list[str], times: int) -> None:
    assert is_repeated("Clean.", " ".join(words * times))


@given(st.integers(0, 10_000))
def test_text_without_a_word_that_comes_twice_is_never_repeated(seed: int) -> None:
    words = [f"w{number}" for number in range(40)]
    random.Random(seed).shuffle(words)
    assert not is_repeated("", " ".join(words))


@pytest.mark.parametrize("path", CLEAN, ids=lambda path: path.name)
def test_clean_text_raises_no_alarm(path: Path) -> None:
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line]
    assert len(lines) > 20
    assert [line for line in lines if is_repeated("Clean.", line)] == []


def test_nothing_but_whitespace_is_empty_unless_the_source_is() -> None:
    assert is_empty("Hello.", "")
    assert is_empty("Hello.", " \u2028")
    assert not is_empty("", "")
    assert not is_empty(" ", "")
    assert not is_empty("Hello.", ".")


def test_a_long_source_that_came_back_is_copied() -> None:
    source = "This is not translated at all"
    assert is_copied(source, source, "Isto")
    assert is_copied(source, f"  {source.replace(' ', '  ')}\n", "Isto")
    assert not is_copied(source, source, source)
    assert not is_copied(source, source.upper(), "Isto")
    assert not is_copied("Rio de Janeiro", "Rio de Janeiro", "Rio")
    assert not is_copied("1 2 3 4 5 km", "1 2 3 4 5 km", "1 2 3 4 5 quilômetros")


def test_faults_name_their_lines_from_1() -> None:
    source = "one two three four"
    found = find_faults([source] * 4, ["fine", "", source, "ab " * 9], ["x"] * 4)
    assert (found.empty, found.copied, found.repeated) == ((2,), (3,), (4,))
