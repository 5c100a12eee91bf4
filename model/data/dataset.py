"""Pairs of token ids, tightly packed: what is left of a corpus when text becomes numbers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from app.errors import CheckpointError

TokenArray = npt.NDArray[np.int32]
IndexArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TokenPairs:
    """N pairs of source and target, each side in one flat array; every sequence ends with its end token.

    Attributes:
        source_ids: i32, all sources one after the other.
        source_starts: i64 [N + 1]; source n is ``source_ids[source_starts[n] : source_starts[n + 1]]``.
        target_ids: i32, likewise.
        target_starts: i64 [N + 1].
    """

    source_ids: TokenArray
    source_starts: IndexArray
    target_ids: TokenArray
    target_starts: IndexArray

    def __len__(self) -> int:
        """N."""
        return len(self.source_starts) - 1

    def source(self, index: int) -> TokenArray:
        """The source of one pair, i32 [S]."""
        return self.source_ids[self.source_starts[index] : self.source_starts[index + 1]]

    def target(self, index: int) -> TokenArray:
        """The target of one pair, i32 [T]."""
        return self.target_ids[self.target_starts[index] : self.target_starts[index + 1]]

    def lengths(self) -> IndexArray:
        """Tokens of each pair's source and target, i64 [N, 2]."""
        return np.stack([np.diff(self.source_starts), np.diff(self.target_starts)], axis=1)

    @classmethod
    def from_pairs(cls, pairs: Iterable[tuple[Sequence[int], Sequence[int]]]) -> TokenPairs:
        """Pack pairs of token ids, end tokens included; they may come as a stream.

        Raises:
            ValueError: a side is empty; it needs at least its end token.
        """
        sides: tuple[list[TokenArray], list[TokenArray]] = ([], [])
        for number, pair in enumerate(pairs):
            for side, ids in zip(sides, pair, strict=True):
                if not len(ids):
                    raise ValueError(f"pair {number} has an empty side; each needs at least its end token")
                side.append(np.asarray(ids, dtype=np.int32))
        packed = [_packed(side) for side in sides]
        return cls(*packed[0], *packed[1])

    def save(self, path: Path) -> None:
        """Write a safetensors file, which appears complete or not at all.

        Raises:
            CheckpointError: it cannot be written, as on a full disk.
        """
        # Two runs may share a cache: each writes a file of its own.
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        arrays: dict[str, npt.NDArray[Any]] = {
            "source_ids": self.source_ids,
            "source_starts": self.source_starts,
            "target_ids": self.target_ids,
            "target_starts": self.target_starts,
        }
        try:
            save_file(arrays, partial)
            os.replace(partial, path)
        except SafetensorError as error:  # also what it makes of the system's own errors
            partial.unlink(missing_ok=True)
            raise CheckpointError(f"{path} cannot be written ({error}); make room for it") from error

    @classmethod
    def load(cls, path: Path) -> TokenPairs:
        """Read what `save` wrote.

        Raises:
            CheckpointError: the file is missing, damaged, or something else.
        """
        try:
            pairs = cls(**load_file(path))
        except (OSError, SafetensorError, TypeError) as error:
            raise CheckpointError(
                f"{path} does not hold token pairs ({type(error).__name__}); delete it, it is made anew"
            ) from error
        for ids, starts in ((pairs.source_ids, pairs.source_starts), (pairs.target_ids, pairs.target_starts)):
            if ids.dtype != np.int32 or starts.dtype != np.int64 or ids.ndim != 1 or starts.ndim != 1:
                raise CheckpointError(f"{path} does not hold token pairs; delete it, it is made anew")
            if not len(starts) or starts[0] or starts[-1] != len(ids) or (np.diff(starts) < 1).any():
                raise CheckpointError(f"{path} contradicts itself; delete it, it is made anew")
        if len(pairs.source_starts) != len(pairs.target_starts):
            raise CheckpointError(f"{path} has more of one side; delete it, it is made anew")
        return pairs


def _packed(sequences: Sequence[TokenArray]) -> tuple[TokenArray, IndexArray]:
    starts = np.zeros(len(sequences) + 1, dtype=np.int64)
    np.cumsum([len(ids) for ids in sequences], out=starts[1:])
    ids = np.concatenate(sequences) if sequences else np.zeros(0, dtype=np.int32)
    return ids, starts
