"""Numbers for JSON, which has no infinity."""

from __future__ import annotations

import math


def finite(value: object) -> object:
    """A report whose infinities and NaNs are null: what never happened."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
