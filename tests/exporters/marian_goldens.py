"""What the reference engine answered to our sentences, for whoever wants to be compared with it.

`tests/data/marian/make_goldens.py` made the files. A translator under test, whatever it runs on, is a
function from a list of sentences to as many translations; `differences` tells where it disagrees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

MARIAN_DATA = Path(__file__).parents[1] / "data" / "marian"
DIRECTIONS = (("en", "pt"), ("pt", "en"))
Translate = Callable[[Sequence[str]], Sequence[str]]


@dataclass(frozen=True)
class Golden:
    """One direction's reference translations.

    Attributes:
        engine: name and version of what made them.
        model_sha256: of the Marian model file.
        sources: the sentences.
        translations: one for each sentence.
    """

    engine: str
    model_sha256: str
    sources: tuple[str, ...]
    translations: tuple[str, ...]


def max_steps(num_source_tokens: int) -> int:
    """Marian's limit of decoder steps for a source of so many tokens, EOS included: 2.5 times, rounded up.

    marian-dev, src/translator/beam_search.cpp: step t is the last when t >= 2.5 * S, so an odd S gets
    the half step more. Both engines loop to this limit on a few inputs of one unknown character.
    """
    return math.ceil(2.5 * num_source_tokens)


def read_golden(source: str, target: str) -> Golden:
    lines = (
        (MARIAN_DATA / f"golden.{source}-{target}.tsv").read_text(encoding="utf-8").rstrip("\n").split("\n")
    )
    engine_line, model_line, *pairs = lines
    assert engine_line.startswith("# engine: ")
    assert model_line.startswith("# model: ")
    sources, translations = zip(*(pair.split("\t") for pair in pairs), strict=True)
    return Golden(
        engine_line.removeprefix("# engine: "), model_line.split(" sha256 ")[1], sources, translations
    )


def read_sentences(language: str) -> tuple[str, ...]:
    text = (MARIAN_DATA / f"sentences.{language}.txt").read_text(encoding="utf-8")
    return tuple(text.rstrip("\n").split("\n"))


def differences(golden: Golden, translate: Translate) -> list[str]:
    """Each sentence whose translation is not the reference's, with both, to be read by a person."""
    translations = translate(golden.sources)
    assert len(translations) == len(golden.sources)
    return [
        f"{source!r}\n  reference {expected!r}\n  found     {found!r}"
        for source, expected, found in zip(golden.sources, golden.translations, translations, strict=True)
        if found != expected
    ]
