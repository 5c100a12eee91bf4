"""Where a command's models run and what follows from it: how many workers, rows and tokens at a time."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from app.bundle import Bundle
from app.errors import SettingsError
from app.runtime.device_choice import DeviceChoice, Surroundings, choose_devices
from app.settings import Settings, available_cores

_MEBIBYTE = 1 << 20
_CPU_ROWS, _GPU_ROWS = 64, 256
_CPU_ADMISSION_TOKENS, _GPU_ADMISSION_TOKENS = 1024, 16_384


@dataclass(frozen=True)
class Placement:
    """The settings that depend on the machine, settled.

    Attributes:
        choice: devices and variant, with the reason.
        num_workers: decoding threads; on GPUs one each.
        max_rows: segments decoded together per worker.
        max_admission_tokens: padded source tokens encoded between two decoder steps.
        gpu_memory_bytes: most memory of each GPU for weights and row slots; None for no limit of ours.
    """

    choice: DeviceChoice
    num_workers: int
    max_rows: int
    max_admission_tokens: int
    gpu_memory_bytes: int | None = None


def place_models(
    settings: Settings, bundles: Sequence[Bundle], *, surroundings: Surroundings | None = None
) -> Placement:
    """Settle where the bundles run; some tenths of a second where there may be a GPU, else at once.

    Args:
        settings: what was asked for.
        bundles: everything that is to be served.
        surroundings: what there is; None looks at this machine.

    Raises:
        SettingsError: the number of workers is not the number of GPUs.
        DeviceUnavailable: a GPU was asked for and cannot be used.
        BundleUnsupported: a GPU was asked for, and a bundle has no graphs for it.
    """
    choice = choose_devices(settings.device, settings.variant, bundles=bundles, surroundings=surroundings)
    num_gpus = len(choice.devices) if choice.on_gpus else 0
    if num_gpus and settings.num_workers not in ("auto", num_gpus):
        named = ", ".join(map(str, choice.devices))
        raise SettingsError(
            f"DRAGOMAN_NUM_WORKERS is {settings.num_workers}, and {named} take one worker each, "
            f"{num_gpus} in all; leave it at 'auto', choose GPUs with CUDA_VISIBLE_DEVICES, or set "
            "DRAGOMAN_DEVICE=cpu"
        )
    return Placement(
        choice,
        num_workers=_or_else(settings.num_workers, num_gpus or available_cores()),
        max_rows=_or_else(settings.max_rows, _GPU_ROWS if num_gpus else _CPU_ROWS),
        max_admission_tokens=_or_else(
            settings.max_admission_tokens, _GPU_ADMISSION_TOKENS if num_gpus else _CPU_ADMISSION_TOKENS
        ),
        gpu_memory_bytes=settings.gpu_memory_mb * _MEBIBYTE or None,
    )


def tell_placement(placement: Placement) -> None:
    """Say on standard error that a GPU is used, or could not be; nothing where there is none."""
    if placement.choice.on_gpus or placement.choice.is_second_best:
        print(f"dragoman: {placement.choice.variant}: {placement.choice.reason}", file=sys.stderr)


def _or_else(setting: int | Literal["auto"], default: int) -> int:
    return default if setting == "auto" else setting
