"""Parallel text: every pair arrives, and whatever is wrong is named by file and line, never by its text."""

from __future__ import annotations

import gzip
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import InvalidOption
from model.data.parallel_text import MonolingualText, ParallelText

zstd = pytest.importorskip("backports.zstd")

TABLE = "x\tred house\tcasa vermelha\nx\tblue boat\tbarco azul\n"
PAIRS = [("red house", "casa vermelha"), ("blue boat", "barco azul")]
SECRET = "aubergine"

cells = st.text(st.characters(exclude_characters="\t\n", exclude_categories=["Cs"]), max_size=8)


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def read(path: Path, source: int = 2, target: int = 3) -> list[tuple[str, str]]:
    return list(ParallelText(path, source_column=source, target_column=target).pairs())


@pytest.mark.parametrize(
    ("name", "pack"), [("t.tsv", bytes), ("t.tsv.gz", gzip.compress), ("t.tsv.zst", zstd.compress)]
)
def test_a_table_gives_its_pairs_whatever_its_compression(
    tmp_path: Path, name: str, pack: Callable[[bytes], bytes]
) -> None:
    assert read(written(tmp_path / name, pack(TABLE.encode()))) == PAIRS


@pytest.mark.parametrize(("source", "target"), [(2, 3), (-2, -1), (2, -1)])
def test_columns_count_from_either_end(tmp_path: Path, source: int, target: int) -> None:
    assert read(written(tmp_path / "t.tsv", TABLE.encode()), source, target) == PAIRS
    swapped = [(b, a) for a, b in PAIRS]
    assert read(tmp_path / "t.tsv", target, source) == swapped


def test_a_file_of_several_frames_is_read_to_its_end(tmp_path: Path) -> None:
    frames = b"".join(zstd.compress(line.encode()) for line in TABLE.splitlines(keepends=True))
    assert read(written(tmp_path / "t.tsv.zst", frames)) == PAIRS


@given(st.lists(st.tuples(cells, cells), max_size=6))
def test_what_was_written_is_what_is_read(pairs: list[tuple[str, str]]) -> None:
    pairs = [(source, target.rstrip("\r")) for source, target in pairs]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.tsv"
        path.write_bytes("".join(f"{source}\t{target}\n" for source, target in pairs).encode())
        assert read(path, 1, 2) == pairs


def test_two_files_are_read_side_by_side(tmp_path: Path) -> None:
    source = written(tmp_path / "a", b"um\ndois")
    target = written(tmp_path / "b", b"one\r\ntwo\r\n")
    assert list(ParallelText(source, target).pairs()) == [("um", "one"), ("dois", "two")]


@pytest.mark.parametrize("shorter", [0, 1])
def test_two_files_of_different_length_are_refused(tmp_path: Path, shorter: int) -> None:
    paths = [written(tmp_path / name, b"a\nb\n") for name in "ab"]
    paths[shorter].write_bytes(b"a\n")
    with pytest.raises(InvalidOption, match=f"{paths[shorter].name} ends after line 1 "):
        list(ParallelText(paths[0], paths[1]).pairs())


def test_a_line_with_too_few_columns_is_named_but_not_shown(tmp_path: Path) -> None:
    path = written(tmp_path / "t.tsv", f"{TABLE}{SECRET}\n".encode())
    with pytest.raises(InvalidOption, match=r"line 3: the line has 1 tab-separated columns") as caught:
        read(path)
    assert SECRET not in str(caught.value)


def test_a_line_where_both_columns_are_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="line 1: of 2 columns, 2 and -1 are the same one"):
        read(written(tmp_path / "t.tsv", b"a\tb\n"), 2, -1)


@pytest.mark.parametrize(
    ("source", "target", "words"), [(0, 1, "source column is 0"), (2, 2, "both column 2")]
)
def test_impossible_columns_are_refused_before_reading(
    tmp_path: Path, source: int, target: int, words: str
) -> None:
    with pytest.raises(InvalidOption, match=words):
        ParallelText(tmp_path / "none", source_column=source, target_column=target)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("t.tsv", b"a\tb\nc\xff\td\n", "line 2: byte 2 is not UTF-8"),
        ("t.tsv.gz", gzip.compress(TABLE.encode(), mtime=0)[:-6], "damaged or cut short"),
        ("t.tsv.gz", b"no gzip at all", "damaged or cut short"),
        ("t.tsv.zst", zstd.compress(TABLE.encode())[:-1], "damaged or cut short"),
        ("t.tsv.zst", b"no zstd at all, and longer than a header", "damaged or cut short"),
    ],
)
def test_a_damaged_file_is_an_error_and_no_shorter_text(
    tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    with pytest.raises(InvalidOption, match=words):
        read(written(tmp_path / name, content), 1, 2)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match=r"nowhere\.tsv cannot be read: No such file"):
        read(tmp_path / "nowhere.tsv")


def test_a_missing_zstd_library_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "t.tsv.zst", zstd.compress(TABLE.encode()))
    monkeypatch.setitem(sys.modules, "backports.zstd", None)
    with pytest.raises(InvalidOption, match=r"pip install backports\.zstd"):
        read(path)


LABELLED = b"br\tprose\tred house\tcasa vermelha\npt\tshort\tred\tvermelho\nbr\tshort\tblue\tazul\n"


@pytest.mark.parametrize(
    ("where", "sources"),
    [
        ({1: ["br"]}, ["red house", "blue"]),
        ({1: ["br"], 2: ["short"]}, ["blue"]),
        ({1: ["br", "pt"]}, ["red house", "red", "blue"]),
        ({-3: ["short"]}, ["red", "blue"]),
        ({1: ["de"]}, []),
    ],
)
def test_only_the_rows_with_wanted_cells_come(
    tmp_path: Path, where: dict[int, list[str]], sources: list[str]
) -> None:
    path = written(tmp_path / "t.tsv", LABELLED)
    text = ParallelText(path, source_column=3, target_column=4, where=where)
    assert [source for source, _ in text.pairs()] == sources
    assert list(MonolingualText(path, column=3, where=where).texts()) == sources


def test_a_column_of_a_condition_that_a_line_lacks_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "t.tsv", b"a\tb\n")
    with pytest.raises(InvalidOption, match=r"line 1: .* has 2 .* columns 1 and 2 and 5"):
        list(ParallelText(path, where={5: ["x"]}).pairs())


@pytest.mark.parametrize(
    ("where", "words"), [({0: ["x"]}, "chosen column is 0"), ({1: []}, "no list of values for column 1")]
)
def test_impossible_conditions_are_refused_before_reading(
    tmp_path: Path, where: dict[int, list[str]], words: str
) -> None:
    with pytest.raises(InvalidOption, match=words):
        ParallelText(tmp_path / "none", where=where)
    with pytest.raises(InvalidOption, match=words):
        MonolingualText(tmp_path / "none", column=1, where=where)


def test_conditions_on_plain_lines_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="two files of plain lines"):
        ParallelText(tmp_path / "a", tmp_path / "b", where={1: ["x"]})
    with pytest.raises(InvalidOption, match="name the text's column"):
        MonolingualText(tmp_path / "a", where={1: ["x"]})


def test_text_of_one_language_is_a_column_or_whole_lines(tmp_path: Path) -> None:
    path = written(tmp_path / "t.tsv", b"a\tum\nb\tdois\n")
    assert list(MonolingualText(path, column=-1).texts()) == ["um", "dois"]
    assert list(MonolingualText(path).texts()) == ["a\tum", "b\tdois"]
