"""Lexical shortlist: which target tokens a source sentence can need.

Restricting the output projection to a few thousand likely tokens instead of the whole vocabulary
is most of what makes a small translation model fast on a CPU. The rule is Marian's
(marian-dev, src/data/shortlist.cpp, ``BinaryShortlistGenerator::generate``): the tokens that are
frequent everywhere, and those that a word-alignment model saw opposite each source token.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from app.errors import BundleCorrupt, BundleUnsupported

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Uint8Array = npt.NDArray[np.uint8]

CANDIDATES_MULTIPLE = 8
"""Marian's integer matrix product wants this many columns at a time."""
FORMAT_VERSION = 1
MAX_VOCABULARY_SIZE = 1 << 20
MAX_ENTRIES = 1 << 24
"""Bound of the sum of all lists' lengths; Firefox's files have 1.2 million."""

_MARK = b"DRGNLIST"
_HEADER = struct.Struct("<8s5I")
_MAX_PLANES = 3


class Shortlist:
    """The candidate target tokens of every source token.

    Immutable after construction and safe to share between threads.

    Attributes:
        vocabulary_size: V; source and target ids are below it.
        num_frequent: the ids below it are candidates for every sentence.
    """

    def __init__(self, offsets: Int64Array, targets: Int32Array, *, num_frequent: int) -> None:
        """Take the lists of all source tokens, one after the other.

        Ids below ``num_frequent`` are candidates anyway and are dropped from the lists.

        Args:
            offsets: int64 [V + 1]; the list of source id ``i`` is ``targets[offsets[i]:offsets[i + 1]]``.
            targets: int32 [offsets[-1]], strictly ascending ids within a list.
            num_frequent: number of lowest ids that are always candidates, 0 to V.

        Raises:
            ValueError: the arrays contradict each other or the vocabulary.
        """
        vocabulary_size = len(offsets) - 1
        if not 1 <= vocabulary_size <= MAX_VOCABULARY_SIZE:
            raise ValueError(
                f"the vocabulary size is {vocabulary_size}; the range is 1 to {MAX_VOCABULARY_SIZE}"
            )
        if not 0 <= num_frequent <= vocabulary_size:
            raise ValueError(f"num_frequent is {num_frequent}; the range is 0 to {vocabulary_size}")
        if offsets[0] != 0 or offsets[-1] != len(targets) or (np.diff(offsets) < 0).any():
            raise ValueError(f"the offsets must rise from 0 to the number of entries ({len(targets)})")
        if len(targets) and not (targets.min() >= 0 and targets.max() < vocabulary_size):
            raise ValueError(f"a target id is outside 0 to {vocabulary_size - 1}")
        rises = np.diff(targets) > 0
        list_starts = offsets[1:-1]
        rises[list_starts[(list_starts > 0) & (list_starts < len(targets))] - 1] = True
        if not rises.all():
            raise ValueError("the target ids of a source token must be strictly ascending")
        self.vocabulary_size = vocabulary_size
        self.num_frequent = num_frequent
        listed = targets >= num_frequent
        num_listed_before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(listed, dtype=np.int64)])
        self._offsets = num_listed_before[offsets]
        self._targets = targets[listed].astype(np.int32)
        self._offsets.flags.writeable = False
        self._targets.flags.writeable = False
        # Cutting all views once costs 0.1 kB a token and saves a third of the time per sentence.
        # By slices: np.split takes ten times as long, a tenth of a second with 32,000 tokens.
        self._list_of_source: list[Int32Array] = [
            self._targets[start:end] for start, end in itertools.pairwise(self._offsets.tolist())
        ]

    def __eq__(self, other: object) -> bool:
        """Whether both hold the same lists."""
        if not isinstance(other, Shortlist):
            return NotImplemented
        return (
            self.num_frequent == other.num_frequent
            and np.array_equal(self._offsets, other._offsets)
            and np.array_equal(self._targets, other._targets)
        )

    __hash__ = None  # type: ignore[assignment]  # compared by content, too large to hash

    @property
    def num_entries(self) -> int:
        """Sum of the lengths of all lists, frequent ids left out."""
        return len(self._targets)

    def targets_of(self, source_id: int) -> Int32Array:
        """The targets of one source token that are not frequent, int32 [n], ascending, read-only."""
        self._check_ids([source_id])
        return self._list_of_source[source_id]

    def candidates(self, source_ids: Sequence[int]) -> Int32Array:
        """The target ids that may translate a sentence.

        The union of the frequent ids and the lists of all source ids, padded with the lowest
        unused ids until the count is a multiple of ``CANDIDATES_MULTIPLE`` or the vocabulary ends.

        Args:
            source_ids: the sentence's token ids, including the final EOS as Marian counts it.

        Returns:
            int32 [n], ascending and unique.

        Raises:
            ValueError: an id is outside the vocabulary.
        """
        self._check_ids(source_ids)
        chosen = np.zeros(self.vocabulary_size, dtype=np.bool_)
        chosen[: self.num_frequent] = True
        lists = self._list_of_source
        if source_ids:
            chosen[np.concatenate([lists[source_id] for source_id in set(source_ids)])] = True
        num_chosen = int(np.count_nonzero(chosen))
        num_missing = -num_chosen % CANDIDATES_MULTIPLE
        if num_missing:
            # Of the first num_chosen + num_missing ids at least num_missing are unused.
            unused = np.flatnonzero(~chosen[: num_chosen + num_missing])
            chosen[unused[:num_missing]] = True
        return np.flatnonzero(chosen).astype(np.int32)

    def _check_ids(self, source_ids: Sequence[int]) -> None:
        if len(source_ids) and not (min(source_ids) >= 0 and max(source_ids) < self.vocabulary_size):
            raise ValueError(
                f"the source ids range from {min(source_ids)} to {max(source_ids)}; "
                f"the shortlist's vocabulary is 0 to {self.vocabulary_size - 1}: it belongs to another model"
            )

    def save(self, path: Path) -> None:
        """Write the compact form that ``load`` reads; the same lists give the same bytes.

        A header of little-endian u32 (after an 8-byte mark: format version, V, num_frequent, p, number
        of entries), then one zlib stream of the lists' lengths, uint32 [V], and of the differences
        of the ids within each list, the first counted from 0, uint8 [p, entries]: one row per byte,
        the most significant first. Split by bytes they deflate 12 % better than as whole numbers, and
        another 3 % without zlib's search for repetitions, of which such differences have none.
        """
        list_starts = self._offsets[:-1][np.diff(self._offsets) > 0]
        deltas = np.diff(self._targets, prepend=np.int32(0))
        deltas[list_starts] = self._targets[list_starts]
        num_planes = max(1, (int(deltas.max(initial=0)).bit_length() + 7) // 8)
        planes = [(deltas >> (8 * plane) & 0xFF).astype(np.uint8) for plane in reversed(range(num_planes))]
        header = _HEADER.pack(
            _MARK, FORMAT_VERSION, self.vocabulary_size, self.num_frequent, num_planes, self.num_entries
        )
        lengths = np.diff(self._offsets).astype("<u4")
        body = b"".join([lengths.tobytes(), *(plane.tobytes() for plane in planes)])
        stream = zlib.compressobj(level=9, strategy=zlib.Z_HUFFMAN_ONLY)
        path.write_bytes(header + stream.compress(body) + stream.flush())

    @classmethod
    def load(cls, path: Path) -> Shortlist:
        """Read what ``save`` wrote, trusting none of it.

        Raises:
            BundleCorrupt: the file is missing or damaged, or would unpack to more than it announces.
            BundleUnsupported: the file is of another format version.
        """
        try:
            content = path.read_bytes()
        except OSError as error:
            raise _corrupt(path, f"unreadable ({error.strerror})", "a shortlist") from error
        if len(content) < _HEADER.size or not content.startswith(_MARK):
            raise _corrupt(path, "no shortlist's mark at the start", repr(_MARK))
        _, version, vocabulary_size, num_frequent, num_planes, num_entries = _HEADER.unpack_from(content)
        if version != FORMAT_VERSION:
            raise BundleUnsupported(
                f"{path.name}: the shortlist's format version is {version}, this release reads "
                f"{FORMAT_VERSION}; export the bundle again, or use the release that made it"
            )
        for what, value, low, high in (
            ("vocabulary size", vocabulary_size, 1, MAX_VOCABULARY_SIZE),
            ("number of entries", num_entries, 0, MAX_ENTRIES),
            ("number of bytes per difference", num_planes, 1, _MAX_PLANES),
        ):
            if not low <= value <= high:
                raise _corrupt(path, f"the {what} is {value}", f"{low} to {high}")
        body = _decompress(content[_HEADER.size :], 4 * vocabulary_size + num_planes * num_entries, path)
        lengths = np.frombuffer(body, dtype="<u4", count=vocabulary_size).astype(np.int64)
        planes = np.frombuffer(body, dtype=np.uint8, offset=4 * vocabulary_size).reshape(
            num_planes, num_entries
        )
        offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
        if offsets[-1] != num_entries:
            raise _corrupt(path, f"the lists hold {offsets[-1]} entries", f"{num_entries} as the header says")
        deltas = np.zeros(num_entries, dtype=np.int64)
        for plane in planes:
            deltas = (deltas << 8) | plane
        # Undo the differences of all lists at once: a running sum, less what it was where the list began.
        running = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(deltas)])
        targets = running[1:] - np.repeat(running[offsets[:-1]], lengths)
        if targets.max(initial=0) >= vocabulary_size:
            raise _corrupt(path, f"a target id is {targets.max()}", f"ids below {vocabulary_size}")
        try:
            return cls(offsets, targets.astype(np.int32), num_frequent=num_frequent)
        except ValueError as error:
            raise _corrupt(path, str(error), "a consistent shortlist") from error


def _corrupt(path: Path, found: str, expected: str) -> BundleCorrupt:
    return BundleCorrupt(f"{path.name}: {found}, expected {expected}; export or download the bundle again")


def _decompress(content: bytes, num_expected_bytes: int, path: Path) -> bytes:
    """Inflate, never producing more than the expected size and one byte."""
    stream = zlib.decompressobj()
    try:
        body = stream.decompress(content, num_expected_bytes + 1)
    except zlib.error as error:
        raise _corrupt(path, "the compressed lists are damaged", "one zlib stream") from error
    if len(body) != num_expected_bytes or not stream.eof or stream.unused_data:
        raise _corrupt(
            path,
            "the compressed lists are longer or shorter than announced",
            f"{num_expected_bytes} bytes in all",
        )
    return body
