"""What the choice of devices makes of the other settings, and how a refused GPU ends a command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from app.bundle import Bundle
from app.cli import loading
from app.cli.device_reports import gpu_memory, log_choice
from app.cli.loading import load_models
from app.cli.opening import open_reloader
from app.cli.placement import Placement, place_models, tell_placement
from app.errors import BundleUnsupported, DeviceUnavailable, SettingsError
from app.runtime.device import Device
from app.runtime.device_choice import DeviceChoice, Surroundings
from app.runtime.gpu.cuda_driver import CudaDriver, Gpu, GpuMemory
from app.runtime.onnx_providers import InstalledRuntime
from app.settings import Settings, available_cores, load_settings

ROOT = Path(__file__).resolve().parents[2]
RUNTIME = InstalledRuntime("1.32.0", ("CUDAExecutionProvider", "CPUExecutionProvider"), "13.0")


def bundle(*variants: str) -> Any:
    manifest = SimpleNamespace(id="en-pt", variants=dict.fromkeys(variants or ("cpu-int8", "cuda-fp16")))
    return SimpleNamespace(manifest=manifest, path=Path("en-pt"))


class TwoGpus(CudaDriver):
    """A driver that shows two GPUs; asked for the memory of the second, it refuses."""

    def __init__(self) -> None:
        names = enumerate(("Fake H200", "Fake H200"))
        super().__init__(
            None, version=(13, 0), gpus=tuple(Gpu(index, name, (9, 0), 140 << 30) for index, name in names)
        )

    def memory_info(self, index: int) -> GpuMemory:
        if index:
            raise DeviceUnavailable("the GPU has fallen off the bus")
        return GpuMemory(free_bytes=100, total_bytes=140)


THERE = Surroundings(lambda: RUNTIME, TwoGpus, lambda _index: None)


def placed(**settings: Any) -> Placement:
    return place_models(load_settings(settings), [bundle()], surroundings=THERE)


def test_a_cpu_gets_a_worker_a_core_and_moderate_batches() -> None:
    placement = placed(device="cpu")
    assert placement.choice.devices == (Device(),)
    assert placement.num_workers == available_cores()
    assert (placement.max_rows, placement.max_admission_tokens) == (64, 1024)
    assert placement.gpu_memory_bytes is None


def test_gpus_get_a_worker_each_and_large_batches() -> None:
    placement = placed(gpu_memory_mb=3)
    assert placement.choice.devices == (Device("cuda", 0), Device("cuda", 1))
    assert (placement.num_workers, placement.max_rows, placement.max_admission_tokens) == (2, 256, 16_384)
    assert placement.gpu_memory_bytes == 3 * 1024 * 1024
    assert placed(device="cuda:1").num_workers == 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_set_goes_before_what_a_device_suggests(device: str) -> None:
    placement = placed(device=device, num_workers=2, max_rows=7, max_admission_tokens=99)
    assert (placement.num_workers, placement.max_rows, placement.max_admission_tokens) == (2, 7, 99)


@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:0"])
def test_another_number_of_workers_than_of_gpus_is_refused(device: str) -> None:
    with pytest.raises(SettingsError) as refused:
        placed(device=device, num_workers=3)
    assert refused.value.message.startswith("DRAGOMAN_NUM_WORKERS is 3, and cuda:0")
    assert "leave it at 'auto'" in refused.value.message


def test_a_command_tells_of_gpus_and_of_those_it_cannot_use_and_else_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def told(choice: DeviceChoice) -> str:
        tell_placement(Placement(choice, 1, 64, 1024))
        captured = capsys.readouterr()
        assert captured.out == ""
        return captured.err

    assert told(DeviceChoice((Device(),), "cpu-int8", "there is none")) == ""
    lost = DeviceChoice((Device(),), "cpu-int8", "no GPU is used: too old", is_second_best=True)
    assert told(lost) == "dragoman: cpu-int8: no GPU is used: too old\n"
    assert told(placed().choice).startswith("dragoman: cuda-fp16: cuda:0 (Fake H200, ")


def test_the_log_says_once_what_was_chosen_and_warns_of_a_gpu_that_lies_idle() -> None:
    idle = DeviceChoice((Device(),), "cpu-int8", "no GPU is used: too old", is_second_best=True)
    with capture_logs() as lines:
        for choice in (DeviceChoice((Device(),), "cpu-int8", "there is none"), idle, placed().choice):
            log_choice(choice)
    assert [line["log_level"] for line in lines] == ["info", "warning", "info"]
    assert lines[1] == {
        "event": "device",
        "log_level": "warning",
        "devices": ["cpu"],
        "variant": "cpu-int8",
        "reason": "no GPU is used: too old",
    }
    assert lines[2]["devices"] == ["cuda:0", "cuda:1"]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of every `load_served_model`, which loads nothing."""
    calls: list[dict[str, Any]] = []

    def load(bundle: Bundle, **named: Any) -> Any:
        calls.append(named)
        return bundle

    monkeypatch.setattr(loading, "load_served_model", load)
    return calls


