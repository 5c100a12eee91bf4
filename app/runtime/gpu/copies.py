"""Copies between the rows of a buffer that have yet to be made, put together into one. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from app.runtime.runner import Int64Array


@dataclass(frozen=True)
class RowCopies:
    """M rows to be copied at once: all are read before any is written.

    Attributes:
        from_rows: int64 [M].
        to_rows: int64 [M], each once.
    """

    from_rows: Int64Array
    to_rows: Int64Array

    @classmethod
    def none(cls) -> RowCopies:
        """Nothing to copy."""
        return cls(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))

    def __len__(self) -> int:
        """M."""
        return len(self.to_rows)


class PendingCopies:
    """Where the content of each row will come from once everything asked for so far is done.

    Rows move, follow their beams and are emptied between two steps, each at a launch of its own on a
    device; as one permutation they cost one.
    """

    def __init__(self, num_rows: int) -> None:
        """Let every row be its own; row `num_rows`, behind them all, is one that is always zero."""
        self._own = np.arange(num_rows, dtype=np.int64)
        self._source = self._own.copy()

    def copy(self, from_rows: Int64Array, to_rows: Int64Array) -> None:
        """Let rows have what others have by now, all at once."""
        self._source[to_rows] = self._source[from_rows]

    def empty(self, rows: Int64Array) -> None:
        """Let rows be zero."""
        self._source[rows] = len(self._own)

    def outstanding(self) -> RowCopies:
        """What must be copied."""
        to_rows = np.flatnonzero(self._source != self._own)
        return RowCopies(self._source[to_rows], to_rows)

    def clear(self) -> None:
        """All that was outstanding is done."""
        self._source[:] = self._own
