"""The language that a text is written in, as far as it is sure."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from app.errors import InvalidOption
from model.data.scripts import primary_subtag

if TYPE_CHECKING:
    from py3langid.langid import LanguageIdentifier

# Longer texts are judged by their beginning: 120 characters leave little doubt, and time grows with length.
_MAX_CHARACTERS = 120
_LABEL_OF = {"nb": "no", "fil": "tl", "iw": "he", "in": "id"}


class LanguageProbability:
    """The probability that a text is in a language, by py3langid (langid.py: Lui and Baldwin, ACL 2012).

    Its model of some 140 languages comes with the library; a text's probability is always the same.

    Args:
        identifier: the library's, which gives probabilities.
        label: the library's for the language.
    """

    def __init__(self, identifier: LanguageIdentifier, label: str) -> None:
        """Wrap the identifier; `of_language` is the usual way."""
        self._identifier = identifier
        self._label = label

    @classmethod
    def of_language(cls, language: str) -> LanguageProbability | None:
        """For a BCP-47 code; None where the library does not know the language.

        Raises:
            InvalidOption: the library is not installed.
        """
        identifier = _identifier()
        label = primary_subtag(language)
        label = label if label in identifier.labels else _LABEL_OF.get(label, label)
        return cls(identifier, label) if label in identifier.labels else None

    def __call__(self, text: str) -> float:
        """The probability, from 0 to 1; exactly 1 where no other language is more probable."""
        text = text[:_MAX_CHARACTERS]
        if self._identifier.classify(text)[0] == self._label:
            return 1.0
        return float(dict(self._identifier.rank(text))[self._label])


@functools.cache
def _identifier() -> LanguageIdentifier:
    """One for all languages: unpacking its model takes a second."""
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ModuleNotFoundError as error:
        raise InvalidOption(
            "the rule `language` needs the library py3langid, which is not installed; `pip install "
            "py3langid`, or turn the rule off: `language` among the rules that are off"
        ) from error
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
