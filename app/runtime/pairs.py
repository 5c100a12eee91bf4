"""Which loaded model translates which pair of languages."""

from __future__ import annotations

from collections.abc import Iterable

from app.errors import UnsupportedPair
from app.runtime.request import PairInfo


class PairTable:
    """The directions served; of two models for one pair the first serves it."""

    def __init__(self, pairs: Iterable[PairInfo]) -> None:
        """Take the pairs of all models, in order of precedence."""
        self._pairs: dict[tuple[str, str], PairInfo] = {}
        for pair in pairs:
            self._pairs.setdefault((pair.source.lower(), pair.target.lower()), pair)
        self.pairs = tuple(self._pairs[key] for key in sorted(self._pairs))
        """Every direction, sorted by code."""

    def find(self, source: str, target: str) -> PairInfo:
        """The direction that serves these codes.

        Codes are compared without case; one that is not served falls back to its language
        (``pt-BR`` to ``pt``).

        Raises:
            UnsupportedPair: no model translates this pair; names those that are served.
        """
        for wanted in (
            (source.lower(), target.lower()),
            (source.lower(), _language(target)),
            (_language(source), target.lower()),
            (_language(source), _language(target)),
        ):
            if wanted in self._pairs:
                return self._pairs[wanted]
        served = ", ".join(f"{pair.source}-{pair.target}" for pair in self.pairs)
        raise UnsupportedPair(
            f"no loaded model translates {_shown(source)}-{_shown(target)}; "
            f"this service has {served or 'none'}"
        )


def _language(code: str) -> str:
    return code.lower().split("-", 1)[0]


def _shown(code: str) -> str:
    """A language code as an error may repeat it: short and plain."""
    return code if len(code) <= 20 and code.isascii() and code.isprintable() else "(not a language code)"
