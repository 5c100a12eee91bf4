import asyncio
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from line_engine import LineEngine

from app.__main__ import main
from app.runtime.request import TranslationRequest, TranslationResult

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["translate", "--workers", "1", *(str(argument) for argument in arguments)])
    return int(ended.value.code or 0)


def replace_stdout(monkeypatch: pytest.MonkeyPatch) -> io.BytesIO:
    """Replace standard output by one whose own encoding is not UTF-8; returns what reaches it."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    return written


def interrupt_before_the_first_turn(engine: LineEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Act as if Ctrl-C had been pressed when all but the last line are just finished, the first last."""
    others_are_finished, all_are_finished = asyncio.Event(), asyncio.Event()

    async def translate(request: TranslationRequest) -> TranslationResult:
        text = request.texts[0]
        if text == "last":
            await all_are_finished.wait()
            raise KeyboardInterrupt
        if text == "first":
            await others_are_finished.wait()
        result = await LineEngine.translate(engine, request)
        if text == "first":
            all_are_finished.set()
        elif engine.num_running_requests == 0:
            others_are_finished.set()
        return result

    monkeypatch.setattr(engine, "translate", translate)


@pytest.mark.parametrize("way", ["texts", "pipe", "file"])
def test_an_interrupted_run_loses_no_line_that_is_finished_and_next_in_order(
    engine: LineEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, way: str
) -> None:
    lines = ["first", *(f"line {number}" for number in range(20)), "last"]
    interrupt_before_the_first_turn(engine, monkeypatch)
    source_file = tmp_path / "in"
    source_file.write_text("".join(f"{line}\n" for line in lines))
    with source_file.open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        written = replace_stdout(monkeypatch)
        options = {"texts": lines, "pipe": [], "file": ["-i", source_file, "-o", tmp_path / "out"]}[way]
        assert run(*options) == 130
    output = (tmp_path / "out.partial").read_bytes() if way == "file" else written.getvalue()
    assert output.decode().splitlines() == [line.upper() for line in lines[:-1]]


def test_a_line_that_fails_ends_the_output_before_it(
    engine: LineEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def translate(request: TranslationRequest) -> TranslationResult:
        if request.texts[0] == "bad":
            for _ in range(50):
                await asyncio.sleep(0)
            raise OSError("the graph is gone")
        return await LineEngine.translate(engine, request)

    monkeypatch.setattr(engine, "translate", translate)
    written = replace_stdout(monkeypatch)
    assert run("one", "two", "bad", "four") == 1
    assert written.getvalue() == b"ONE\nTWO\n"


def test_texts_are_written_as_utf_8_whatever_the_locale(
    engine: LineEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = replace_stdout(monkeypatch)
    assert run("olá", "one|two") == 0
    assert written.getvalue().decode() == "OLÁ\nONE TWO\n"


@pytest.mark.parametrize(
    ("closed", "arguments", "message"),
    [
        ("stdin", [], "standard input is closed"),
        ("stdout", ["text"], "standard output is closed"),
        ("stdout", [], "standard output is closed"),
    ],
)
def test_a_closed_stream_is_named_before_any_work(
    engine: LineEngine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    closed: str,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(sys, closed, None)
    assert run(*arguments) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert "Traceback" not in errors
    assert not engine.started


def test_a_text_needs_no_standard_input(
    engine: LineEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert run("text") == 0
    assert capsys.readouterr().out == "TEXT\n"


@pytest.mark.parametrize("redirection", ["<&-", ">&-"])
def test_a_shell_that_closes_a_stream_gets_one_line(redirection: str, tmp_path: Path) -> None:
    command = f'exec "{sys.executable}" -m app translate --bundle "{tmp_path}" {redirection}'
    ended = subprocess.run(
        ["sh", "-c", command],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith("dragoman: standard ")
    assert ended.stderr.count("\n") == 1
