"""The scripts that languages are written in, and how much of a text is in one of them."""

from __future__ import annotations

import re

_LETTERS = re.compile(r"[\W\d_]+")
# Blocks of The Unicode Standard that hold a script's letters (Blocks.txt, Scripts.txt).
_RANGES = {
    "Latn": "A-Za-zªºÀ-ÖØ-öø-ʯᴀ-ᶿḀ-ỿⱠ-ⱿꜢ-ꟿꬰ-ꭤff-stＡ-Ｚａ-ｚ",
    "Cyrl": "\u0400-\u052f\u1c80-\u1c8f\u2de0-\u2dff\ua640-\ua69f",
    "Grek": "\u0370-\u03ff\u1f00-\u1fff",
    "Arab": "\u0600-\u06ff\u0750-\u077f\u08a0-\u08ff\ufb50-\ufdff\ufe70-\ufefc",
    "Hebr": "\u0590-\u05ff\ufb1d-\ufb4f",
    "Armn": "\u0530-\u058f\ufb13-\ufb17",
    "Geor": "\u10a0-\u10ff\u1c90-\u1cbf\u2d00-\u2d2f",
    "Ethi": "\u1200-\u139f\u2d80-\u2ddf\uab00-\uab2f",
    "Deva": "\u0900-\u097f\ua8e0-\ua8ff",
    "Beng": "\u0980-\u09ff",
    "Guru": "\u0a00-\u0a7f",
    "Gujr": "\u0a80-\u0aff",
    "Orya": "\u0b00-\u0b7f",
    "Taml": "\u0b80-\u0bff",
    "Telu": "\u0c00-\u0c7f",
    "Knda": "\u0c80-\u0cff",
    "Mlym": "\u0d00-\u0d7f",
    "Sinh": "\u0d80-\u0dff",
    "Thai": "\u0e00-\u0e7f",
    "Laoo": "\u0e80-\u0eff",
    "Mymr": "\u1000-\u109f\ua9e0-\ua9ff\uaa60-\uaa7f",
    "Khmr": "\u1780-\u17ff",
    "Tibt": "\u0f00-\u0fff",
    "Hani": "々〆〇\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff",
    "Kana": "\u3040-\u30ff\u31f0-\u31ff\uff66-\uff9f",
    "Hang": "\u1100-\u11ff\u3130-\u318f\ua960-\ua97f\uac00-\ud7ff",
}
_LANGUAGES_OF: dict[tuple[str, ...], str] = {
    ("Latn",): """
        af az bs ca ceb co cs cy da de en eo es et eu fi fil fr fy ga gd gl ha haw hr ht hu id ig is it jv
        ku la lb lt lv mg mi ms mt nb nl nn no ny oc pl pt qu ro sk sl sm sn so sq st su sv sw tl tn tr uz
        vi wo xh yo zu""",
    ("Cyrl",): "ab ba be bg ce cv kk ky mk mn os ru tg tt uk",
    ("Cyrl", "Latn"): "sr",
    ("Grek",): "el",
    ("Arab",): "ar fa ps sd ug ur",
    ("Hebr",): "he yi",
    ("Armn",): "hy",
    ("Geor",): "ka",
    ("Ethi",): "am ti",
    ("Deva",): "hi mr ne sa",
    ("Beng",): "as bn",
    ("Guru",): "pa",
    ("Gujr",): "gu",
    ("Orya",): "or",
    ("Taml",): "ta",
    ("Telu",): "te",
    ("Knda",): "kn",
    ("Mlym",): "ml",
    ("Sinh",): "si",
    ("Thai",): "th",
    ("Laoo",): "lo",
    ("Mymr",): "my",
    ("Khmr",): "km",
    ("Tibt",): "bo",
    ("Hani",): "zh yue",
    ("Hani", "Kana"): "ja",
    ("Hang", "Hani"): "ko",
}
_SCRIPTS_OF = {
    language: scripts for scripts, languages in _LANGUAGES_OF.items() for language in languages.split()
}
_SCRIPTS_OF_SUBTAG = {
    "hans": ("Hani",),
    "hant": ("Hani",),
    "jpan": ("Hani", "Kana"),
    "kore": ("Hang", "Hani"),
} | {script.lower(): (script,) for script in _RANGES}


def primary_subtag(language: str) -> str:
    """``pt`` of ``pt-BR``."""
    return language.replace("_", "-").split("-")[0].lower()


class ScriptShare:
    """How much of a text is written in a language's script.

    Args:
        scripts: their ISO 15924 codes.
    """

    def __init__(self, scripts: tuple[str, ...]) -> None:
        """Prepare the search."""
        self._others = re.compile(f"[^{''.join(_RANGES[script] for script in scripts)}]+")
        self._has_ascii = "Latn" in scripts

    @classmethod
    def of_language(cls, language: str) -> ScriptShare | None:
        """For a BCP-47 code, whose script subtag counts; None where the script is not known."""
        subtags = language.replace("_", "-").lower().split("-")
        scripts = next((_SCRIPTS_OF_SUBTAG[tag] for tag in subtags[1:] if tag in _SCRIPTS_OF_SUBTAG), None)
        scripts = scripts or _SCRIPTS_OF.get(subtags[0])
        return None if scripts is None else cls(scripts)

    def __call__(self, text: str) -> float:
        """The share of the letters, from 0 to 1; 1 where there is no letter."""
        if self._has_ascii and text.isascii():
            return 1.0
        letters = _LETTERS.sub("", text)
        return len(self._others.sub("", letters)) / len(letters) if letters else 1.0
