"""Every way a GPU may be missing: refused with the reason where one was asked for, explained under auto."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from fake_cuda import SYSTEM_DRIVER_MISMATCH, FakeCuda, FakeGpu

from app.errors import BundleUnsupported, DeviceUnavailable, DragomanError, SettingsError
from app.runtime.device import Device
from app.runtime.device_choice import Surroundings, choose_devices, require_gpu_graphs
from app.runtime.gpu.cuda_driver import CudaDriver, probe
from app.runtime.onnx_providers import InstalledRuntime

GPU_RUNTIME = InstalledRuntime("1.32.0", ("CUDAExecutionProvider", "CPUExecutionProvider"), "13.0")
CPU_RUNTIME = InstalledRuntime("1.32.0", ("AzureExecutionProvider", "CPUExecutionProvider"))
CPU = (Device(),)


def bundle(id_: str = "en-pt", *variants: str) -> Any:
    names = variants or ("cpu-fp32", "cpu-int8", "cuda-fp16")
    return SimpleNamespace(manifest=SimpleNamespace(id=id_, variants=dict.fromkeys(names)))


@dataclass
class Machine:
    """A machine to choose on; remembers which of its questions were asked."""

    runtime: InstalledRuntime = GPU_RUNTIME
    library: FakeCuda | None = field(default_factory=FakeCuda)
    faults: dict[int, str] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    has_gpu: bool = False

    def probe(self) -> CudaDriver:
        self.asked.append("driver")

        def load(name: str) -> Any:
            if self.library is None:
                raise OSError(f"{name}: cannot open shared object file")
            return self.library

        return probe(load)

    def provider_fault(self, index: int) -> str | None:
        self.asked.append(f"provider {index}")
        return self.faults.get(index)

    @property
    def surroundings(self) -> Surroundings:
        return Surroundings(lambda: self.runtime, self.probe, self.provider_fault, lambda: self.has_gpu)


def gpus(*changes: dict[str, Any]) -> FakeCuda:
    return FakeCuda(gpus=[FakeGpu(**change) for change in changes])


@pytest.mark.parametrize(
    ("device", "variant", "chosen"),
    [("cpu", "auto", "cpu-int8"), ("cpu", "cpu-fp32", "cpu-fp32"), ("auto", "cpu-int8", "cpu-int8")],
)
def test_who_asks_for_the_cpu_gets_it_and_no_driver_is_asked(device: str, variant: Any, chosen: str) -> None:
    machine = Machine()
    choice = choose_devices(device, variant, bundles=[bundle()], surroundings=machine.surroundings)
    assert (choice.devices, choice.variant, choice.is_second_best) == (CPU, chosen, False)
    assert not choice.on_gpus
    assert choice.driver is None
    assert machine.asked == []


@pytest.mark.parametrize(
    ("device", "variant"), [("cpu", "cuda-fp16"), ("cuda", "cpu-int8"), ("cuda:0", "cpu-fp32")]
)
def test_a_variant_of_another_device_is_a_contradiction(device: str, variant: Any) -> None:
    with pytest.raises(SettingsError, match=f"DRAGOMAN_DEVICE is '{device}' and DRAGOMAN_VARIANT is"):
        choose_devices(device, variant, bundles=[bundle()], surroundings=Machine().surroundings)


@pytest.mark.parametrize("device", ["auto", "cuda"])
@pytest.mark.parametrize("variant", ["auto", "cuda-fp16"])
def test_where_everything_fits_every_gpu_is_taken_and_named(device: str, variant: Any) -> None:
    machine = Machine(library=gpus({}, {"name": "Fake T4", "compute_capability": (7, 5)}))
    choice = choose_devices(
        device, variant, bundles=[bundle("a"), bundle("b")], surroundings=machine.surroundings
    )
    assert choice.devices == (Device("cuda", 0), Device("cuda", 1))
    assert choice.variant == "cuda-fp16"
    assert choice.on_gpus
    assert not choice.is_second_best
    assert choice.driver is not None
    for part in (
        "cuda:0 (Fake H200",
        "cuda:1 (Fake T4, compute capability 7.5",
        "driver for CUDA 13.0",
        "1.32.0",
    ):
        assert part in choice.reason
    assert machine.asked == ["driver", "provider 0", "provider 1"]


def test_one_gpu_is_taken_alone_and_the_faults_of_others_do_not_matter() -> None:
    machine = Machine(library=gpus({"compute_capability": (6, 1)}, {}), faults={0: "broken"})
    choice = choose_devices("cuda:1", "auto", bundles=[bundle()], surroundings=machine.surroundings)
    assert choice.devices == (Device("cuda", 1),)
    assert machine.asked == ["driver", "provider 1"]


@dataclass(frozen=True)
class Obstacle:
    """A reason why a GPU cannot be used.

    Attributes:
        machine: one that has it.
        words: what the message must say.
        has_gpu: whether there seems to be a GPU, so that under auto it is worth a warning.
        brief: what auto says instead, where nothing is to be mended.
        bundles: what is to be served.
        error: what is raised where the GPU was asked for.
    """

    machine: Callable[[], Machine]
    words: tuple[str, ...]
    has_gpu: bool = True
    brief: tuple[str, ...] = ()
    bundles: tuple[Any, ...] = (bundle(),)
    error: type[DragomanError] = DeviceUnavailable


OBSTACLES = {
    "a runtime for CPUs": Obstacle(
        lambda: Machine(CPU_RUNTIME),
        (
            "onnxruntime 1.32.0 has no CUDA provider (it has AzureExecutionProvider, CPUExecutionProvider)",
            "install the extra gpu instead of cpu",
        ),
        has_gpu=False,
        brief=("this onnxruntime 1.32.0 is for CPUs",),
    ),
    "a runtime for CPUs beside a GPU": Obstacle(
        lambda: Machine(CPU_RUNTIME, has_gpu=True), ("has no CUDA provider", "docs/gpu.md")
    ),
    "no driver": Obstacle(
        lambda: Machine(library=None),
        ("libcuda.so.1: cannot open", "install the driver", "DRAGOMAN_DEVICE=cpu"),
        has_gpu=False,
    ),
    "a driver that does not start": Obstacle(
        lambda: Machine(library=FakeCuda(failing={"cuInit": SYSTEM_DRIVER_MISMATCH})),
        ("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "for CUDA 13.0"),
    ),
    "no GPU": Obstacle(
        lambda: Machine(library=FakeCuda(gpus=[])), ("CUDA_ERROR_NO_DEVICE", "nvidia-smi"), has_gpu=False
    ),
    "an old GPU": Obstacle(
        lambda: Machine(library=gpus({"name": "Fake P40", "compute_capability": (6, 1)})),
        ("GPU 0 (Fake P40) has compute capability 6.1", "at least 7.5"),
    ),
    "a GPU that CUDA 13 left behind": Obstacle(
        lambda: Machine(library=gpus({"name": "Fake V100", "compute_capability": (7, 0)})),
        ("GPU 0 (Fake V100) has compute capability 7.0", "for CUDA 13.0 in float16 needs at least 7.5"),
    ),
    "an old driver": Obstacle(
        lambda: Machine(library=FakeCuda(version=12_080)),
        ("onnxruntime 1.32.0 for CUDA 13.0 needs a driver for CUDA 13", "this one is for CUDA 12.8"),
    ),
    "a bundle without graphs for it": Obstacle(
        Machine,
        (
            "bundle marian has no variant cuda-fp16",
            "dragoman export ... --variants cpu-fp32,cpu-int8,cuda-fp16",
        ),
        bundles=(bundle(), bundle("marian", "cpu-int8", "cpu-fp32")),
        error=BundleUnsupported,
    ),
    "libraries that do not load": Obstacle(
        lambda: Machine(faults={0: "libcudnn.so.9: cannot open shared object file"}),
        (
            "onnxruntime 1.32.0 for CUDA 13.0 does not run on GPU 0 (Fake H200)",
            "libcudnn.so.9: cannot open shared object file",
            "The driver is for CUDA 13.0",
            "onnxruntime-gpu[cuda,cudnn]==1.32.0",
        ),
    ),
}
each_obstacle = pytest.mark.parametrize(
    "obstacle", [pytest.param(o, id=name) for name, o in OBSTACLES.items()]
)


@each_obstacle
@pytest.mark.parametrize(
    ("device", "variant"),
    [("cuda", "auto"), ("cuda:0", "auto"), ("auto", "cuda-fp16"), ("cuda", "cuda-fp16")],
)
def test_a_gpu_that_was_asked_for_and_cannot_be_used_is_refused_with_the_reason(
    obstacle: Obstacle, device: str, variant: Any
) -> None:
    with pytest.raises(obstacle.error) as refused:
        choose_devices(
            device, variant, bundles=obstacle.bundles, surroundings=obstacle.machine().surroundings
        )
    for words in obstacle.words:
        assert words in refused.value.message
    if obstacle.error is DeviceUnavailable:
        asked = f"device {device}" if device != "auto" else "variant cuda-fp16"
        assert refused.value.message.startswith(f"{asked} cannot be used: ")


@each_obstacle
def test_auto_then_takes_the_cpu_says_why_and_warns_only_where_there_is_a_gpu(obstacle: Obstacle) -> None:
    choice = choose_devices(
        "auto", "auto", bundles=obstacle.bundles, surroundings=obstacle.machine().surroundings
    )
    assert (choice.devices, choice.variant) == (CPU, "cpu-int8")
    assert choice.is_second_best is obstacle.has_gpu
    assert choice.reason.startswith("no GPU is used: ")
    for words in obstacle.brief or obstacle.words:
        assert words in choice.reason


def test_a_runtime_for_cpus_is_known_by_its_providers_and_no_driver_is_asked() -> None:
    machine = Machine(CPU_RUNTIME)
    choose_devices("auto", "auto", bundles=[bundle()], surroundings=machine.surroundings)
    assert machine.asked == []


def test_a_bundle_without_graphs_is_found_before_any_gpu_is_touched() -> None:
    machine = Machine()
    choose_devices("auto", "auto", bundles=[bundle("old", "cpu-int8")], surroundings=machine.surroundings)
    assert machine.asked == ["driver"]


@pytest.mark.parametrize(("count", "shown"), [(1, "1 GPU, cuda:0"), (3, "3 GPUs, cuda:0 to cuda:2")])
def test_a_gpu_beyond_the_last_is_refused_and_the_others_are_named(count: int, shown: str) -> None:
    machine = Machine(library=gpus(*({} for _ in range(count))))
    with pytest.raises(DeviceUnavailable, match=rf"there is no GPU 3: the driver shows {shown};"):
        choose_devices("cuda:3", "auto", bundles=[bundle()], surroundings=machine.surroundings)


def test_a_driver_that_shows_nothing_is_no_gpu() -> None:
    driver = CudaDriver(None, version=(13, 0), gpus=())
    surroundings = Surroundings(lambda: GPU_RUNTIME, lambda: driver, lambda _index: None)
    with pytest.raises(DeviceUnavailable, match="shows no GPU to this process; check CUDA_VISIBLE_DEVICES"):
        choose_devices("cuda", "auto", bundles=[bundle()], surroundings=surroundings)
    assert not choose_devices("auto", "auto", bundles=[bundle()], surroundings=surroundings).is_second_best


@pytest.mark.parametrize("built_for", ["", "13.0", "12.8"])
def test_a_newer_driver_and_one_of_unknown_need_are_no_obstacle(built_for: str) -> None:
    machine = Machine(InstalledRuntime("1.32.0", GPU_RUNTIME.providers, built_for))
    assert choose_devices("auto", "auto", bundles=[bundle()], surroundings=machine.surroundings).on_gpus


def test_a_bundle_with_the_graphs_passes() -> None:
    require_gpu_graphs(bundle())


def test_devices_have_the_names_that_settings_use() -> None:
    assert [str(device) for device in (Device(), Device("cuda"), Device("cuda", 3))] == [
        "cpu",
        "cuda:0",
        "cuda:3",
    ]
    for kind, index in (("cpu", 1), ("cuda", -1)):
        with pytest.raises(ValueError, match=f"there is no device {kind}:{index}"):
            Device(kind, index)  # type: ignore[arg-type]
