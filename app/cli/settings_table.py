"""`dragoman settings`: every knob on one page, in lines that can be copied into an environment file."""

from __future__ import annotations

import json
import shutil
import textwrap

from app.settings import PREFIX, Settings

_INDENT = "    "


def print_settings(settings: Settings, *, as_json: bool) -> None:
    """Print each setting's variable, present value and meaning.

    Variable and value are on one line of their own and never cut; only the meaning is wrapped.
    """
    if as_json:
        values = settings.model_dump(mode="json")
        facts = [
            {"variable": _variable(name), "value": values[name], "meaning": field.description}
            for name, field in Settings.model_fields.items()
        ]
        print(json.dumps(facts, indent=2, ensure_ascii=False))
        return
    width = max(40, shutil.get_terminal_size().columns)
    for name, field in Settings.model_fields.items():
        print(f"{_variable(name)}={getattr(settings, name)}")
        print(
            textwrap.fill(
                field.description or "",
                width,
                initial_indent=_INDENT,
                subsequent_indent=_INDENT,
                break_long_words=False,
                break_on_hyphens=False,
            )
        )


def _variable(name: str) -> str:
    return f"{PREFIX}{name.upper()}"
