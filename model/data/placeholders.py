"""What a translation must take over as it is: placeholders, tags, entities and addresses."""

from __future__ import annotations

import re
from collections import Counter

_MAYBE = re.compile(r"[%{<&]|://")
_PLACEHOLDER = re.compile(
    r"""
      \$\{[^{}]*\}                                                   # ${name}
    | \{[\w.:!\[\]-]*\}                                              # {}, {0}, {name!r}
    | \{\s*[-$\#][\w.-]+\s*\}                                        # { $count }, { -brand }
    | %\([\w.]+\)[-+\#0]*\d*(?:\.\d+)?[sdifgxXcr]                    # %(name)d
    | (?<!\d)%(?:\d+\$)?[-+\#0]*\d*(?:\.\d+)?(?:hh?|ll?|[zjt])?[sdiufgxXcp@](?![^\W\d_]{2})  # %s, %2$d, %.1f
    | (?P<tag></?[A-Za-z][\w:.-]*)(?:\s[^<>]*)?/?>                   # <tag>, its attributes may be translated
    | &(?:[A-Za-z][\w.-]*|\#\d+|\#x[0-9A-Fa-f]+);                    # &entity;
    | (?P<address>[A-Za-z][A-Za-z0-9+.-]*://\w[^\s<>"'(){}\[\]]+)
    """,
    re.VERBOSE,
)


def placeholders(text: str) -> Counter[str]:
    """The placeholders of a text, and how often it has each.

    These are ``${x}``, ``{x}`` with one word or none, ``{ $x }``, ``%(x)d``, ``%s`` and other printf formats,
    ``<tag>`` and ``</tag>`` (without attributes), ``&entity;`` and addresses with ``://`` (without a full
    stop or the like at their ends). ``%%`` is none, nor is a per cent sign after a digit or before a word.
    """
    found: Counter[str] = Counter()
    if _MAYBE.search(text):
        for match in _PLACEHOLDER.finditer(text.replace("%%", "")):
            if tag := match["tag"]:
                found[f"{tag}>"] += 1
            elif address := match["address"]:
                found[address.rstrip(".,;:!?/")] += 1
            else:
                found["".join(match[0].split())] += 1
    return found
