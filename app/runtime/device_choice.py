"""Which devices a service runs on: what was asked for, held against what there is.

A GPU that was asked for and cannot be used is an error, never a slow service. `auto` takes every GPU when
all of them, the driver, the runtime and every bundle fit together, otherwise the CPU, and says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from app.bundle import Bundle, Variant
from app.errors import BundleUnsupported, DeviceUnavailable
from app.runtime.device import Device, refuse_contradiction
from app.runtime.gpu.cuda_driver import CudaDriver, Gpu, probe
from app.runtime.onnx_providers import CUDA_PROVIDER, InstalledRuntime, cuda_provider_fault, installed_runtime

CPU_VARIANT: Variant = "cpu-int8"
GPU_VARIANT: Variant = "cuda-fp16"
_MIN_COMPUTE_CAPABILITY = (7, 0)
"""Volta's: the first GPUs whose matrix units compute in float16."""
_MIN_COMPUTE_CAPABILITY_CUDA_13 = (7, 5)
"""Turing's: CUDA 13 compiles for nothing older (its release notes)."""
_GIBIBYTE = 1 << 30
_TO_CPU = "or take the CPU with DRAGOMAN_DEVICE=cpu and DRAGOMAN_VARIANT=auto"


@dataclass(frozen=True)
class DeviceChoice:
    """What a service runs on.

    Attributes:
        devices: the CPU, or GPUs by index.
        variant: the graphs that run there.
        reason: one sentence for the log.
        is_second_best: whether there is a GPU that could not be taken.
        driver: of the GPUs; None on a CPU.
    """

    devices: tuple[Device, ...]
    variant: Variant
    reason: str
    is_second_best: bool = False
    driver: CudaDriver | None = None

    @property
    def on_gpus(self) -> bool:
        """Whether the devices are GPUs."""
        return self.devices[0].kind == "cuda"


@dataclass(frozen=True)
class Surroundings:
    """How the choice learns what there is; tests put others in their place.

    Attributes:
        runtime: the installed onnxruntime.
        probe: the driver and its GPUs, or DeviceUnavailable.
        provider_fault: why onnxruntime cannot run on the GPU of an index, or None.
        has_gpu: whether the system shows an NVIDIA GPU, for an onnxruntime that knows nothing of them.
    """

    runtime: Callable[[], InstalledRuntime] = installed_runtime
    probe: Callable[[], CudaDriver] = probe
    provider_fault: Callable[[int], str | None] = cuda_provider_fault
    has_gpu: Callable[[], bool] = Path("/dev/nvidiactl").exists


def choose_devices(
    device: str,
    variant: Variant | Literal["auto"],
    *,
    bundles: Sequence[Bundle],
    surroundings: Surroundings | None = None,
) -> DeviceChoice:
    """Choose the devices and the variant; asks the driver only where a GPU may come of it.

    Args:
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        variant: ``auto``, or the graphs that must run.
        bundles: everything that is to be served.
        surroundings: what there is; None looks at this machine.

    Raises:
        SettingsError: device and variant contradict each other.
        DeviceUnavailable: a GPU was asked for, by either, and cannot be used.
        BundleUnsupported: a GPU was asked for, and a bundle has no graphs for it.
    """
    refuse_contradiction(device, variant)
    there = surroundings or Surroundings()
    if device == "cpu" or variant.startswith("cpu-"):
        asked_by = "DRAGOMAN_DEVICE" if device == "cpu" else "DRAGOMAN_VARIANT"
        return _cpu(variant, f"{asked_by} asks for the CPU")
    if device == "auto" and variant == "auto":
        try:
            return _gpus(device, bundles, there)
        except DeviceUnavailable as error:
            why = error.message if error.has_gpu else error.brief
            return _cpu(variant, f"no GPU is used: {why}", is_second_best=error.has_gpu)
        except BundleUnsupported as error:
            return _cpu(variant, f"no GPU is used: {error.message}", is_second_best=True)
    try:
        return _gpus(device, bundles, there)
    except DeviceUnavailable as error:
        asked = f"device {device}" if device != "auto" else f"variant {variant}"
        raise DeviceUnavailable(f"{asked} cannot be used: {error.message}", has_gpu=error.has_gpu) from error


def require_gpu_graphs(bundle: Bundle) -> None:
    """Check that a bundle can run on a GPU.

    Raises:
        BundleUnsupported: it has no graphs for one; says how to make them.
    """
    variants = bundle.manifest.variants
    if GPU_VARIANT not in variants:
        raise BundleUnsupported(
            f"bundle {bundle.manifest.id} has no variant {GPU_VARIANT}, which a GPU needs; it has "
            f"{', '.join(sorted(variants))}. Export it again with `dragoman export ... --variants "
            f"{','.join([*sorted(variants), GPU_VARIANT])}`, {_TO_CPU}"
        )


