"""Where a model runs: a name for a processor and nothing more, so that everything may speak of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from app.errors import SettingsError

DeviceKind = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Device:
    """A processor that runs graphs.

    Attributes:
        kind: which execution provider runs there.
        index: which of the visible GPUs, from 0; 0 for the CPU.
    """

    kind: DeviceKind = "cpu"
    index: int = 0

    def __post_init__(self) -> None:
        if self.index < 0 or (self.kind == "cpu" and self.index):
            raise ValueError(f"there is no device {self.kind}:{self.index}")

    def __str__(self) -> str:
        """``cpu``, ``cuda:0``: as settings, logs and metrics name it."""
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"


def refuse_contradiction(device: str, variant: str) -> None:
    """Check that the device and the variant that were asked for go together.

    Args:
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        variant: ``auto``, or the name of a bundle's variant.

    Raises:
        SettingsError: they do not; names both settings.
    """
    needed = variant.partition("-")[0]
    if needed != "auto" and device != "auto" and device.partition(":")[0] != needed:
        raise SettingsError(
            f"DRAGOMAN_DEVICE is {device!r} and DRAGOMAN_VARIANT is {variant!r}, which does not run there; "
            "leave one of them at 'auto'"
        )
