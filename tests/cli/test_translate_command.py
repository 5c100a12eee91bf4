import hashlib
import io
import json
import os
import sys
from pathlib import Path

import pytest
from line_engine import LineEngine

from app.__main__ import main
from app.cli.file_job import _complete_lines
from app.cli.translate import FileOptions, translate
from app.decoding.options import DecodingOptions
from app.errors import InvalidOption


def run(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


@pytest.fixture
def source_file(tmp_path: Path) -> Path:
    path = tmp_path / "in.txt"
    path.write_bytes(b"".join(b"line %d\n" % number for number in range(1, 1001)))
    return path


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.txt"


def test_arguments_are_translated_in_order(engine: LineEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("translate", "-s", "en", "-t", "pt", "good morning", "", "bye") == 0
    assert capsys.readouterr().out == "GOOD MORNING\n\nBYE\n"
    assert engine.stopped


def test_a_file_keeps_its_lines_its_ends_and_its_order(
    engine: LineEngine, tmp_path: Path, output: Path
) -> None:
    source_file = tmp_path / "in.txt"
    source_file.write_bytes("\ufeffone\r\n\n  \ntwo\x85\rb\né\x00|x\r\r\nlast".encode())
    assert run("translate", "-s", "en", "-t", "pt", "--workers", "1", "-i", source_file, "-o", output) == 0
    assert output.read_bytes() == "\ufeffONE\r\n\n  \nTWO\x85\rB\nÉ\x00 X\r\r\nLAST".encode()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out.txt"]


def test_a_large_file_streams_with_the_queue_full_and_never_overfull(
    engine: LineEngine, source_file: Path, output: Path
) -> None:
    source_file.write_bytes(b"a\n" * 20_000)
    engine.hold_until = 256
    assert run("translate", "--workers", "1", "-i", source_file, "-o", output) == 0
    assert output.read_bytes() == b"A\n" * 20_000
    assert engine.most_running == 256


def test_lines_that_may_be_incomplete_are_named(
    engine: LineEngine, source_file: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source_file.write_text("short\n" + "long\n" * 7)
    assert run("translate", "--workers", "1", "-i", source_file, "-o", output) == 0
    assert "7 of the lines reached the limit" in (errors := capsys.readouterr().err)
    assert "2, 3, 4, 5, 6 and others" in errors


def test_ctrl_c_keeps_what_is_done_and_says_how_to_resume(
    engine: LineEngine, source_file: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.interrupt_at = 700
    assert run("translate", "--workers", "1", "-i", source_file, "-o", output) == 130
    assert "--resume" in capsys.readouterr().err
    assert not output.exists()
    partial = output.with_name("out.txt.partial")
    num_done = len(partial.read_bytes().splitlines())
    assert 0 < num_done < 700
    assert engine.stopped

    engine.interrupt_at = None
    with partial.open("ab") as file:
        file.write(b"LINE half-writ" * 5000)
    assert run("translate", "--workers", "1", "-i", source_file, "-o", output, "--resume") == 0
    assert output.read_bytes() == source_file.read_bytes().upper()
    assert engine.num_requests == 1000 - num_done
    assert not partial.exists()


def test_resuming_with_another_input_is_refused(
    engine: LineEngine, source_file: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.interrupt_at = 700
    run("translate", "--workers", "1", "-i", source_file, "-o", output)
    partial = output.with_name("out.txt.partial")
    before = partial.read_bytes()
    source_file.write_text("something else\n")
    engine.interrupt_at = None
    assert run("translate", "--workers", "1", "-i", source_file, "-o", output, "--resume") == 2
    assert "another input_sha256 and another input_bytes" in capsys.readouterr().err
    assert run("translate", "--workers", "1", "-i", source_file, "-o", output) == 2
    assert "--resume" in capsys.readouterr().err
    assert partial.read_bytes() == before
    partial.with_name("out.txt.partial.json").write_text("{}")
    assert run("translate", "--workers", "1", "-i", source_file, "-o", output, "--resume") == 2
    assert "missing or damaged" in capsys.readouterr().err
    assert run("translate", "--workers", "1", "-i", source_file, "-o", output, "--force") == 0
    assert output.read_text() == "SOMETHING ELSE\n"


def test_the_sidecar_states_what_the_partial_output_belongs_to(
    engine: LineEngine, source_file: Path, output: Path
) -> None:
    engine.interrupt_at = 700
    run("translate", "--workers", "1", "-i", source_file, "-o", output)
    facts = json.loads(output.with_name("out.txt.partial.json").read_text())
    assert facts["input_sha256"] == hashlib.sha256(source_file.read_bytes()).hexdigest()
    assert facts["input_bytes"] == source_file.stat().st_size
    assert (facts["source"], facts["target"], facts["model"]) == ("en", "pt", "en-pt")


def test_resuming_what_was_never_begun_begins_it(engine: LineEngine, source_file: Path, output: Path) -> None:
    assert run("translate", "--workers", "1", "-i", source_file, "-o", output, "--resume") == 0
    assert output.read_bytes() == source_file.read_bytes().upper()


def test_an_existing_output_is_replaced_only_by_force(
    engine: LineEngine, source_file: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output.write_text("precious")
    assert run("translate", "--workers", "1", "-i", source_file, "-o", output) == 2
    assert "--force" in capsys.readouterr().err
    assert output.read_text() == "precious"
    assert run("translate", "--workers", "1", "-i", source_file, "-o", output, "--force") == 0
    assert output.read_bytes() == source_file.read_bytes().upper()


def test_an_output_in_a_missing_folder_names_the_folder(
    engine: LineEngine, source_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "absent"
    assert run("translate", "--workers", "1", "-i", source_file, "-o", folder / "x") == 2
    assert capsys.readouterr().err == (
        f"dragoman: {folder} is not a folder; make it, or name another output\n"
    )


def test_the_input_is_never_the_output(engine: LineEngine, source_file: Path) -> None:
    before = source_file.read_bytes()
    assert run("translate", "-i", source_file, "-o", source_file, "--force") == 2
    assert source_file.read_bytes() == before


def test_a_broken_line_is_named_before_any_work(
    engine: LineEngine, source_file: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source_file.write_bytes(b"fine\n" * 500 + b"ol\xe1\n")
    assert run("translate", "--workers", "1", "-i", source_file, "-o", output) == 2
    assert "line 501 is not valid utf-8" in capsys.readouterr().err
    assert engine.num_requests == 0
    assert not output.with_name("out.txt.partial").exists()
    assert run("translate", "--workers", "1", "-i", source_file, "-o", output, "--encoding", "latin-1") == 0
    assert output.read_bytes().endswith("OLÁ\n".encode())


def test_a_pipe_is_translated_line_by_line(
    engine: LineEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = tmp_path / "stdin"
    source.write_bytes(b"one\r\n\ntwo\nthree")
    written = io.BytesIO()
    with source.open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, write_through=True))
        assert run("translate", "-s", "en", "-t", "pt") == 0
        assert written.getvalue() == b"ONE\r\n\nTWO\nTHREE"


@pytest.mark.parametrize(
    "arguments",
    [
        ["-i", "in.txt"],
        ["-o", "out.txt"],
        ["--resume", "text"],
        ["-i", "in.txt", "-o", "out.txt", "text"],
        ["-i", "absent.txt", "-o", "out.txt"],
        ["--bundle", "a", "--bundles", "b", "text"],
        ["--encoding", "utf-16", "text"],
        ["--workers", "0", "text"],
        ["--variant", "tpu", "text"],
        ["--beam-size", "0", "text"],
        ["--beam-size", "17", "text"],
        ["--length-penalty", "-1", "text"],
        ["--report", "report.json", "text"],
    ],
)
def test_contradicting_or_wrong_options_are_usage_errors_without_traceback(
    engine: LineEngine,
    source_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
) -> None:
    monkeypatch.chdir(source_file.parent)
    assert run("translate", *arguments) == 2
    errors = capsys.readouterr().err
    assert errors
    assert "Traceback" not in errors
    assert engine.num_requests == 0


def translate_file(file: FileOptions, decoding: DecodingOptions | None = None) -> None:
    translate(
        [],
        file,
        source=None,
        target=None,
        encoding="utf-8",
        overrides={"num_workers": 1},
        **({} if decoding is None else {"decoding": decoding}),
    )


def test_every_line_is_decoded_as_asked_for(engine: LineEngine, source_file: Path, output: Path) -> None:
    translate_file(FileOptions(source_file, output, resume=False, force=False))
    assert engine.options == {DecodingOptions()}
    engine.options.clear()
    beam = DecodingOptions(beam_size=4, length_penalty=0.6)
    translate_file(FileOptions(source_file, output, resume=False, force=True), beam)
    assert engine.options == {beam}


def test_the_report_counts_what_was_done(engine: LineEngine, source_file: Path, output: Path) -> None:
    source_file.write_text("short\n\nlong\n\ufeffx\n")
    report = output.with_name("report.json")
    beam = DecodingOptions(beam_size=4, length_penalty=0.6)
    translate_file(FileOptions(source_file, output, resume=False, force=False, report=report), beam)
    facts = json.loads(report.read_text())
    assert facts.pop("elapsed_s") > 0
    # The engine counts two tokens on each side of every line that is not empty.
    assert facts == {
        "model": "en-pt",
        "source": "en",
        "target": "pt",
        "variant": "cpu-int8",
        "devices": ["cpu"],
        "use_shortlist": True,
        "beam_size": 4,
        "length_penalty": 0.6,
        "num_lines": 4,
        "num_source_tokens": 6,
        "num_target_tokens": 6,
        "lines_with_warnings": {"target_truncated": [3]},
    }


def test_a_resumed_run_reports_its_own_lines(engine: LineEngine, source_file: Path, output: Path) -> None:
    report = output.with_name("report.json")
    file = FileOptions(source_file, output, resume=True, force=False, report=report)
    engine.interrupt_at = 700
    with pytest.raises(KeyboardInterrupt):
        translate_file(file)
    assert not report.exists()
    num_done = len(output.with_name("out.txt.partial").read_bytes().splitlines())
    engine.interrupt_at = None
    translate_file(file)
    assert json.loads(report.read_text())["num_lines"] == 1000 - num_done


def test_a_report_never_replaces_another_file_by_accident(
    engine: LineEngine, source_file: Path, output: Path
) -> None:
    before = source_file.read_bytes()
    other = output.with_name("other.json")
    other.write_text("precious")
    for report, force, words in (
        (source_file, True, "over the input or the output"),
        (output, True, "over the input or the output"),
        (output.with_name("out.txt.partial"), True, "over the input or the output"),
        (other, False, "pass --force"),
        (output.parent, True, "exists"),
        (output.parent / "absent" / "r", True, "is not a folder"),
    ):
        with pytest.raises(InvalidOption, match=words):
            translate_file(FileOptions(source_file, output, resume=False, force=force, report=report))
    assert (source_file.read_bytes(), other.read_text()) == (before, "precious")
    assert engine.num_requests == 0
    translate_file(FileOptions(source_file, output, resume=False, force=True, report=other))
    assert json.loads(other.read_text())["num_lines"] == 1000


def test_no_bar_is_left_in_a_log(
    engine: LineEngine, source_file: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    translate_file(FileOptions(source_file, output, resume=False, force=False))
    assert capsys.readouterr().err == ""


def test_the_command_line_says_how_to_decode(
    engine: LineEngine, source_file: Path, output: Path, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    arguments = ["--beam-size", "4", "--length-penalty", "0.6", "--no-shortlist", "--report", report]
    assert run("translate", "--workers", "1", "-i", source_file, "-o", output, *arguments) == 0
    assert engine.options == {DecodingOptions(beam_size=4, length_penalty=0.6)}
    facts = json.loads(report.read_text())
    assert (facts["beam_size"], facts["length_penalty"], facts["use_shortlist"]) == (4, 0.6, False)


def test_arguments_and_pipes_are_decoded_as_asked_for_too(engine: LineEngine) -> None:
    assert run("translate", "-s", "en", "-t", "pt", "--beam-size", "4", "text") == 0
    assert engine.options == {DecodingOptions(beam_size=4)}


def test_resuming_with_another_decoding_is_refused(
    engine: LineEngine, source_file: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["translate", "--workers", "1", "-i", source_file, "-o", output]
    engine.interrupt_at = 700
    assert run(*command, "--beam-size", "4") == 130
    capsys.readouterr()
    engine.interrupt_at = None
    assert run(*command, "--resume") == 2
    assert "was made with another beam_size" in capsys.readouterr().err
    assert run(*command, "--resume", "--beam-size", "4", "--length-penalty", "0.5") == 2
    assert "was made with another length_penalty" in capsys.readouterr().err
    assert run(*command, "--resume", "--beam-size", "4") == 0


def test_a_partial_output_from_before_beams_was_greedy(
    engine: LineEngine, source_file: Path, output: Path
) -> None:
    command = ["translate", "--workers", "1", "-i", source_file, "-o", output]
    engine.interrupt_at = 700
    assert run(*command) == 130
    sidecar = output.with_name("out.txt.partial.json")
    facts = json.loads(sidecar.read_text())
    del facts["beam_size"], facts["length_penalty"]
    sidecar.write_text(json.dumps(facts))
    engine.interrupt_at = None
    assert run(*command, "--resume") == 0


def test_complete_lines_are_counted_across_chunks(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes((b"x" * 999 + b"\n") * 3000 + b"half")
    assert _complete_lines(path) == (3000, 3_000_000)
    path.write_bytes(b"")
    assert _complete_lines(path) == (0, 0)
    assert os.path.getsize(path) == 0
