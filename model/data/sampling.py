"""Choosing by a keyed hash: the same texts whatever their order, and others for every seed."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def lowest_hashes(
    items: Iterable[Item],
    *,
    num_items: int,
    seed: int,
    text_of: Callable[[Item], str],
    tie_of: Callable[[Item], str],
) -> Iterator[Item]:
    """The items whose texts have the lowest hashes, lowest first; no more than those are in memory.

    The hash is BLAKE2b of 8 bytes with the seed as its key. Which items come, and in which order, follows
    from the items and the seed, not from the order in which they are given.

    Args:
        items: all of them; a text that comes several times is chosen with all its items, or ends the choice.
        num_items: most items wanted, at least 1.
        seed: of 64 bits, signed.
        text_of: the text that is hashed.
        tie_of: orders items of one text.
    """
    # A heap keeps its smallest in front, and what must leave is the greatest: hence the minus.
    chosen: list[tuple[int, _Reversed, int, Item]] = []
    for number, item in enumerate(items):
        rank = -keyed_hash(text_of(item), seed=seed)
        if len(chosen) < num_items:
            heapq.heappush(chosen, (rank, _Reversed(tie_of(item)), -number, item))
        elif rank >= chosen[0][0]:
            heapq.heappushpop(chosen, (rank, _Reversed(tie_of(item)), -number, item))
    for *_, item in sorted(chosen, key=lambda entry: entry[:3], reverse=True):
        yield item


def keyed_hash(text: str, *, seed: int) -> int:
    """BLAKE2b of 8 bytes with the seed, 64 bits signed, as its key."""
    key = seed.to_bytes(8, "big", signed=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, key=key).digest(), "big")


class _Reversed(str):
    """A string that sorts the other way round."""

    __slots__ = ()

    def __lt__(self, other: str) -> bool:
        return str.__gt__(self, other)

    def __gt__(self, other: str) -> bool:
        return str.__lt__(self, other)
