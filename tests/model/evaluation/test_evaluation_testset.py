from pathlib import Path

import pytest

from app.errors import InvalidOption
from model.evaluation.testset import read_lines, read_testset


def write(path: Path, content: str) -> Path:
    path.write_bytes(content.encode())
    return path


def test_two_files_belong_together_line_by_line(tmp_path: Path) -> None:
    source = write(tmp_path / "a.en", "one\ntwo\n")
    reference = write(tmp_path / "a.pt", "um\ndois\n")
    found = read_testset(f"set-1={source},{reference}")
    assert (found.name, found.sources, found.references) == ("set-1", ("one", "two"), ("um", "dois"))
    assert found.first(1).sources == ("one",)
    assert found.first(1).references == ("um",)


def test_only_line_feeds_end_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "odd", "\ufeffa\u2028b\x85c\r\n\nd\re\x0cf\n\nlast")
    assert read_lines(path) == ["a\u2028b\x85c", "", "d\re\x0cf", "", "last"]
    assert read_lines(write(tmp_path / "empty", "")) == []
    assert read_lines(write(tmp_path / "one-empty", "\n")) == [""]


def test_a_table_has_columns_of_ones_choice(tmp_path: Path) -> None:
    table = write(tmp_path / "t.tsv", "1\tone\tum\n2\ttwo\tdois\n")
    found = read_testset(f"t={table}", source_column=3, target_column=2)
    assert found.sources == ("um", "dois")
    assert found.references == ("one", "two")


def test_mistakes_are_named(tmp_path: Path) -> None:
    two, three = write(tmp_path / "two", "a\nb\n"), write(tmp_path / "three", "a\nb\nc\n")
    empty, latin = write(tmp_path / "empty", ""), tmp_path / "latin"
    gap = write(tmp_path / "gap", "a\n \n")
    latin.write_bytes("olá".encode("latin-1"))
    for description, words in (
        (f"{two},{three}", "is not NAME="),
        (f"a b={two},{three}", "is not NAME="),
        (f"n={two},{three}", "2 source lines but 3 references"),
        (f"n={two},{two},{two}", "names 3 files"),
        (f"n={two},", "names 2 files"),
        (f"n={empty},{empty}", "has no line"),
        (f"n={two},{gap}", "line 2 of test set n has an empty reference"),
        (f"n={two}", "line 1 has 1 columns, but column 2 is wanted"),
        (f"n={latin},{two}", r"is not UTF-8 \(byte 3\)"),
        (f"n={tmp_path / 'absent'},{two}", "cannot be read"),
    ):
        with pytest.raises(InvalidOption, match=words):
            read_testset(description)
    for columns in ((0, 1), (2, 2)):
        with pytest.raises(InvalidOption, match="count from 1"):
            read_testset(f"n={two}", source_column=columns[0], target_column=columns[1])