def _cpu(variant: Variant | Literal["auto"], reason: str, *, is_second_best: bool = False) -> DeviceChoice:
    return DeviceChoice(
        (Device(),), CPU_VARIANT if variant == "auto" else variant, reason, is_second_best=is_second_best
    )


def _gpus(device: str, bundles: Sequence[Bundle], there: Surroundings) -> DeviceChoice:
    """The GPUs that `device` means; what costs little is checked first."""
    runtime = there.runtime()
    if CUDA_PROVIDER not in runtime.providers:
        raise DeviceUnavailable(
            f"this onnxruntime {runtime.version} has no CUDA provider (it has "
            f"{', '.join(runtime.providers)}); install the extra gpu instead of cpu, never both: "
            f"pip uninstall onnxruntime, then the extra gpu as docs/gpu.md says; {_TO_CPU}",
            has_gpu=there.has_gpu(),
            brief=f"this onnxruntime {runtime.version} is for CPUs",
        )
    driver = _driver(there)
    gpus = _wanted(device, driver)
    for gpu in gpus:
        _check_capability(gpu, runtime)
    _check_versions(runtime, driver)
    for bundle in bundles:
        require_gpu_graphs(bundle)
    for gpu in gpus:
        if (fault := there.provider_fault(gpu.index)) is not None:
            raise DeviceUnavailable(
                f"{runtime} does not run on GPU {gpu.index} ({gpu.name}): {fault}. The driver is for CUDA "
                f"{_dotted(driver.version)}; install the CUDA and cuDNN libraries that this onnxruntime was "
                f"built for, pip install 'onnxruntime-gpu[cuda,cudnn]=={runtime.version}', {_TO_CPU}"
            )
    named = ", ".join(f"{Device('cuda', gpu.index)} {_described(gpu)}" for gpu in gpus)
    return DeviceChoice(
        tuple(Device("cuda", gpu.index) for gpu in gpus),
        GPU_VARIANT,
        f"{named}; driver for CUDA {_dotted(driver.version)}, {runtime}",
        driver=driver,
    )


def _wanted(device: str, driver: CudaDriver) -> tuple[Gpu, ...]:
    if not driver.gpus:
        raise DeviceUnavailable(
            "the NVIDIA driver shows no GPU to this process; check CUDA_VISIBLE_DEVICES and nvidia-smi",
            has_gpu=False,
        )
    if ":" not in device:
        return driver.gpus
    index = int(device.partition(":")[2])
    for gpu in driver.gpus:
        if gpu.index == index:
            return (gpu,)
    count = len(driver.gpus)
    shown = "1 GPU, cuda:0" if count == 1 else f"{count} GPUs, cuda:0 to cuda:{count - 1}"
    raise DeviceUnavailable(
        f"there is no GPU {index}: the driver shows {shown}; choose one of them, or "
        "check CUDA_VISIBLE_DEVICES"
    )


def _driver(there: Surroundings) -> CudaDriver:
    try:
        return there.probe()
    except DeviceUnavailable as error:
        raise DeviceUnavailable(f"{error.message}, {_TO_CPU}", has_gpu=error.has_gpu) from error


def _check_capability(gpu: Gpu, runtime: InstalledRuntime) -> None:
    needed = _MIN_COMPUTE_CAPABILITY
    if _cuda_major(runtime) >= 13:
        needed = _MIN_COMPUTE_CAPABILITY_CUDA_13
    if gpu.compute_capability < needed:
        raise DeviceUnavailable(
            f"GPU {gpu.index} ({gpu.name}) has compute capability {_dotted(gpu.compute_capability)}; "
            f"{runtime} in float16 needs at least {_dotted(needed)}. Name another GPU with DRAGOMAN_DEVICE="
            f"cuda:N or CUDA_VISIBLE_DEVICES, {_TO_CPU}"
        )


def _cuda_major(runtime: InstalledRuntime) -> int:
    """The major version of CUDA that a runtime was built for; 0 where it does not say."""
    major = runtime.cuda_version.partition(".")[0]
    return int(major) if major.isdigit() else 0


def _check_versions(runtime: InstalledRuntime, driver: CudaDriver) -> None:
    """Within a major version an older driver runs newer libraries; across majors it does not."""
    major = _cuda_major(runtime)
    if driver.version[0] < major:
        raise DeviceUnavailable(
            f"{runtime} needs a driver for CUDA {major}, and this one is for CUDA {_dotted(driver.version)}; "
            f"update the driver, or install an onnxruntime-gpu built for CUDA {driver.version[0]}, {_TO_CPU}"
        )


def _described(gpu: Gpu) -> str:
    capability = _dotted(gpu.compute_capability)
    return f"({gpu.name}, compute capability {capability}, {gpu.total_bytes / _GIBIBYTE:.0f} GiB)"


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
