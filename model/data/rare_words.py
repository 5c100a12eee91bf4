"""Short texts chosen for their words: for each word that other text lacks, a few with it.

A vocabulary of pieces cuts rare words up, and a model has to learn word by word how the pieces go on. A
random sample of text holds the common words thousands of times and most words never, so that a student that
learnt from one writes common words like its teacher and garbles the rest.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from model.data.sampling import keyed_hash

_WORD = re.compile(r"[^\W\d_]+(?:[-'’][^\W\d_]+)*")
_SHORTEST_WORD = 4
_WORDS_BEFORE, _WORDS_AFTER = 4, 5
_MOST_CHARACTERS = 110
_LEAST_LETTERS = 0.85
_CANDIDATES_FOR_ONE = 3


@dataclass(frozen=True)
class RareWords:
    """Which words are wanted, and how.

    Attributes:
        num_words: at most so many, the most frequent ones.
        known_fewer_than: words that other text has so often or more are not wanted.
        least_count: words that the text has fewer times are not either: most are names and mistakes.
        texts_each: texts for each word.
        longest: words of a text; of longer ones a part around the word is taken.
        seed: of the choice, 64 bits, signed.
    """

    num_words: int
    known_fewer_than: int = 10
    least_count: int = 2
    texts_each: int = 2
    longest: int = 13
    seed: int = 1

    def words(self, counts: Mapping[str, int], known: Mapping[str, int]) -> list[str]:
        """The wanted words, most frequent first.

        Args:
            counts: of the words of the text, by `count_words`.
            known: of the words of other text.
        """
        wanted = (
            word
            for word, count in counts.items()
            if count >= self.least_count
            and max(known.get(word, 0), known.get(word.lower(), 0)) < self.known_fewer_than
            and _is_plain(word)
        )
        return heapq.nsmallest(self.num_words, wanted, key=lambda word: (-counts[word], word))

    def texts(self, words: Sequence[str], texts: Iterable[str]) -> list[str]:
        """Texts or parts of them that hold the words; the same ones whatever the order of the texts.

        A text that was taken for one word counts for all that it holds. None comes twice, and they are
        shuffled.

        Args:
            words: by `words`.
            texts: gone through once.
        """
        candidates = self._candidates(words, texts)
        held: Counter[str] = Counter()
        chosen: dict[str, int] = {}
        for word in words:
            for rank, part in sorted(candidates[word]):
                if held[word] >= self.texts_each:
                    break
                if part not in chosen:
                    chosen[part] = rank
                    held.update(set(_WORD.findall(part)))
        return sorted(chosen, key=lambda part: (chosen[part], part))

    def _candidates(self, words: Sequence[str], texts: Iterable[str]) -> dict[str, list[tuple[int, str]]]:
        """For each word the parts with the lowest hashes, and these."""
        found: dict[str, dict[str, int]] = {word: {} for word in words}
        num_kept = _CANDIDATES_FOR_ONE * self.texts_each
        for text in texts:
            for word, part in self._parts(text, found):
                of_word = found[word]
                if part in of_word:
                    continue
                of_word[part] = keyed_hash(part, seed=self.seed)
                if len(of_word) > num_kept:
                    del of_word[max(of_word, key=lambda part: (of_word[part], part))]
        return {word: [(rank, part) for part, rank in of_word.items()] for word, of_word in found.items()}

    def _parts(self, text: str, wanted: Mapping[str, object]) -> Iterator[tuple[str, str]]:
        """The wanted words of a text, each with the part around it."""
        tokens = text.split()
        for place, token in enumerate(tokens):
            for match in _WORD.finditer(token):
                if match.group() not in wanted:
                    continue
                around = slice(0, None)
                if len(tokens) > self.longest:
                    around = slice(max(0, place - _WORDS_BEFORE), place + _WORDS_AFTER)
                part = " ".join(tokens[around])
                if _is_prose(part):
                    yield match.group(), part


def count_words(texts: Iterable[str]) -> Counter[str]:
    """How often each word comes: letters, perhaps with hyphens and apostrophes between them."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(_WORD.findall(text))
    return counts


def _is_plain(word: str) -> bool:
    """Whether it is written like a word, and not like an abbreviation or a name of a program."""
    return len(word) >= _SHORTEST_WORD and (word == word.lower() or word.istitle())


def _is_prose(text: str) -> bool:
    num_letters = sum(character.isalpha() or character == " " for character in text)
    return len(text) <= _MOST_CHARACTERS and num_letters >= _LEAST_LETTERS * len(text)
