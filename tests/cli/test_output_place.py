import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from line_engine import LineEngine

from app.__main__ import main
from app.cli.output_place import OutputPlace
from app.errors import InvalidOption, Unavailable


def run(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["translate", "--workers", "1", *(str(argument) for argument in arguments)])
    return int(ended.value.code or 0)


@pytest.fixture
def source_file(tmp_path: Path) -> Path:
    path = tmp_path / "in.txt"
    path.write_text("one\ntwo\n")
    return path


def place_at(output: Path, source_file: Path) -> OutputPlace:
    return OutputPlace(output, source_file=source_file, resume=False, force=False)


@pytest.mark.parametrize("suffix", ["", ".partial", ".partial.json", ".partial.json.new", ".partial.lock"])
@pytest.mark.parametrize("link", [None, os.symlink, os.link])
@pytest.mark.parametrize("option", ["--force", "--resume", None])
def test_the_input_is_none_of_the_files_that_a_run_writes(
    engine: LineEngine,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    suffix: str,
    link: Callable[[Path, Path], None] | None,
    option: str | None,
) -> None:
    source_file = tmp_path / f"book{suffix}"
    source_file.write_text("precious\n")
    if link is not None:
        output = tmp_path / "other"
        link(source_file, tmp_path / f"other{suffix}")
    else:
        output = tmp_path / "book"
    before = sorted(path.name for path in tmp_path.iterdir())
    assert run("-i", source_file, "-o", output, *([option] if option else [])) == 2
    errors = capsys.readouterr().err
    assert "is the same file as" in errors
    assert "name another output" in errors
    assert "--force" not in errors
    assert source_file.read_text() == "precious\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert engine.num_requests == 0


def test_two_runs_never_write_one_output(
    engine: LineEngine, source_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    with place_at(output, source_file):
        for option in ([], ["--force"], ["--resume"]):
            assert run("-i", source_file, "-o", output, *option) == 1
            assert f"process {os.getpid()} is writing {output} now" in capsys.readouterr().err
        assert engine.num_requests == 0
    assert run("-i", source_file, "-o", output) == 0
    assert output.read_text() == "ONE\nTWO\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out"]


def test_the_place_is_held_while_the_engine_works(
    engine: LineEngine, source_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = []
    start = engine.start

    def start_and_try() -> None:
        start()
        with pytest.raises(Unavailable) as caught, place_at(tmp_path / "out", source_file):
            pass
        refused.append(caught.value)

    monkeypatch.setattr(engine, "start", start_and_try)
    assert run("-i", source_file, "-o", tmp_path / "out") == 0
    assert len(refused) == 1
    assert refused[0].retryable


def test_a_lock_whose_process_has_died_is_taken(source_file: Path, tmp_path: Path) -> None:
    place = place_at(tmp_path / "out", source_file)
    place.lock.write_text("a process that was killed left this, longer than any id\n")
    with place:
        assert place.lock.read_text() == f"{os.getpid()}\n"
    assert not place.lock.exists()


def test_a_lock_that_is_removed_between_opening_and_locking_is_made_anew(
    source_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = place_at(tmp_path / "out", source_file)
    lock, num_calls = place._lock, 0

    def remove_then_lock(descriptor: int) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            place.lock.unlink()
        lock(descriptor)

    monkeypatch.setattr(place, "_lock", remove_then_lock)
    with place, pytest.raises(Unavailable), place_at(tmp_path / "out", source_file):
        pass
    assert num_calls == 2


def test_a_folder_is_refused_at_the_start_even_by_force(
    engine: LineEngine, source_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "somedir").mkdir()
    for output in (tmp_path / "somedir", ".", ".."):
        for option in ("--force", "--resume"):
            assert run("-i", source_file, "-o", output, option) == 2
            assert f"{output} is a folder; name a file" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "somedir"]
    assert engine.num_requests == 0


@pytest.mark.parametrize("parent", ["absent", "in.txt"])
def test_a_missing_folder_is_named_at_the_start(
    engine: LineEngine, source_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], parent: str
) -> None:
    assert run("-i", source_file, "-o", tmp_path / parent / "out") == 2
    assert f"{tmp_path / parent} is not a folder; make it" in capsys.readouterr().err
    assert engine.num_requests == 0


@pytest.mark.parametrize("reason", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_folder_that_cannot_be_written_is_refused_at_the_start(
    engine: LineEngine,
    source_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    reason: int,
) -> None:
    really_open = os.open

    def open_unless_it_creates(path: str | Path, flags: int, *arguments: int) -> int:
        if flags & os.O_CREAT and Path(path).parent == tmp_path:
            raise OSError(reason, os.strerror(reason), str(path))
        return really_open(path, flags, *arguments)

    output = tmp_path / "out"
    monkeypatch.setattr(os, "open", open_unless_it_creates)
    assert run("-i", source_file, "-o", output) == 2
    errors = capsys.readouterr().err
    assert f"{output} cannot be written" in errors
    assert os.strerror(reason) in errors
    assert engine.num_requests == 0


def test_what_is_no_ordinary_file_is_never_written_or_replaced(
    engine: LineEngine, source_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert run("-i", source_file, "-o", tmp_path / "pipe", "--force") == 2
    assert "not an ordinary file" in capsys.readouterr().err
    precious = tmp_path / "precious"
    precious.write_text("precious\n")
    for suffix in (".partial", ".partial.json", ".partial.json.new", ".partial.lock"):
        link = tmp_path / f"out{suffix}"
        link.symlink_to(precious)
        for option in ("--force", "--resume"):
            assert run("-i", source_file, "-o", tmp_path / "out", option) == 2
            assert f"{link} is in the way" in capsys.readouterr().err
        link.unlink()
    assert precious.read_text() == "precious\n"
    assert (tmp_path / "pipe").is_fifo()


def test_an_output_that_appears_during_the_run_is_not_replaced(
    engine: LineEngine,
    source_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "out"
    start = engine.start

    def start_late() -> None:
        start()
        output.write_text("precious")

    monkeypatch.setattr(engine, "start", start_late)
    assert run("-i", source_file, "-o", output) == 2
    assert "--resume --force" in capsys.readouterr().err
    assert output.read_text() == "precious"
    monkeypatch.setattr(engine, "start", start)
    assert run("-i", source_file, "-o", output, "--resume", "--force") == 0
    assert output.read_text() == "ONE\nTWO\n"
    assert engine.num_requests == 0


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_partial_output_that_is_taken_away_is_noticed(
    engine: LineEngine,
    source_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_replaced: bool,
) -> None:
    partial = tmp_path / "out.partial"
    start = engine.start

    def start_late() -> None:
        start()
        partial.unlink()
        if is_replaced:
            partial.write_text("other")

    monkeypatch.setattr(engine, "start", start_late)
    assert run("-i", source_file, "-o", tmp_path / "out") == 2
    assert "was moved or replaced" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_file_system_without_locks_is_named(
    source_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(InvalidOption, match="No locks available"), place_at(tmp_path / "out", source_file):
        pass


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_as_output_is_refused_since_the_final_rename_would_replace_it(
    engine: LineEngine, source_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], exists: bool
) -> None:
    real, link = tmp_path / "real", tmp_path / "out"
    if exists:
        real.write_text("old\n")
    link.symlink_to(real)
    assert run("-i", source_file, "-o", link, "--force") == 2
    assert f"{link} is a link; name the file that it points to, {real}" in capsys.readouterr().err
    assert link.is_symlink()
    assert engine.num_requests == 0
