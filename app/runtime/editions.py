"""Which models serve. Each loading of a model is an edition, and a request stays with the one it began with.

For the event loop only.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from app.runtime.pairs import PairTable
from app.runtime.request import PairInfo
from app.runtime.served_model import ServedModel


@dataclass(frozen=True, eq=False)
class Edition:
    """A model as it was loaded once; loaded anew, it is another edition of the same id.

    Attributes:
        name: what its lanes and its translations in the cache are known by; no two editions share one.
        model: what was loaded.
    """

    name: str
    model: ServedModel


@dataclass(frozen=True, eq=False)
class _Offer:
    """What is served at one moment; exchanged as a whole, never changed."""

    edition_of: Mapping[str, Edition]
    pairs: PairTable


class Editions:
    """The editions that serve new requests, and those that older requests still use."""

    def __init__(self, models: Sequence[ServedModel], *, on_unused: Callable[[Edition], None]) -> None:
        """Serve `models`; of two for one pair the first serves it.

        Args:
            models: in order of precedence.
            on_unused: told once of each edition that no request uses nor will use.
        """
        self._numbers = itertools.count(1)
        self._num_users: Counter[Edition] = Counter()
        self._on_unused = on_unused
        self._offer = _offer_of([self.make(model) for model in models])

    def make(self, model: ServedModel) -> Edition:
        """A new edition, which serves nobody yet."""
        return Edition(f"{model.id}#{next(self._numbers)}", model)

    @property
    def served(self) -> Mapping[str, Edition]:
        """What serves new requests, by the model's id, in order of precedence."""
        return self._offer.edition_of

    @property
    def pairs(self) -> tuple[PairInfo, ...]:
        """Every direction served, sorted by code; the same object until an exchange."""
        return self._offer.pairs.pairs

    def find_pair(self, source: str, target: str) -> PairInfo:
        """The direction that serves these codes.

        Raises:
            UnsupportedPair: no model translates this pair.
        """
        return self._offer.pairs.find(source, target)

    def find(self, source: str, target: str) -> Edition:
        """What translates these codes.

        Raises:
            UnsupportedPair: no model translates this pair.
        """
        return self._offer.edition_of[self.find_pair(source, target).model]

    def enter(self, *editions: Edition) -> None:
        """Keep editions that are served now usable until `leave`, whatever is served meanwhile."""
        self._num_users.update(editions)

    def leave(self, *editions: Edition) -> None:
        """Need editions no longer that were entered."""
        for edition in editions:
            self._num_users[edition] -= 1
            if not self._num_users[edition]:
                del self._num_users[edition]
                self._retire_unless_needed(edition)

    def exchange(self, editions: Sequence[Edition]) -> None:
        """Serve these from now on; in order of precedence."""
        before, self._offer = self._offer, _offer_of(editions)
        for edition in before.edition_of.values():
            self._retire_unless_needed(edition)

    def _retire_unless_needed(self, edition: Edition) -> None:
        is_served = self._offer.edition_of.get(edition.model.id) is edition
        if not is_served and edition not in self._num_users:
            self._on_unused(edition)


def _offer_of(editions: Sequence[Edition]) -> _Offer:
    return _Offer(
        {edition.model.id: edition for edition in editions},
        PairTable(pair for edition in editions for pair in edition.model.pairs),
    )
