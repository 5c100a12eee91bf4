"""`dragoman data`: what each command writes and says, and that it destroys nothing."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import pytest
from typer.testing import CliRunner

from app.errors import InvalidOption
from app.text import Tokenizer
from model.data.cli import app

PAIRS = [(f"red house {number}", f"casa vermelha {number}") for number in range(40)]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "t.tsv"
    rows = [("a" if number % 2 else "b", *pair) for number, pair in enumerate(PAIRS)]
    path.write_text("".join("\t".join(row) + "\n" for row in [*rows, ("a", "", "x"), ("a", *PAIRS[1])]))
    return path


@pytest.fixture
def varied(tmp_path: Path) -> Path:
    """Text that many vocabularies can be made of."""
    random = Random(5)
    words = ["".join(random.choices("abcdefghijklm", k=random.randint(2, 6))) for _ in range(200)]
    path = tmp_path / "varied.tsv"
    path.write_text("".join(f"{' '.join(random.choices(words, k=6))}\t{number}\n" for number in range(300)))
    return path


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def refusal(*arguments: object) -> str:
    with pytest.raises(InvalidOption) as caught:
        CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    return caught.value.message


LANGUAGES = ("-s", "en", "-t", "pt", "--off", "language")
COLUMNS = ("--source-column", 2, "--target-column", 3)


def test_clean_writes_the_fit_pairs_and_says_what_it_left_out(table: Path, tmp_path: Path) -> None:
    (tmp_path / "test.en").write_text("Red house 7!\n")
    out = tmp_path / "out.tsv"
    said = run(
        "clean",
        table,
        "--out",
        out,
        *LANGUAGES,
        *COLUMNS,
        "--where",
        "1=a",
        "--exclude",
        tmp_path / "test.en",
    )
    assert [tuple(line.split("\t")) for line in out.read_text().splitlines()] == [
        pair for number, pair in enumerate(PAIRS) if number % 2 and number != 7
    ]
    assert "read kept empty excluded duplicate t.tsv 22 19 1 1 1" in said
    assert "19 pairs in" in said


def test_duplicates_are_found_across_files(table: Path, tmp_path: Path) -> None:
    again = tmp_path / "u.tsv"
    again.write_bytes(table.read_bytes())
    said = run("clean", table, again, "--out", tmp_path / "out.tsv", *LANGUAGES, *COLUMNS)
    assert "u.tsv 42 0 1 41" in said
    assert "all 84 40 2 42" in said


def test_a_limit_can_be_set(table: Path, tmp_path: Path) -> None:
    said = run("clean", table, "--out", tmp_path / "o", *LANGUAGES, *COLUMNS, "--set", "max_characters=15")
    assert "characters" in said
    assert len((tmp_path / "o").read_text().splitlines()) == 10


def test_tabs_inside_of_a_text_do_not_make_columns(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("red\thouse\n")
    (tmp_path / "b").write_text("casa vermelha\n")
    run("clean", tmp_path / "a", "--target-text", tmp_path / "b", "--out", tmp_path / "o", *LANGUAGES)
    assert (tmp_path / "o").read_text() == "red house\tcasa vermelha\n"


def test_sample_chooses_the_same_texts_whatever_their_order(table: Path, tmp_path: Path) -> None:
    turned = tmp_path / "turned.tsv"
    turned.write_text("".join(reversed(table.read_text().splitlines(keepends=True))))
    said = run("sample", table, "--out", tmp_path / "a", "-n", 10, "--column", 2)
    assert "10 of 42 texts" in said
    assert "1 empty, 0 with test sentences, 1 that came before" in said
    run("sample", turned, "--out", tmp_path / "b", "-n", 10, "--column", 2)
    run("sample", table, "--out", tmp_path / "c", "-n", 20, "--column", 2, "--target-column", 3)
    first = (tmp_path / "a").read_text().splitlines()
    assert (tmp_path / "b").read_text().splitlines() == first
    larger = [tuple(line.split("\t")) for line in (tmp_path / "c").read_text().splitlines()]
    assert [source for source, _ in larger[:10]] == first
    assert set(larger) < set(PAIRS)


def test_sample_leaves_test_sentences_out_and_says_when_there_are_too_few(
    table: Path, tmp_path: Path
) -> None:
    (tmp_path / "test").write_text("RED HOUSE 7\n")
    said = run(
        "sample", table, "--out", tmp_path / "o", "-n", 100, "--column", 2, "--exclude", tmp_path / "test"
    )
    texts = (tmp_path / "o").read_text().splitlines()
    assert sorted(texts) == sorted(source for source, _ in PAIRS if source != "red house 7")
    assert "1 with test sentences" in said
    assert "there are no 100 texts" in said


def test_held_out_pairs_are_gone_from_what_is_cleaned_with_them_excluded(table: Path, tmp_path: Path) -> None:
    run("hold-out", table, "--out", tmp_path / "mine", "-n", 8, *LANGUAGES, *COLUMNS)
    paths = [tmp_path / "mine.en", tmp_path / "mine.pt"]
    chosen = list(zip(*(path.read_text().splitlines() for path in paths), strict=True))
    assert len(chosen) == 8
    assert set(chosen) < set(PAIRS)
    exclude = [argument for path in paths for argument in ("--exclude", path)]
    run("clean", table, "--out", tmp_path / "rest", *LANGUAGES, *COLUMNS, *exclude)
    rest = [tuple(line.split("\t")) for line in (tmp_path / "rest").read_text().splitlines()]
    assert sorted([*rest, *chosen]) == sorted(PAIRS)


def test_holding_out_more_than_there_is_is_refused(table: Path, tmp_path: Path) -> None:
    said = refusal("hold-out", table, "--out", tmp_path / "mine", "-n", 41, *LANGUAGES, *COLUMNS)
    assert "41 pairs with different sources are wanted, and 40 are there" in said
    assert not list(tmp_path.glob("mine*"))


def test_a_vocabulary_is_trained_on_the_columns_named(varied: Path, tmp_path: Path) -> None:
    out = tmp_path / "v.spm"
    options = ("--num-pieces", 60, "--no-byte-fallback", "--symbol", "<x1>")
    assert "60 pieces from 300 sentences" in run("vocabulary", varied, "--out", out, "--column", 1, *options)
    tokenizer = Tokenizer.open(out, eos_id=0)
    assert tokenizer.vocabulary_size == 60
    assert tokenizer.pieces([2]) == ["<x1>"]
    assert tokenizer.unknown_id in tokenizer.encode_source("7")
    both = run("vocabulary", varied, "--out", out, "--force", "--column", 1, "--column", 2, *options)
    assert "60 pieces from 600 sentences" in both
    assert tokenizer.unknown_id not in Tokenizer.open(out, eos_id=0).encode_source("7")


def test_rare_words_come_from_the_text_that_knows_them_and_never_from_test_sentences(tmp_path: Path) -> None:
    text, known, tests = tmp_path / "text.tsv", tmp_path / "known", tmp_path / "tests"
    lines = ["the otter swims", "an otter sleeps", "the parrot swims", "a parrot sleeps", "the house sleeps"]
    text.write_text("".join(f"a\t{line}\n" for line in lines))
    known.write_text("swims sleeps house\n" * 10)
    tests.write_text("An otter sleeps\n")
    said = run("rare-words", text, "--column", 2, "--out", tmp_path / "out", "--known", known, "-n", 9,
               "--exclude", tests)  # fmt: skip
    assert "2 texts for 1 words" in said  # one otter is left, too few
    assert sorted((tmp_path / "out").read_text().splitlines()) == ["a parrot sleeps", "the parrot swims"]


def test_a_part_of_a_line_that_is_a_test_sentence_is_left_out(tmp_path: Path) -> None:
    text, known, tests = tmp_path / "text", tmp_path / "known", tmp_path / "tests"
    text.write_text(
        "Otters swim across cold rivers, and then we all went home to eat some fish\nthe Otters\n"
    )
    known.write_text("")
    tests.write_text("Otters swim across cold rivers.\n")
    run("rare-words", text, "--out", tmp_path / "out", "--known", known, "-n", 9, "--exclude", tests)
    assert (tmp_path / "out").read_text() == "the Otters\n"


def test_text_that_cannot_be_read_twice_is_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "read twice" in refusal("rare-words", pipe, "--out", tmp_path / "o", "--known", pipe, "-n", 9)


@pytest.mark.parametrize("seed", [-(1 << 63) - 1, 1 << 63])
@pytest.mark.parametrize("command", [("sample", "-n", 5), ("rare-words", "-n", 5, "--known", "k")])
def test_a_seed_has_64_bits(table: Path, tmp_path: Path, seed: int, command: tuple[object, ...]) -> None:
    name, *options = command
    arguments = [name, table, "--out", tmp_path / "o", *options, "--seed", seed]
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 2
    assert "--seed" in result.output


@pytest.mark.parametrize("command", ["clean", "sample", "hold-out", "vocabulary", "rare-words"])
def test_no_command_replaces_a_file_unasked(table: Path, varied: Path, tmp_path: Path, command: str) -> None:
    options: dict[str, tuple[object, ...]] = {
        "clean": (*LANGUAGES, *COLUMNS),
        "sample": ("-n", 5),
        "hold-out": ("-n", 5, *LANGUAGES, *COLUMNS),
        "vocabulary": ("--num-pieces", 60, "--no-byte-fallback", "--column", 1),
        "rare-words": ("-n", 5, "--known", varied),
    }
    out = tmp_path / "out"
    written = tmp_path / "out.pt" if command == "hold-out" else out
    written.write_text("mine")
    arguments = (command, varied if command == "vocabulary" else table, "--out", out, *options[command])
    assert "--force" in refusal(*arguments)
    assert written.read_text() == "mine"
    run(*arguments, "--force")
    assert written.read_bytes() != b"mine"
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--where", "prose"), "COLUMN=VALUE"),
        (("--where", "1=a", "--where", "1=b"), "column 1 twice"),
        (("--set", "max_characters"), "NAME=VALUE"),
        (("--set", "max_characters=many"), "max_characters: "),
        (("--set", "colour=1"), "colour: "),
        (("--off", "langauge"), "duplicate"),
    ],
)
def test_a_mistyped_option_is_named(
    table: Path, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    assert words in refusal("clean", table, "--out", tmp_path / "o", *LANGUAGES, *COLUMNS, *arguments)
    assert not (tmp_path / "o").exists()
