"""Where to train, and in what precision."""

from __future__ import annotations

import torch

from app.errors import InvalidOption
from model.training.config import Precision, TrainingSection


def device_of(section: TrainingSection) -> torch.device:
    """The device that a run wants.

    Raises:
        InvalidOption: cuda is asked for and absent.
    """
    has_cuda = torch.cuda.is_available()
    if section.device == "cuda" and not has_cuda:
        raise InvalidOption("device is cuda and PyTorch sees none; take device = 'cpu' or 'auto'")
    return torch.device("cuda" if has_cuda and section.device != "cpu" else "cpu")


def uses_bfloat16(precision: Precision, device: torch.device) -> bool:
    """Whether matrices are multiplied in bfloat16.

    Raises:
        InvalidOption: it is asked for where it would only be slower.
    """
    if precision == "float32":
        return False
    has_it = torch.cuda.is_bf16_supported() if device.type == "cuda" else _cpu_multiplies_bfloat16()
    if precision == "bfloat16" and not has_it:
        raise InvalidOption(
            f"precision is bfloat16 and this {device.type} does not multiply in it, so that it would only be "
            "slower; take precision = 'auto' or 'float32'"
        )
    return has_it


def _cpu_multiplies_bfloat16() -> bool:
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") or capabilities.get("bf16"))
