"""What whoever exports hands over in files: sentences to verify and calibrate with, facts for the card."""

from __future__ import annotations

import json
from pathlib import Path

from app.errors import CheckpointError, InvalidOption
from exporters.model_card import ModelFacts

_TEXTS = Path(__file__).resolve().parent / "verification_texts"


def read_facts(path: Path | None, *, changes: str) -> ModelFacts:
    """The facts in a JSON file; without one, only what was changed.

    Raises:
        InvalidOption: the file is not such an object.
    """
    if path is None:
        return ModelFacts(origin="Not stated.", changes=changes)
    try:
        return ModelFacts(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise InvalidOption(
            f"--facts {path} is not a JSON object of origin, changes, training_data, limitations"
        ) from error


def verification_texts(path: Path | None, *, source: str) -> list[str]:
    """The sentences in a file; without one, those that come with the exporters for a source language."""
    if path is None:
        # Any text will do for a comparison of arithmetic; one in the model's language does better.
        language = source.split("-")[0].lower()
        path = _TEXTS / f"{language}.txt"
        path = path if path.is_file() else _TEXTS / "en.txt"
    return read_sentences(path, option="--verify-with")


def read_sentences(path: Path, *, option: str) -> list[str]:
    """The lines of a text file that are not blank; `option` names what it was given for.

    Raises:
        CheckpointError: the file cannot be read, or has none.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{option} {path} cannot be read as UTF-8 text") from error
    if not lines:
        raise CheckpointError(f"{option} {path} has no sentence; give at least one a line")
    return lines
