"""What the service says of its devices: a line in the log at the start, memory in the metrics."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import structlog

from app.errors import DeviceUnavailable
from app.observability.metrics import DeviceMemory
from app.runtime.device_choice import DeviceChoice
from app.runtime.gpu.memory import LEDGER

_log: structlog.stdlib.BoundLogger = structlog.get_logger("dragoman.serve")


def log_choice(choice: DeviceChoice) -> None:
    """Log where the models run and why; a warning where there is a GPU that could not be taken."""
    _log.log(
        logging.WARNING if choice.is_second_best else logging.INFO,
        "device",
        devices=[str(device) for device in choice.devices],
        variant=choice.variant,
        reason=choice.reason,
    )


def gpu_memory(choice: DeviceChoice) -> Iterator[DeviceMemory]:
    """The memory of each GPU in use; nothing on a CPU. A GPU whose driver refuses is left out, and logged."""
    driver = choice.driver
    if driver is None:
        return
    for device in choice.devices:
        try:
            free_bytes, total_bytes = driver.memory_info(device.index)
        except DeviceUnavailable as error:
            _log.warning("gpu_memory_unknown", device=str(device), reason=error.message)
            continue
        yield DeviceMemory(
            str(device),
            used_bytes=total_bytes - free_bytes,
            total_bytes=total_bytes,
            held_bytes=LEDGER.held_bytes(device),
        )
