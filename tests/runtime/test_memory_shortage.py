"""A lack of memory is told from damage, whatever noticed it, and says what helps."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from app.bundle import default_directory, open_bundle
from app.cli import loading
from app.cli.placement import place_models
from app.errors import BundleCorrupt, BundleError, BundleUnsupported
from app.runtime.memory_shortage import lacks_memory
from app.settings import Settings

ROOT = Path(__file__).resolve().parents[2]


def raised_from(cause: BaseException) -> BundleCorrupt:
    error = BundleCorrupt("onnxruntime cannot load the graph")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "x"),
        RuntimeError("[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : std::bad_alloc"),
        RuntimeError("bfc_arena.cc: Failed to allocate memory for requested buffer of size 1048576"),
        RuntimeError("CUDA failure 2: out of memory ; GPU=0"),
        RuntimeError("CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED"),
    ],
)
def test_a_lack_of_memory_is_seen_bare_and_behind_other_errors(error: Exception) -> None:
    assert lacks_memory(error)
    assert lacks_memory(raised_from(error))
    assert lacks_memory(raised_from(raised_from(error)))


def test_other_errors_are_none_even_in_a_circle_or_when_a_message_of_ours_says_so() -> None:
    assert not lacks_memory(ValueError("x"))
    assert not lacks_memory(OSError(errno.ENOENT, "x"))
    assert not lacks_memory(BundleCorrupt("/models/out of memory/weights.bin is missing"))
    circle = raised_from(ValueError("x"))
    circle.__cause__.__cause__ = circle  # type: ignore[union-attr]
    assert not lacks_memory(circle)


@pytest.mark.parametrize("error", [MemoryError(), raised_from(RuntimeError("std::bad_alloc"))])
def test_a_start_without_enough_memory_does_not_blame_the_bundle(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_arguments: object, **_named: object) -> None:
        raise error

    monkeypatch.setattr(loading, "load_served_model", fail)
    settings = Settings(device="cpu")
    bundle = open_bundle(default_directory() / "en-pt", verify=False)
    with pytest.raises(BundleError, match=r"en-pt could not be loaded: there is too little memory") as caught:
        loading.load_models([bundle], settings, place_models(settings, [bundle]))
    assert not isinstance(caught.value, BundleCorrupt | BundleUnsupported)


LOAD_IN_LITTLE = """
import resource, sys
from pathlib import Path
from app.bundle import open_bundle
from app.runtime.memory_shortage import lacks_memory
from app.runtime.onnx_model import load_model
bundle = open_bundle(Path(sys.argv[1]), verify=False)
taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + 8_000_000,) * 2)
try:
    load_model(bundle, variant="cpu-fp32", use_shortlist=False)
except BaseException as error:
    print(type(error).__name__, lacks_memory(error))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits its own address space")
def test_what_onnxruntime_itself_raises_for_want_of_memory_is_recognised() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOAD_IN_LITTLE, str(default_directory() / "en-pt")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split()[1:] == ["True"], done.stdout + done.stderr
