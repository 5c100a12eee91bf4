"""`dragoman settings`: every knob on one page."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from app.settings import PREFIX, Settings


def print_settings(settings: Settings) -> None:
    """Print each setting's variable, present value and meaning."""
    table = Table("variable", "value", "meaning")
    for name, field in Settings.model_fields.items():
        table.add_row(f"{PREFIX}{name.upper()}", str(getattr(settings, name)), field.description or "")
    Console().print(table)
