import signal
from pathlib import Path

import pytest
from service_process import Service, Start

from app.bundle import default_directory

SHIPPED = default_directory() / "en-pt"
pytestmark = [
    pytest.mark.live,
]


def wait_for_a_line(run: Service, partial: Path) -> None:
    run.wait_until(lambda: partial.exists() and partial.stat().st_size > 0, "a finished line")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_file_resumes_to_the_same_bytes(
    start: Start, tmp_path: Path, number: signal.Signals
) -> None:
    source, whole, output = tmp_path / "in", tmp_path / "whole", tmp_path / "out"
    source.write_text("".join(f"The {number} boats left the harbour.\n" for number in range(400)))
    common = ["-m", "app", "translate", "--bundle", str(SHIPPED), "--workers", "1", "-i", str(source)]
    assert start(*common, "-o", str(whole)).exit_code() == 0

    partial = tmp_path / "out.partial"
    interrupted = start(*common, "-o", str(output))
    wait_for_a_line(interrupted, partial)
    interrupted.signal(number)
    assert interrupted.exit_code() == 130
    assert "--resume" in interrupted.log_text()
    assert "Traceback" not in interrupted.log_text()
    assert not output.exists()
    num_done = partial.read_bytes().count(b"\n")
    assert 0 < num_done < 400

    resumed = start(*common, "-o", str(output), "--resume")
    assert resumed.exit_code() == 0
    assert output.read_bytes() == whole.read_bytes()
    assert whole.read_bytes().count(b"\n") == 400


def test_of_two_runs_with_one_output_the_second_is_refused_and_the_first_is_whole(
    start: Start, tmp_path: Path
) -> None:
    source, output = tmp_path / "in", tmp_path / "out"
    source.write_text("".join(f"The {number} boats left the harbour.\n" for number in range(400)))
    command = ["-m", "app", "translate", "--bundle", str(SHIPPED), "--workers", "1", "-i", str(source)]
    command += ["-o", str(output)]
    first = start(*command)
    wait_for_a_line(first, tmp_path / "out.partial")
    first.signal(signal.SIGSTOP)
    for options in ([], ["--resume", "--force"]):
        second = start(*command, *options)
        assert second.exit_code() == 1
        assert f"process {first.process.pid} is writing {output} now" in second.log_text()
    first.signal(signal.SIGCONT)
    assert first.exit_code() == 0
    assert output.read_bytes().count(b"\n") == 400
    assert not list(tmp_path.glob("out.*"))


def test_a_killed_run_leaves_its_output_to_the_next(start: Start, tmp_path: Path) -> None:
    source, output, partial = tmp_path / "in", tmp_path / "out", tmp_path / "out.partial"
    source.write_text("".join(f"The {number} boats left the harbour.\n" for number in range(400)))
    command = ["-m", "app", "translate", "--bundle", str(SHIPPED), "--workers", "1", "-i", str(source)]
    command += ["-o", str(output)]
    killed = start(*command)
    wait_for_a_line(killed, partial)
    killed.signal(signal.SIGKILL)
    killed.exit_code()
    assert (tmp_path / "out.partial.lock").exists()
    assert start(*command, "--resume").exit_code() == 0
    assert output.read_bytes().count(b"\n") == 400
    assert not list(tmp_path.glob("out.*"))
