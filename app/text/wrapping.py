"""Wrap a segment that is longer than the model's limit.

The cut is placed near the middle (or the third, ...) of the segment, at the best border in a window
around that place: after a clause mark (``; : —``, then ``,``, and their full-width forms), else at white
space, else between two characters that may be parted. Both sides are then counted and cut again if need be,
so the pieces are of similar length ("64 + 67", never "128 + 3") and each one really fits.

Counting tokens is the cost. Parts estimated at more than ``_COUNT_BELOW`` times the limit are cut
without being counted, so each character is tokenised about four times whatever the length (1 MB on one
line with a limit of 128 tokens: 0.5 to 1.4 s on a shared core, with or without spaces).
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, replace

from app.errors import InvalidOption
from app.text.segmentation import SegmentedText, has_letter

# Parts estimated above this multiple of the limit are cut on the estimate alone.
_COUNT_BELOW = 4
# Pieces are planned at this share of the limit, and a cut may move from its place by this share of a piece:
# together about 1, so that moving a cut to a good border seldom makes a piece too long.
_AIM_SHARE = 0.85
_WINDOW_SHARE = 0.25
# How far to look for a border between two grapheme clusters before parting one.
_MAX_CLUSTER_CHARS = 64

# Borders from best to worst; a cut is made at the end of the match.
_BORDERS = (
    re.compile(r"[;:—–…؛][\"'”’»)\]]{0,2}(?=\s)|[!?][\"'”’»)\]]{0,2}(?=\s)|[；：。！？…—]"),
    re.compile(r",[\"'”’»)\]]{0,2}(?=\s)|[)\]](?=\s)|\s(?=[(\[–—-])|[、，،]"),
    re.compile(r"\s(?=\S)"),
)
_ZERO_WIDTH_JOINER = "\u200d"
_NO_BREAK_SPACE = "\u00a0\u202f\u2007"


def wrap(segment: str, *, max_tokens: int, count_tokens: Callable[[str], int]) -> SegmentedText:
    """Cut ``segment`` into pieces of at most ``max_tokens`` tokens.

    Args:
        segment: the text to wrap; usually one sentence.
        max_tokens: the model's limit for one piece, counted as ``count_tokens`` counts.
        count_tokens: number of token ids of a text, EOS included if the limit includes it.

    Returns:
        Pieces and the gaps between them (white space at the cuts); ``join(segments) == segment``. One
        piece if the segment fits. A piece without a letter is part of a gap.

    Raises:
        InvalidOption: ``max_tokens`` is below 1, or a single character needs more than that.
    """
    if max_tokens < 1:
        raise InvalidOption(f"max_tokens is {max_tokens}; it must be at least 1")
    num_tokens = count_tokens(segment)
    if num_tokens <= max_tokens:
        return SegmentedText(segments=(segment,), gaps=("", ""))
    spans: list[tuple[int, int]] = []
    num_pieces = math.ceil(num_tokens / (_AIM_SHARE * max_tokens))
    # A stack instead of recursion; the leftmost part is on top.
    parts = [_Part(0, len(segment), num_tokens=num_tokens, is_counted=True, num_pieces=num_pieces)]
    while parts:
        part = _stripped(segment, parts.pop())
        if part.start == part.end:
            continue
        # A short part is counted whatever its estimate, so a single character is never judged by one.
        size = min(part.num_tokens, part.end - part.start)
        if not part.is_counted and size <= _COUNT_BELOW * max_tokens:
            part = _counted(part, count_tokens(segment[part.start : part.end]), max_tokens)
        if part.is_counted and part.num_tokens <= max_tokens:
            if has_letter(segment, part.start, part.end):
                spans.append((part.start, part.end))
            continue
        if part.end - part.start == 1:
            raise InvalidOption(
                f"max_tokens {max_tokens} is too small: one character needs {int(part.num_tokens)} tokens;"
                " raise the limit"
            )
        left, right = _cut(segment, part)
        parts += [right, left]
    return SegmentedText.from_spans(segment, spans)


@dataclass(frozen=True)
class _Part:
    """A span still to be judged.

    Attributes:
        start, end: the span.
        num_tokens: its count, or an estimate if not ``is_counted``.
        num_pieces: how many pieces it is meant to become.
    """

    start: int
    end: int
    num_tokens: float
    is_counted: bool
    num_pieces: int


def _counted(part: _Part, num_tokens: int, max_tokens: int) -> _Part:
    """Replace the estimate, and the plan as far as the count contradicts it."""
    fewest = math.ceil(num_tokens / max_tokens)
    usual = math.ceil(num_tokens / (_AIM_SHARE * max_tokens))
    num_pieces = min(max(part.num_pieces, fewest), usual)
    return replace(part, num_tokens=num_tokens, is_counted=True, num_pieces=num_pieces)


def _cut(text: str, part: _Part) -> tuple[_Part, _Part]:
    num_pieces = max(2, part.num_pieces)
    num_left = num_pieces // 2
    cut = _cut_position(text, part.start, part.end, share=num_left / num_pieces, num_pieces=num_pieces)
    share = (cut - part.start) / (part.end - part.start)
    return (
        _Part(part.start, cut, part.num_tokens * share, False, num_left),
        _Part(cut, part.end, part.num_tokens * (1 - share), False, num_pieces - num_left),
    )


def _stripped(text: str, part: _Part) -> _Part:
    start, end = part.start, part.end
    while start < end and text[start].isspace():
        start += 1
    while start < end and text[end - 1].isspace():
        end -= 1
    is_same = (start, end) == (part.start, part.end)
    return replace(part, start=start, end=end, is_counted=part.is_counted and is_same)


def _cut_position(text: str, start: int, end: int, *, share: float, num_pieces: int) -> int:
    """Choose where to cut ``text[start:end]`` (2 characters or more), near ``share`` of it, not at an end."""
    length = end - start
    wanted = start + round(length * share)
    radius = max(1, int(_WINDOW_SHARE * length / num_pieces))
    low, high = max(start + 1, wanted - radius), min(end - 1, wanted + radius)
    for border in _BORDERS:
        best: int | None = None
        for match in border.finditer(text, low - 1, high + 1):
            position = match.end()
            if not low <= position <= high or text[position - 1] in _NO_BREAK_SPACE:
                continue
            if best is None or abs(position - wanted) < abs(best - wanted):
                best = position
        if best is not None:
            return best
    return _cluster_border(text, start, end, wanted)


def _cluster_border(text: str, start: int, end: int, wanted: int) -> int:
    """Return the position nearest to ``wanted`` that parts no grapheme cluster, or ``wanted`` itself."""
    wanted = min(max(wanted, start + 1), end - 1)
    for distance in range(_MAX_CLUSTER_CHARS):
        for position in (wanted - distance, wanted + distance):
            if start < position < end and _is_cluster_border(text, position):
                return position
    return wanted


def _is_cluster_border(text: str, position: int) -> bool:
    """Whether ``text`` may be parted before ``position`` (the common cases of UAX #29, not all)."""
    before, after = text[position - 1], text[position]
    if before == _ZERO_WIDTH_JOINER or after == _ZERO_WIDTH_JOINER:
        return False
    if unicodedata.category(after) in {"Mn", "Mc", "Me"} or after in "\u200c\uff9e\uff9f":
        return False
    code_before, code_after = ord(before), ord(after)
    if 0x1F3FB <= code_after <= 0x1F3FF or 0xE0020 <= code_after <= 0xE007F:  # skin tones, flag tags
        return False
    if 0x1160 <= code_after <= 0x11FF and 0x1100 <= code_before <= 0x11FF:  # conjoining Hangul
        return False
    if 0xD800 <= code_before <= 0xDBFF and 0xDC00 <= code_after <= 0xDFFF:
        return False
    if before == "\r" and after == "\n":
        return False
    if _is_regional_indicator(before) and _is_regional_indicator(after):
        run = position
        while run > max(0, position - _MAX_CLUSTER_CHARS) and _is_regional_indicator(text[run - 1]):
            run -= 1
        return (position - run) % 2 == 0
    return True


def _is_regional_indicator(character: str) -> bool:
    return 0x1F1E6 <= ord(character) <= 0x1F1FF