def test_a_reload_loads_onto_the_devices_of_the_start(loads: list[dict[str, Any]]) -> None:
    settings, placement = Settings(cuda_graphs=False), placed(gpu_memory_mb=3)
    load_models([bundle()], settings, placement)
    engine: Any = SimpleNamespace(draining=False)
    reloader = open_reloader(engine, [], settings, placement, observe=lambda _outcome: None)
    load: Callable[[Any], Any] = reloader._load
    load(bundle())
    assert loads[0] == loads[1]
    assert loads[0] == {
        "variant": "cuda-fp16",
        "max_rows": 256,
        "use_shortlist": True,
        "devices": (Device("cuda", 0), Device("cuda", 1)),
        "gpu_memory_bytes": 3 << 20,
        "use_cuda_graphs": False,
    }


def test_a_bundle_without_graphs_for_gpus_is_refused_by_a_reload_of_a_service_on_gpus(
    loads: list[dict[str, Any]],
) -> None:
    with pytest.raises(BundleUnsupported, match="en-pt has no variant cuda-fp16"):
        load_models([bundle("cpu-int8", "cpu-fp32")], Settings(), placed())
    assert loads == []


def test_the_memory_of_a_gpu_that_does_not_answer_is_left_out() -> None:
    [memory] = gpu_memory(placed().choice)
    assert (memory.device, memory.used_bytes, memory.total_bytes) == ("cuda:0", 40, 140)
    assert memory.held_bytes >= 0
    assert list(gpu_memory(placed(device="cpu").choice)) == []


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("DRAGOMAN_")}
    return subprocess.run(
        [sys.executable, "-m", "app", *arguments],
        cwd=ROOT,
        env=variables | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


needs_cpu_runtime = pytest.mark.skipif(
    "CUDAExecutionProvider" in Surroundings().runtime().providers,
    reason="the installed onnxruntime is the one for GPUs",
)


@needs_cpu_runtime
@pytest.mark.parametrize(
    ("arguments", "environment", "asked"),
    [
        (("serve", "--device", "cuda", "--port", "0"), {}, "device cuda"),
        (("serve", "--port", "0"), {"DRAGOMAN_VARIANT": "cuda-fp16"}, "variant cuda-fp16"),
        (("translate", "-s", "en", "-t", "pt", "--device", "cuda:1", "Hello"), {}, "device cuda:1"),
    ],
)
def test_a_gpu_that_was_asked_for_ends_the_command_by_one_line(
    arguments: tuple[str, ...], environment: dict[str, str], asked: str
) -> None:
    ended = run(*arguments, **environment)
    assert ended.returncode == 1
    assert ended.stdout == ""
    [line] = ended.stderr.splitlines()
    assert line.startswith(f"dragoman: {asked} cannot be used: this onnxruntime ")
    assert "has no CUDA provider" in line
    assert "install the extra gpu instead of cpu" in line


def test_settings_at_odds_end_the_command_as_wrong_usage() -> None:
    ended = run("serve", "--device", "cpu", DRAGOMAN_VARIANT="cuda-fp16")
    assert ended.returncode == 2
    [line] = ended.stderr.splitlines()
    assert line.startswith("dragoman: DRAGOMAN_DEVICE is 'cpu' and DRAGOMAN_VARIANT is 'cuda-fp16'")
