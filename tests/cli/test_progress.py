import io
from pathlib import Path

import pytest
from line_engine import LineEngine
from rich.console import Console

from app.__main__ import main
from app.cli import translate as translate_module
from app.cli.progress import LineProgress


def test_progress_tells_translated_lines_from_written_ones() -> None:
    screen = io.StringIO()
    console = Console(file=screen, width=120)
    with LineProgress(num_lines=10, num_done=2, console=console) as progress:
        for _ in range(5):
            progress.line_translated()
        progress.line_written()
    assert "7/10" in screen.getvalue()
    assert "3 written" in screen.getvalue()


def test_progress_goes_on_while_one_line_holds_back_those_after_it(
    engine: LineEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    class Recorded(LineProgress):
        def line_translated(self) -> None:
            seen.append("translated")
            super().line_translated()

        def line_written(self) -> None:
            seen.append("written")
            super().line_written()

    monkeypatch.setattr(translate_module, "LineProgress", Recorded)
    source_file = tmp_path / "in.txt"
    # The engine takes the longest for the first of every five lines.
    source_file.write_text("".join(f"line {number}\n" for number in range(5)))
    with pytest.raises(SystemExit) as ended:
        main(["translate", "--workers", "1", "-i", str(source_file), "-o", str(tmp_path / "out.txt")])
    assert not ended.value.code
    assert seen[:4] == ["translated"] * 4
    assert sorted(seen) == ["translated"] * 5 + ["written"] * 5


@pytest.mark.parametrize(("workers", "lines_in_flight"), [(1, 256), (4, 1024)])
def test_no_more_lines_are_in_flight_than_keep_the_rows_busy(
    engine: LineEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    workers: int,
    lines_in_flight: int,
) -> None:
    engine.most_allowed = engine.hold_until = lines_in_flight
    source_file = tmp_path / "in.txt"
    source_file.write_bytes(b"a\n" * 2000)
    with pytest.raises(SystemExit) as ended:
        main(["translate", "--workers", str(workers), "-i", str(source_file), "-o", str(tmp_path / "o")])
    assert not ended.value.code
    assert engine.most_running == lines_in_flight
