"""Sentences that must not be trained on: those of test sets, and pairs held out for one of our own."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path

from model.data.sampling import lowest_hashes
from model.data.text_files import lines_of

# A shorter sentence is excluded where it is a whole side, but not as a part of a longer text.
MIN_CONTAINED_WORDS = 8
_NUM_INDEXED_WORDS = 4
_NO_WORD = re.compile(r"[\W_]+")
_FIRST_MARK = "\u0300"


def sentence_key(text: str) -> str:
    """What two spellings of one sentence have in common.

    NFKC, case folded; whatever is neither letter, digit nor combining mark becomes one space, or nothing
    at the ends.
    """
    if text.isascii():
        return _NO_WORD.sub(" ", text.lower()).strip()
    # Casefolding can undo the normal form (Unicode 3.13, D146).
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    if max(text, default="") < _FIRST_MARK:
        return _NO_WORD.sub(" ", text).strip()
    # `\W` takes vowel signs and other marks for punctuation.
    text = "".join(c if unicodedata.category(c)[0] in "LNM" else " " for c in text)
    return " ".join(text.split())


class Exclusions:
    """A set of sentences, by their keys.

    Args:
        texts: the sentences; those without a letter or digit exclude nothing.
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        """Take up the sentences."""
        self._keys = frozenset(key for key in map(sentence_key, texts) if key)
        self._long_of_start: dict[str, list[str]] = {}
        for key in sorted(self._keys):
            words = key.split(" ")
            if len(words) >= MIN_CONTAINED_WORDS:
                self._long_of_start.setdefault(" ".join(words[:_NUM_INDEXED_WORDS]), []).append(key)
        self._first_words = frozenset(start.split(" ")[0] for start in self._long_of_start)

    @classmethod
    def from_files(cls, paths: Iterable[Path]) -> Exclusions:
        """The sentences of files, one a line.

        Raises:
            InvalidOption: a file is missing, damaged or not UTF-8.
        """
        return cls(line for path in paths for line in lines_of(path))

    def __len__(self) -> int:
        """Different sentences."""
        return len(self._keys)

    def holds(self, text: str) -> bool:
        """Whether a text is one of the sentences, or contains one of at least `MIN_CONTAINED_WORDS` words.

        A sentence in a script without spaces is one word: it is found only where it is the whole text.
        """
        return bool(self._keys) and self.holds_key(sentence_key(text))

    def holds_key(self, key: str) -> bool:
        """`holds` of a text whose key is known."""
        if key in self._keys:
            return True
        words = key.split(" ")
        for first, word in enumerate(words[: 1 - MIN_CONTAINED_WORDS]):
            if word not in self._first_words:
                continue
            start = " ".join(words[first : first + _NUM_INDEXED_WORDS])
            if start in self._long_of_start:
                rest = f"{' '.join(words[first:])} "
                if any(rest.startswith(f"{sentence} ") for sentence in self._long_of_start[start]):
                    return True
        return False

    def digest(self) -> str:
        """Of the set, whatever the order and the spelling in which its sentences came."""
        return hashlib.sha256("\n".join(sorted(self._keys)).encode()).hexdigest()


def held_out(pairs: Iterable[tuple[str, str]], *, num_pairs: int, seed: int) -> Iterator[tuple[str, str]]:
    """Pairs for a test set: those with the lowest keyed hashes, no two of them with the same source.

    Args:
        pairs: all that may be chosen, filtered.
        num_pairs: most pairs wanted.
        seed: of the hash.
    """
    return lowest_hashes(
        _of_different_sources(pairs),
        num_items=num_pairs,
        seed=seed,
        text_of=lambda pair: sentence_key(pair[0]),
        tie_of=lambda pair: pair[1],
    )


def _of_different_sources(pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    seen: set[str] = set()
    for pair in pairs:
        key = sentence_key(pair[0])
        if key not in seen:
            seen.add(key)
            yield pair
