"""Which row slot holds whom. Pure: no arrays, no model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

Occupant = TypeVar("Occupant")


@dataclass(frozen=True)
class SlotMove:
    """The row in `from_slot` must be copied to `to_slot` to keep running rows dense."""

    from_slot: int
    to_slot: int


class RowSlots(Generic[Occupant]):
    """Dense slots: occupants always fill 0..R-1, so a step runs over a prefix of every buffer."""

    def __init__(self, max_rows: int) -> None:
        """Create `max_rows` empty slots."""
        self._max_rows = max_rows
        self._occupants: list[Occupant] = []

    def __len__(self) -> int:
        """R, the number of occupied slots."""
        return len(self._occupants)

    @property
    def occupants(self) -> tuple[Occupant, ...]:
        """Occupants by slot."""
        return tuple(self._occupants)

    @property
    def num_free(self) -> int:
        """Slots still empty."""
        return self._max_rows - len(self._occupants)

    def take(self, occupant: Occupant) -> int:
        """Seat the occupant in the first free slot and return that slot."""
        if not self.num_free:
            raise RuntimeError(f"all {self._max_rows} slots are taken")
        self._occupants.append(occupant)
        return len(self._occupants) - 1

    def leave(self, slot: int) -> SlotMove | None:
        """Free a slot; the last occupant moves into it unless it was the last itself."""
        last = len(self._occupants) - 1
        if not 0 <= slot <= last:
            raise RuntimeError(f"slot {slot} is empty; {last + 1} are taken")
        moved = self._occupants.pop()
        if slot == last:
            return None
        self._occupants[slot] = moved
        return SlotMove(from_slot=last, to_slot=slot)

    def clear(self) -> tuple[Occupant, ...]:
        """Empty every slot and return who was there."""
        occupants = self.occupants
        self._occupants.clear()
        return occupants
