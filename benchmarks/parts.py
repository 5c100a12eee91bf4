"""Splits a long run into parts that may be run one after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True)
class Part:
    """Part `number` of `count`, counted from 1: every count-th item."""

    number: int
    count: int

    def __post_init__(self) -> None:
        """Refuse a part that is none."""
        if not 1 <= self.number <= self.count:
            raise ValueError(f"{self.number}/{self.count} is no part: write 1/{self.count} and so on")

    @classmethod
    def parse(cls, text: str) -> Part:
        """Read ``I/N``."""
        number, _, count = text.partition("/")
        return cls(int(number), int(count))

    def of(self, items: Sequence[Item]) -> Sequence[Item]:
        """The items of this part."""
        return items[self.number - 1 :: self.count]
