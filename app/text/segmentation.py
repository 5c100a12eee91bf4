r"""Split a text into sentences and keep every character between them.

``split(text, language)`` marks spans of ``text``; segments and gaps are slices of it, so
``join(segments) == text`` holds by construction for every ``str``, control characters and lone
surrogates included. What goes to the gaps, never to the model:

* line breaks (LF, CR, VT, FF, NEL, U+2028, U+2029) and every other C0 or C1 control, the tab included.
  Each ends a segment, because a tokenizer's normalisation would drop it (or turn a column of a table into
  a space). So a text wrapped at 72 columns is translated line by line, which is predictable. To unwrap
  instead, put a paragraph's lines together where ``_line_spans`` takes them apart (that function is the
  seam); the breaks inside would then be lost, so it is not offered here;
* white space, zero-width and bidi controls, emoji, smileys and dialogue dashes at a segment's edges;
* list markers at the start of a line ("1. ", "- ", "a) ", "> ", "# "), so that none is lost or renumbered;
* whatever has no letter: "42", "...", "***". There is nothing to translate, and models invent text
  for such input.

Why a rule set of our own and not a library: ``sentencex`` 1.0.32 was measured first. It panics (an
exception outside ``Exception``, with a backtrace on stderr) when a no-break space or NEL follows an
initial ("A.\u00a0"), drops line breaks in a run of 20,000, is quadratic in quoted fragments (40 kB of
'“a. ' takes 0.17 s, 5 kB 5 ms), and misses 45 of the 101 Portuguese cases in ``tests/text``
(these rules: 2) and 11 of the 99 English ones (2; the table was written by the author of the rules).
The rules here look at a bounded number of characters before a stop, and forward no further than the
next stop: time is linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from app.text.abbreviations import Abbreviations, abbreviations_for

# Longest word before a stop that is looked up; longer ones are in no table.
_MAX_ABBREVIATION_CHARS = 16

_LINE = re.compile("[^\x00-\x1f\x7f-\x9f\u2028\u2029]+")

# Stops of scripts that put a space after them, and of those that do not.
_SPACED_STOPS = ".!?…‼⁇⁈⁉؟۔։።፧\u037e"
_UNSPACED_STOPS = "。！？｡．।॥။។៕"
_CLOSING_CHARACTERS = "\"'”’»›)]}」』】）》〉"
_CLOSERS = re.escape(_CLOSING_CHARACTERS)
_STOP = re.compile(f"[{_SPACED_STOPS}{_UNSPACED_STOPS}]++[{_CLOSERS}]*+")
_SMILEY = r"[:;=]['’]?-?[()\[\]DPpO/|*3]|<3|\^_*\^"
_SMILEYS_AFTER_STOP = re.compile(rf"(?:\s+(?:{_SMILEY})(?=\s|$))++")
# What may stand between the stop and the first word of the next sentence.
_BEFORE_WORD = re.compile(
    r"[\s\"'“”„‘’«»‹›(\[{¿¡—–\-*_\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff]*+"
)
_NEXT_WORD = re.compile(r"\w+")
_WORD_BEFORE_STOP = re.compile(r"[\w.ºª&@/]+\Z")
_DOTTED = re.compile(r"(?:[^\W\d_]{1,3}\.)+[^\W\d_]{1,3}\Z")
_ROMAN_NUMERAL = re.compile(r"[IVXLCDM]+\Z")
_CAMEL_CASE = re.compile(r"[a-z]{1,2}[A-Z]")
_UNSPACED_SCRIPT = re.compile("[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
_LETTER_CANDIDATE = re.compile(r"[^\W\d_]")

# Languages that write ordinals with a stop ("3. Oktober").
_ORDINAL_STOP_LANGUAGES = frozenset(
    ("cs", "da", "de", "et", "fi", "hr", "hu", "is", "lv", "nb", "nn", "no", "pl", "sk", "sl", "sr", "tr")
)

_LIST_MARKER = re.compile(
    r"\s*+(?:(?:[-*+•‣◦▪●·–—]|#{1,6}|>{1,4}|\[[ xX]\]|\d{1,3}(?:\.\d{1,3}){0,4}[.)]|\(?(?:[A-Za-z]|\d{1,3}"
    r"|[ivx]{1,5})\))\s++){1,4}+"
)
_BULLET = re.compile(r"\s*+(?:(?:[-*+•‣◦▪●·–—]|#{1,6}|>{1,4})\s++){1,4}+")

_EMOJI = (
    "\u2190-\u21ff\u2300-\u23ff\u2500-\u27bf\u2b00-\u2bff\u200d\ufe0e\ufe0f\u20e3"
    "\U0001f000-\U0001faff\U000e0020-\U000e007f"
)
_INVISIBLE = "\\s\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff"
_LEADING = re.compile(f"(?:[{_INVISIBLE}{_EMOJI}]|(?:{_SMILEY}|[-–—])(?=\\s))*+")
_EDGE_CHARACTER = re.compile(f"[{_INVISIBLE}{_EMOJI}]")
_TRAILING_SMILEY = re.compile(rf"\s(?:{_SMILEY})\Z")


# The usual last characters of a sentence: none can belong to a smiley, so the search for one is spared.
_PLAIN_ENDS = frozenset('.!?"”’»…abcdefghijklmnqrstuvwxyz')


@dataclass(frozen=True)
class SegmentedText:
    """Segments and the text around them; ``join(segments)`` is the original text.

    Attributes:
        segments: what is to be translated, in order.
        gaps: what is kept as it is; ``gaps[i]`` stands before ``segments[i]``, the last one at the end,
            so there is one more than there are segments. A gap may be empty.
    """

    segments: tuple[str, ...]
    gaps: tuple[str, ...]

    def __post_init__(self) -> None:
        """Check that there is one gap more than there are segments."""
        if len(self.gaps) != len(self.segments) + 1:
            raise ValueError(
                f"{len(self.segments)} segments with {len(self.gaps)} gaps; one gap more is needed"
            )

    @classmethod
    def from_spans(cls, text: str, spans: Sequence[tuple[int, int]]) -> SegmentedText:
        """Build from the ascending, disjoint ``(start, end)`` spans of the segments in ``text``."""
        starts = [start for start, _ in spans] + [len(text)]
        ends = [0] + [end for _, end in spans]
        return cls(
            segments=tuple(text[start:end] for start, end in spans),
            gaps=tuple(text[end:start] for end, start in zip(ends, starts, strict=True)),
        )

    def join(self, translations: Sequence[str]) -> str:
        """Put one translation per segment between the original gaps.

        Raises:
            ValueError: the number of translations differs from the number of segments.
        """
        if len(translations) != len(self.segments):
            raise ValueError(f"{len(translations)} translations for {len(self.segments)} segments")
        parts = [self.gaps[0]]
        for translation, gap in zip(translations, self.gaps[1:], strict=True):
            parts.append(translation)
            parts.append(gap)
        return "".join(parts)


def split(text: str, language: str) -> SegmentedText:
    """Split ``text`` into sentences.

    Args:
        text: any string.
        language: BCP-47 tag of the text ("pt-BR"); only the primary subtag is used. A language without
            a table gets the common rules.

    Returns:
        Segments, each with at least one letter, and the gaps around them.
    """
    primary = language.replace("_", "-").split("-", 1)[0].lower()
    rules = _Rules(abbreviations_for(primary), primary)
    spans: list[tuple[int, int]] = []
    for line_start, line_end in _line_spans(text):
        line = text[line_start:line_end]
        for start, end in _sentence_spans(line, rules):
            start, end = content_span(line, start, end)
            if has_letter(line, start, end):
                spans.append((line_start + start, line_start + end))
    return SegmentedText.from_spans(text, spans)


def has_letter(text: str, start: int, end: int) -> bool:
    """Whether ``text[start:end]`` holds a letter of any script (Unicode category L)."""
    return any(match[0].isalpha() for match in _LETTER_CANDIDATE.finditer(text, start, end))


def content_span(text: str, start: int, end: int) -> tuple[int, int]:
    """Shrink a span by the invisible characters, emoji and smileys at its edges."""
    match = _LEADING.match(text, start, end)
    start = match.end() if match else start
    while end > start:
        if text[end - 1] in _PLAIN_ENDS:
            break
        if _EDGE_CHARACTER.match(text, end - 1, end):
            end -= 1
        elif smiley := _TRAILING_SMILEY.search(text, max(start, end - 5), end):
            end = smiley.start()
        else:
            break
    return start, end


@dataclass(frozen=True)
class _Rules:
    abbreviations: Abbreviations
    language: str

    @property
    def has_ordinal_stop(self) -> bool:
        return self.language in _ORDINAL_STOP_LANGUAGES


def _line_spans(text: str) -> Iterator[tuple[int, int]]:
    for match in _LINE.finditer(text):
        yield match.span()


def _sentence_spans(line: str, rules: _Rules) -> Iterator[tuple[int, int]]:
    """Yield adjacent spans that cover ``line`` after its list marker."""
    marker = (_BULLET if rules.has_ordinal_stop else _LIST_MARKER).match(line)
    start = marker.end() if marker else 0
    # Without a single capital the case of the next letter says nothing: treat it as upper-case.
    ignore_case = line == line.lower()
    for stop in _STOP.finditer(line, start):
        if _ends_sentence(line, stop, rules, ignore_case=ignore_case):
            end = stop.end()
            if smileys := _SMILEYS_AFTER_STOP.match(line, end):
                end = smileys.end()
            yield start, end
            start = end
    if start < len(line):
        yield start, len(line)


def _ends_sentence(line: str, stop: re.Match[str], rules: _Rules, *, ignore_case: bool) -> bool:
    end = stop.end()
    if end == len(line):
        return True
    mark = stop[0].rstrip(_CLOSING_CHARACTERS)
    closers = stop[0][len(mark) :]
    following = line[end]
    if mark[-1] in _UNSPACED_STOPS:
        return not following.isdigit()
    if not following.isspace():
        return mark[-1] in "!?" and _UNSPACED_SCRIPT.match(following) is not None

    prefix = _BEFORE_WORD.match(line, end)
    word_start = prefix.end() if prefix else end
    word = _NEXT_WORD.match(line, word_start)
    if word is None:
        # Symbols or nothing; if another stop follows ("Well . . . yes"), that one decides.
        return word_start == len(line) or line[word_start] not in _SPACED_STOPS
    is_lower = word[0][0].islower() and not _CAMEL_CASE.match(word[0])
    if is_lower and not ignore_case:
        after_dash = any(dash in line[end:word_start] for dash in "—–")
        return mark[-1] in "!?" and not closers and not after_dash
    if mark == "…" or mark.endswith(".."):
        # "I" is a capital anywhere, so it does not show that a sentence begins.
        return not (rules.language == "en" and word[0] == "I")
    if mark != ".":
        return True
    return _stop_is_not_abbreviation(line, stop.start(), word[0], closers, rules, ignore_case)


def _stop_is_not_abbreviation(
    line: str, position: int, next_word: str, closers: str, rules: _Rules, ignore_case: bool
) -> bool:
    before = _WORD_BEFORE_STOP.search(line[max(0, position - _MAX_ABBREVIATION_CHARS) : position])
    if before is None:
        return True
    word = before[0].lstrip(".")
    key = word.lower()
    tables = rules.abbreviations
    if rules.has_ordinal_stop and key.isdigit() and len(key) <= 2:
        return False
    if key in tables.before_name:
        return False
    number_follows = next_word[0].isdigit() or _ROMAN_NUMERAL.match(next_word) is not None
    if key in tables.before_number and number_follows:
        return False
    if key in tables.before_capital:
        return next_word in tables.openers
    if key in tables.anywhere:
        return not (ignore_case or next_word[0].isdigit() or closers[:1] in {")", "]"})
    is_initial = len(word) == 1 and word.isalpha() and (word.isupper() or ignore_case)
    if is_initial or _DOTTED.match(word):
        return next_word in tables.openers
    return True
