import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from line_engine import LineEngine

from app.__main__ import main
from app.cli import file_job as file_job_module
from app.cli.file_job import JobIdentity, PartialOutput, inspect_input, inspected_lines
from app.cli.lines import Line, LineDecoder, lines_of_file
from app.cli.output_place import OutputPlace
from app.errors import InvalidOption, InvalidRequest

NUM_LINES = 6
NUM_DONE = 3


class Crashed(BaseException):
    """The process ends here."""


class CrashingSystem:
    """Lets a number of changes of files pass, then acts as the machine of a dead process: nothing passes.

    Attributes:
        num_left: changes that pass; None lets all.
        passed: the changes that passed, in order: what was done to which file.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_left: int | None = None
        self.passed: list[tuple[str, str]] = []
        really_open = os.open
        for name in ("write", "fsync", "replace", "unlink", "truncate", "ftruncate"):
            monkeypatch.setattr(os, name, self._guarded(name, getattr(os, name)))
        open_path = Path.open
        guarded_open = self._guarded("open", open_path)

        def open_file(path: Path, mode: str = "r", *arguments: Any, **named: Any) -> Any:
            return (open_path if mode.startswith("r") and "+" not in mode else guarded_open)(
                path, mode, *arguments, **named
            )

        def open_descriptor(path: Any, flags: int, *arguments: Any) -> int:
            if flags & os.O_CREAT:
                return int(self._guarded("open", really_open)(path, flags, *arguments))
            return really_open(path, flags, *arguments)

        monkeypatch.setattr(Path, "open", open_file)
        monkeypatch.setattr(os, "open", open_descriptor)

    def _guarded(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(what: Any, *arguments: Any, **named: Any) -> Any:
            if self.num_left is not None:
                if self.num_left == 0:
                    raise Crashed
                self.num_left -= 1
            target = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else str(what)
            self.passed.append((name, Path(target).name))
            return call(what, *arguments, **named)

        return guarded


def identity_of(job: str) -> JobIdentity:
    return JobIdentity(
        input_sha256=job,
        input_bytes=1,
        encoding="utf-8",
        source="en",
        target="pt",
        model="en-pt",
        manifest_sha256="0",
        variant="cpu-int8",
        use_shortlist=True,
    )


def lines_of(job: str) -> list[bytes]:
    return [b"%s %d\n" % (job.encode(), number) for number in range(NUM_LINES)]


def translate(job: str, folder: Path, *, resume: bool, force: bool, num_lines: int = NUM_LINES) -> None:
    """A run whose lines begin with the job's name; it is interrupted when it may not write them all."""
    source_file = folder.parent / "in"
    source_file.touch()
    place = OutputPlace(folder / "out", source_file=source_file, resume=resume, force=force)
    with place, PartialOutput(place, identity_of(job), resume=resume) as output:
        for line in lines_of(job)[output.num_done : num_lines]:
            output.write(line)
        if num_lines == NUM_LINES:
            output.finish()


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="names of open files need /proc")
@pytest.mark.parametrize("is_half_written", [False, True])
def test_wherever_a_run_is_killed_the_next_resumes_rightly_or_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_half_written: bool
) -> None:
    num_crashes = 0
    resumed = set()
    for num_passing in range(100):
        folder = tmp_path / str(num_passing)
        folder.mkdir()
        (folder / "out").write_bytes(b"the output of an earlier run\n")
        translate("old", folder, resume=False, force=True, num_lines=NUM_DONE)
        with monkeypatch.context() as patched:
            system = CrashingSystem(patched)
            system.num_left = num_passing
            # Every line goes to the disk by itself, so that a run may be killed between any two.
            patched.setattr(file_job_module, "_SYNC_EVERY_S", 0.0)
            has_crashed = False
            try:
                translate("new", folder, resume=False, force=True)
            except Crashed:
                has_crashed = True
                num_crashes += 1
        assert (folder / "out").read_bytes() in (b"the output of an earlier run\n", b"".join(lines_of("new")))
        if is_half_written and (folder / "out.partial").exists():
            with (folder / "out.partial").open("ab") as file:
                file.write(b"half a li")
        for job in ("old", "new"):
            again = tmp_path / f"{num_passing} {job}"
            shutil.copytree(folder, again)
            try:
                translate(job, again, resume=True, force=True)
            except InvalidOption:
                assert has_crashed
            else:
                resumed.add(job)
                assert (again / "out").read_bytes() == b"".join(lines_of(job))
                assert [path.name for path in again.iterdir()] == ["out"]
        if not has_crashed:
            break
    assert not has_crashed
    assert num_crashes > NUM_LINES + 10
    assert resumed == {"old", "new"}


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="names of open files need /proc")
def test_a_job_that_ran_elsewhere_says_which_variant_goes_on_with_it(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    translate("a", folder, resume=False, force=False, num_lines=1)
    moved = identity_of("a").model_copy(update={"variant": "cuda-fp16"})
    place = OutputPlace(folder / "out", source_file=tmp_path / "in", resume=True, force=False)
    with (
        place,
        pytest.raises(InvalidOption, match="another variant; restore that with --variant cpu-int8, or"),
    ):
        PartialOutput(place, moved, resume=True)


def test_old_lines_are_gone_from_the_disk_before_new_facts_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    translate("old", folder, resume=False, force=False, num_lines=NUM_DONE)
    system = CrashingSystem(monkeypatch)
    translate("new", folder, resume=False, force=True)
    assert [step for step in system.passed if "lock" not in step[1]] == [
        ("unlink", "out.partial"),
        ("fsync", "folder"),
        ("open", "out.partial.json.new"),
        ("fsync", "out.partial.json.new"),
        ("replace", "out.partial.json.new"),
        ("fsync", "folder"),
        ("open", "out.partial"),
        ("fsync", "folder"),
        ("open", "out.partial"),
        ("fsync", "out.partial"),
        ("replace", "out.partial"),
        ("fsync", "folder"),
        ("unlink", "out.partial.json"),
    ]


def test_a_full_disk_at_the_end_still_closes_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "in").touch()
    place = OutputPlace(folder / "out", source_file=tmp_path / "in", resume=False, force=False)
    with place:
        output = PartialOutput(place, identity_of("new"), resume=False)

        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            with pytest.raises(OSError, match="No space left"), output:
                output.write(b"line\n")
        assert output._file.closed


