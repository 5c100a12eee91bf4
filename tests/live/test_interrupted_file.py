import signal
import time
from pathlib import Path

import pytest
from service_process import WAIT_S, Start

from app.bundle import MANIFEST_NAME, default_directory

SHIPPED = default_directory() / "en-pt"
pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(not (SHIPPED / MANIFEST_NAME).is_file(), reason="the shipped bundles are not built"),
]


def test_an_interrupted_file_resumes_to_the_same_bytes(start: Start, tmp_path: Path) -> None:
    source, whole, output = tmp_path / "in", tmp_path / "whole", tmp_path / "out"
    source.write_text("".join(f"The {number} boats left the harbour.\n" for number in range(400)))
    common = ["-m", "app", "translate", "--bundle", str(SHIPPED), "--workers", "1", "-i", str(source)]
    assert start(*common, "-o", str(whole)).exit_code() == 0

    partial = tmp_path / "out.partial"
    interrupted = start(*common, "-o", str(output))
    deadline_s = time.monotonic() + WAIT_S
    while not (partial.exists() and partial.stat().st_size > 0):
        assert interrupted.process.poll() is None, "it ended before it could be interrupted"
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
    interrupted.signal(signal.SIGINT)
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
