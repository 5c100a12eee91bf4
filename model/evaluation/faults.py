"""Translations that are wrong on their face: empty, going round in circles, or the source itself."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

NGRAM_SIZE = 4
MIN_EXCESS = 2
MIN_COPIED_WORDS = 4
_MAX_WORD_CHARACTERS = 24
_TOKEN = re.compile(r"\w+|[^\w\s]")
_WORD = re.compile(r"[^\W\d_]+")


@dataclass(frozen=True)
class Faults:
    """How many translations of a test set have each fault, and the numbers of those lines, from 1.

    Attributes:
        empty: nothing was said, though the source says something.
        repeated: a phrase comes again and again, more often than in the source.
        copied: the source came back.
    """

    empty: tuple[int, ...]
    repeated: tuple[int, ...]
    copied: tuple[int, ...]


def find_faults(sources: Sequence[str], translations: Sequence[str], references: Sequence[str]) -> Faults:
    """Look through a test set; all three have N lines."""
    lines = list(enumerate(zip(sources, translations, references, strict=True), 1))
    return Faults(
        empty=tuple(number for number, (source, found, _) in lines if is_empty(source, found)),
        repeated=tuple(number for number, (source, found, _) in lines if is_repeated(source, found)),
        copied=tuple(number for number, (source, found, right) in lines if is_copied(source, found, right)),
    )


def is_empty(source: str, translation: str) -> bool:
    """Whether nothing but whitespace became of a source that is more."""
    return not translation.strip() and bool(source.strip())


def is_repeated(source: str, translation: str) -> bool:
    """Whether the translation repeats a 4-gram of tokens at least 2 times more than the source does.

    The count of a text is that of its most frequent 4-gram, overlapping ones included, compared without
    case: the oscillatory hallucinations of Raunak et al. 2021, "The Curious Case of Hallucinations in Neural
    Machine Translation" (arXiv 2104.06683), with the sizes that Guerreiro et al. 2023, "Looking for a Needle
    in a Haystack" (arXiv 2208.05309), took. A text without a 4-gram counts as 1, as if none came
    twice, so that a short source makes no difference. Our tokens are runs of letters and digits, and single
    other signs; a run of more than 24 counts as its characters, so that a loop within a word, or in a script
    without spaces, shows too.
    """
    return _top_count(translation) - _top_count(source) >= MIN_EXCESS


def is_copied(source: str, translation: str, reference: str) -> bool:
    """Whether a source of at least 4 words came back, which the reference does not.

    Whitespace is compared as single spaces; words hold a letter.
    """
    copy = _spaced(source)
    return (
        _spaced(translation) == copy
        and _spaced(reference) != copy
        and sum(bool(_WORD.search(part)) for part in copy.split(" ")) >= MIN_COPIED_WORDS
    )


def _top_count(text: str) -> int:
    tokens = [
        part
        for token in _TOKEN.findall(text.casefold())
        for part in (token if len(token) > _MAX_WORD_CHARACTERS else (token,))
    ]
    grams = Counter(zip(*(tokens[offset:] for offset in range(NGRAM_SIZE)), strict=False))
    return max(grams.values(), default=1)


def _spaced(text: str) -> str:
    return " ".join(text.split())