alterations = st.tuples(st.integers(0, 400), st.integers(0, 3), st.binary(max_size=4))


@given(alteration=alterations)
def test_no_line_of_a_changed_input_is_handed_out(
    alteration: tuple[int, int, bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("input") / "in"
    content = b"".join(b"line %d\n" % number for number in range(40))
    offset, num_removed, added = alteration
    changed = content[:offset] + added + content[offset + num_removed :]
    path.write_bytes(content)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(file_job_module, "_BLOCK_BYTES", 30)
        facts = inspect_input(path, LineDecoder("utf-8"))
        before = list(lines_of_file(path))
        assert list(inspected_lines(path, facts)) == before
        path.write_bytes(changed)
        handed_out: list[Line] = []
        if changed == content:
            handed_out.extend(inspected_lines(path, facts))
            assert handed_out == before
        else:
            with pytest.raises(InvalidRequest) as caught:
                handed_out.extend(inspected_lines(path, facts))
            # list.extend keeps what came before the error.
            assert f"at line {len(handed_out) + 1} or later" in caught.value.message
            assert handed_out == before[: len(handed_out)]


def run(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["translate", "--workers", "1", *(str(argument) for argument in arguments)])
    return int(ended.value.code or 0)


@pytest.mark.parametrize("change", [b"line 1\nother\n", b"", b"line 1\nline 2\nline 3\n"])
def test_an_input_that_changes_during_the_run_makes_no_output_and_keeps_what_is_done(
    engine: LineEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: bytes,
) -> None:
    source_file, output = tmp_path / "in", tmp_path / "out"
    content = b"line 1\nline 2\n"
    source_file.write_bytes(content)
    # A block is a line, so that the first line is known to be unchanged.
    monkeypatch.setattr(file_job_module, "_BLOCK_BYTES", 1)
    start = engine.start

    def start_late() -> None:
        start()
        source_file.write_bytes(change)

    monkeypatch.setattr(engine, "start", start_late)
    assert run("-i", source_file, "-o", output) == 2
    assert f"{source_file} was changed while it was translated" in (errors := capsys.readouterr().err)
    assert "--resume" in errors
    assert not output.exists()
    assert content.upper().startswith((tmp_path / "out.partial").read_bytes())
    monkeypatch.setattr(engine, "start", start)
    if change:
        assert (tmp_path / "out.partial").read_bytes()
        assert run("-i", source_file, "-o", output, "--resume") == 2
    source_file.write_bytes(content)
    assert run("-i", source_file, "-o", output, "--resume") == 0
    assert output.read_bytes() == content.upper()
