"""Language codes as clients write them: case, aliases, regions; and their English names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from app.errors import InvalidRequest, UnsupportedPair
from app.runtime.request import PairInfo

_CODE = re.compile(r"[A-Za-z]{2,8}([-_][A-Za-z0-9]{2,8}){0,4}", re.ASCII)
_ALIASES = {
    "pb": "pt-br",
    "pt-br": "pb",
    "zh": "zh-hans",
    "zh-hans": "zh",
    "zh-hant": "zt",
    "zt": "zh-hant",
}
_NAMES = {
    "ar": "Arabic", "az": "Azerbaijani", "be": "Belarusian", "bg": "Bulgarian", "bn": "Bengali",
    "bs": "Bosnian", "ca": "Catalan", "cs": "Czech", "cy": "Welsh", "da": "Danish", "de": "German",
    "el": "Greek", "en": "English", "eo": "Esperanto", "es": "Spanish", "et": "Estonian", "eu": "Basque",
    "fa": "Persian", "fi": "Finnish", "fr": "French", "ga": "Irish", "gl": "Galician", "gu": "Gujarati",
    "he": "Hebrew", "hi": "Hindi", "hr": "Croatian", "hu": "Hungarian", "id": "Indonesian",
    "is": "Icelandic", "it": "Italian", "ja": "Japanese", "ka": "Georgian", "kk": "Kazakh",
    "kn": "Kannada", "ko": "Korean", "lt": "Lithuanian", "lv": "Latvian", "mk": "Macedonian",
    "ml": "Malayalam", "mr": "Marathi", "ms": "Malay", "mt": "Maltese", "nb": "Norwegian Bokmål",
    "nl": "Dutch", "nn": "Norwegian Nynorsk", "no": "Norwegian", "pb": "Portuguese (Brazil)",
    "pl": "Polish", "pt": "Portuguese", "pt-br": "Portuguese (Brazil)", "ro": "Romanian",
    "ru": "Russian", "sk": "Slovak", "sl": "Slovenian", "sq": "Albanian", "sr": "Serbian",
    "sv": "Swedish", "sw": "Swahili", "ta": "Tamil", "te": "Telugu", "th": "Thai", "tl": "Tagalog",
    "tr": "Turkish", "uk": "Ukrainian", "ur": "Urdu", "uz": "Uzbek", "vi": "Vietnamese", "zh": "Chinese",
    "zh-hans": "Chinese", "zh-hant": "Chinese (traditional)", "zt": "Chinese (traditional)",
}  # fmt: skip


def language_name(code: str) -> str:
    """English name of a code; of its base language if the region is not known; else the code itself."""
    folded = code.casefold()
    return _NAMES.get(folded) or _NAMES.get(folded.partition("-")[0]) or code


def checked_code(code: str, field: str) -> str:
    """The code, if it has the shape of one; so that errors may quote it.

    Raises:
        InvalidRequest: it has not; the message does not repeat it.
    """
    if not _CODE.fullmatch(code):
        raise InvalidRequest(f"{field} is not a language code; write one such as en or pt-BR")
    return code


@dataclass(frozen=True)
class _Index:
    """Pairs, their codes, and the codes by their folded spelling."""

    pairs: tuple[PairInfo, ...]
    codes: tuple[str, ...]
    code_of: Mapping[str, str]

    @classmethod
    def of(cls, pairs: tuple[PairInfo, ...]) -> _Index:
        codes = tuple(sorted({code for pair in pairs for code in (pair.source, pair.target)}))
        return cls(pairs, codes, {code.casefold(): code for code in codes})


class LanguageTable:
    """The loaded pairs and the rule by which a client's code finds one.

    A code matches regardless of case, with ``-`` or ``_``: first exactly, then by its alias
    (``pb`` = ``pt-BR``, ``zh`` = ``zh-Hans``, ``zt`` = ``zh-Hant``), then by its base language
    (``pt-BR`` finds ``pt``; ``pt`` does not find ``pt-BR``).
    """

    def __init__(self, pairs: Iterable[PairInfo]) -> None:
        """Index pairs that stay as they are."""
        fixed = tuple(pairs)
        self._follow(lambda: fixed)

    @classmethod
    def following(cls, pairs: Callable[[], tuple[PairInfo, ...]]) -> LanguageTable:
        """A table of what `pairs` returns when it is asked: the same object while nothing changes."""
        table = cls(())
        table._follow(pairs)
        return table

    def _follow(self, pairs: Callable[[], tuple[PairInfo, ...]]) -> None:
        self._current_pairs = pairs
        self._last_index = _Index.of(pairs())

    @property
    def _index(self) -> _Index:
        pairs = self._current_pairs()
        if pairs is not self._last_index.pairs:
            self._last_index = _Index.of(pairs)
        return self._last_index

    @property
    def pairs(self) -> tuple[PairInfo, ...]:
        """Every loaded pair."""
        return self._index.pairs

    @property
    def codes(self) -> tuple[str, ...]:
        """Every code of the loaded pairs, sorted."""
        return self._index.codes

    def find(self, requested: str) -> str | None:
        """The loaded code a client's code stands for; None if there is none."""
        folded = requested.replace("_", "-").casefold()
        spellings = (folded, _ALIASES.get(folded, folded))
        bases = tuple(spelling.partition("-")[0] for spelling in spellings if "-" in spelling)
        code_of = self._index.code_of
        return next((code_of[code] for code in (*spellings, *bases) if code in code_of), None)

    def pair(self, source: str | None, target: str | None) -> PairInfo | None:
        """The pair of two codes that `find` gave; None if no bundle translates it."""
        return next((pair for pair in self.pairs if (pair.source, pair.target) == (source, target)), None)

    def targets_of(self, source: str) -> tuple[str, ...]:
        """Codes that a loaded code is translated to, sorted."""
        return tuple(sorted({pair.target for pair in self.pairs if pair.source == source}))

    @property
    def sources(self) -> tuple[str, ...]:
        """Codes that are translated to others, sorted."""
        return tuple(sorted({pair.source for pair in self.pairs}))

    def refuse_detection(self, source: str) -> None:
        """Explain the one code that stands for no language.

        Raises:
            UnsupportedPair: `source` is ``auto``.
        """
        if source.casefold() == "auto":
            raise UnsupportedPair(
                "auto is not supported: there is no language detection here; "
                f"name the source as one of {', '.join(self.sources) or 'none'}"
            )

    def resolve(self, source: str, target: str) -> PairInfo:
        """The pair that two client's codes stand for.

        Raises:
            InvalidRequest: one has not the shape of a code.
            UnsupportedPair: no bundle translates it.
        """
        self.refuse_detection(source)
        found_source = self.find(checked_code(source, "source"))
        found_target = self.find(checked_code(target, "target"))
        pair = self.pair(found_source, found_target)
        if pair is not None:
            return pair
        available = ", ".join(f"{pair.source} to {pair.target}" for pair in self.pairs) or "none"
        raise UnsupportedPair(f"{source} to {target} is not available; available are: {available}")
