"""A run's TOML file: read, checked, and its mistakes explained."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from app.errors import InvalidOption
from model.training.config import RunConfig

_MADE_BY_THE_RUN = frozenset({"output", "data.cache"})


def load_run_config(path: Path) -> RunConfig:
    """Read a run's TOML file.

    Raises:
        InvalidOption: the file cannot be read, or a key is unknown, missing or out of its range; an unknown
            key's message names the nearest known one.
    """
    try:
        fields = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidOption(f"{path} cannot be read as TOML: {error}") from error
    try:
        # Strict as JSON is: a list is a tuple and a string a path, but "3" is no number and true is not 1.
        config = RunConfig.model_validate_json(json.dumps(fields, default=str), strict=True)
    except ValidationError as error:
        raise InvalidOption(f"{path}: " + "; ".join(_complaints(error))) from None
    placed: RunConfig = _placed(config, path.parent)
    return placed


def check_files(config: RunConfig) -> None:
    """Refuse a configuration that names a file which does not exist, before any work is done.

    Raises:
        InvalidOption: names every such key and its file.
    """
    missing = [f"{key} is {path}" for key, path in _paths(config, "") if not path.exists()]
    if missing:
        raise InvalidOption(
            f"{', '.join(missing)}: there is no such file; paths are relative to the configuration's folder"
        )


def _complaints(error: ValidationError) -> Iterator[str]:
    details = error.errors(include_url=False)
    for detail in details:
        if detail["type"] == "too_short" and any(
            other["loc"][: len(detail["loc"])] == detail["loc"] for other in details if other is not detail
        ):
            continue  # the list is empty because its entries are wrong, which is said of each
        where = _key(detail["loc"])
        if detail["type"] == "extra_forbidden":
            known = _keys_at(detail["loc"][:-1])
            near = difflib.get_close_matches(str(detail["loc"][-1]), known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            yield f"there is no key {where}; {hint}"
        elif detail["type"] == "missing":
            yield f"the key {where} is missing"
        elif detail["type"] == "value_error":
            message = str(detail["msg"]).removeprefix("Value error, ")
            yield f"{where}: {message}" if where else message
        elif detail["type"] in ("int_type", "float_type") and isinstance(detail["input"], str):
            yield f"{where} is {detail['input']!r}; write a number, without quotes"
        else:
            yield f"{where} is {detail['input']!r}: {detail['msg']}"


def _key(location: tuple[int | str, ...]) -> str:
    """A place as the file has it; the tables of a list are counted from 1."""
    return ".".join(f"{part + 1}" if isinstance(part, int) else part for part in location)


def _keys_at(location: tuple[int | str, ...]) -> list[str]:
    """The keys that a table may have."""
    section: type[BaseModel] = RunConfig
    for part in location:
        if isinstance(part, int):
            continue
        section = _sections_of(section)[str(part)]
    return list(section.model_fields)


def _sections_of(section: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The keys of a table that are tables themselves, or lists of them."""
    found = {}
    for name, field in section.model_fields.items():
        candidates = [field.annotation]
        while candidates:
            candidate = candidates.pop()
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                found[name] = candidate
            candidates.extend(getattr(candidate, "__args__", ()))
    return found


def _placed(value: Any, folder: Path) -> Any:
    """A value of the configuration with every path in it relative to the file's folder."""
    if isinstance(value, Path):
        return folder / value
    if isinstance(value, tuple):
        return tuple(_placed(part, folder) for part in value)
    if isinstance(value, BaseModel):
        names = type(value).model_fields
        return value.model_copy(update={name: _placed(getattr(value, name), folder) for name in names})
    return value


def _paths(value: Any, key: str) -> Iterator[tuple[str, Path]]:
    """The paths that must exist, by key."""
    if isinstance(value, Path):
        if key not in _MADE_BY_THE_RUN:
            yield key, value
    elif isinstance(value, tuple):
        for number, part in enumerate(value, start=1):
            yield from _paths(part, f"{key}.{number}")
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _paths(getattr(value, name), f"{key}.{name}".lstrip("."))
