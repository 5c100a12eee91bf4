"""The bar of reading: silent where nobody watches, right at the end where somebody does."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from model.data.progress import reading_progress
from model.data.text_files import lines_of


def shown(path: Path, *, is_terminal: bool) -> str:
    written = io.StringIO()
    console = Console(file=written, force_terminal=is_terminal, width=100)
    with reading_progress("reading", [path], console=console) as on_read:
        for _ in lines_of(path, on_read=on_read):
            pass
    return written.getvalue()


def test_all_of_a_file_is_shown_as_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("um\n" * 2500)
    last = shown(tmp_path / "a", is_terminal=True)
    assert "100%" in last
    assert "2,500 lines" in last


def test_nothing_is_shown_where_there_is_no_terminal(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("um\n" * 2500)
    assert shown(tmp_path / "a", is_terminal=False) == ""
