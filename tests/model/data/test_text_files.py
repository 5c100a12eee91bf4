"""Files that are written appear complete, or leave what was there before."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from app.errors import InvalidOption
from model.data.text_files import check_new, lines_of, written_lines


def test_what_is_written_can_be_read_line_by_line(tmp_path: Path) -> None:
    with written_lines(tmp_path / "a", tmp_path / "b") as (first, second):
        first.write("um\u2028dois\n")
        second.write("três\r\n")
    assert list(lines_of(tmp_path / "a")) == ["um\u2028dois"]
    assert list(lines_of(tmp_path / "b")) == ["três"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_an_error_while_writing_leaves_the_old_file_and_nothing_new(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    with pytest.raises(UnicodeEncodeError), written_lines(tmp_path / "a", tmp_path / "b") as (first, _):
        first.writelines(["half of the new", "\ud800"])
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "old")]


def test_existing_files_are_refused_unless_forced(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(InvalidOption, match="--force"):
        check_new([tmp_path / "a"], force=False)
    check_new([tmp_path / "a", tmp_path / "b"], force=True)


def test_impossible_places_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="does not exist"):
        check_new([tmp_path / "none" / "a"], force=True)
    with pytest.raises(InvalidOption, match="is a folder"):
        check_new([tmp_path], force=True)
    with pytest.raises(InvalidOption, match="two are the same"):
        check_new([tmp_path / "a", tmp_path / "a"], force=True)


@pytest.mark.parametrize(("name", "pack"), [("a", bytes), ("a.gz", gzip.compress)])
def test_all_bytes_and_lines_of_a_file_are_told(
    tmp_path: Path, name: str, pack: Callable[[bytes], bytes]
) -> None:
    (tmp_path / name).write_bytes(pack(b"um\n" * 3000))
    told: list[tuple[int, int]] = []
    for _ in lines_of(tmp_path / name, on_read=lambda *read: told.append(read)):
        pass
    assert len(told) == 3
    assert [sum(column) for column in zip(*told, strict=True)] == [(tmp_path / name).stat().st_size, 3000]
