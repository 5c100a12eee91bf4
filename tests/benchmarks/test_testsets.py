from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.testsets import load


def test_lines_of_both_sides_belong_together(tmp_path: Path) -> None:
    (tmp_path / "pud.en").write_text("one\ntwo\n", encoding="utf-8")
    (tmp_path / "pud.pt_BR").write_text("um\ndois\n", encoding="utf-8")
    testset = load(tmp_path, "pud", source="pt", target="en")
    assert (testset.sources, testset.references) == (["um", "dois"], ["one", "two"])


def test_a_missing_file_is_named_with_what_the_folder_should_hold(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"pud\.en cannot be read \(No such file.*flores200-dev and pud"):
        load(tmp_path, "pud", source="en", target="pt")


def test_sides_of_different_lengths_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pud.en").write_text("one\n", encoding="utf-8")
    (tmp_path / "pud.pt_BR").write_text("um\ndois\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="1 source lines and 2 references"):
        load(tmp_path, "pud", source="en", target="pt")
