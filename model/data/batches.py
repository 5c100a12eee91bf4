"""Batches of about one size in tokens, drawn from weighted sources: a pure function of seed and position.

Nothing random is kept between batches. Every draw follows from the seed and a few counters, so that a run
that stops and goes on sees exactly the batches that it would have seen.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from model.data.dataset import IndexArray, TokenPairs


@dataclass(frozen=True)
class Batch:
    """B pairs, padded on the right.

    Attributes:
        source_ids: i64 [B, S].
        source_mask: bool [B, S], True at real tokens.
        target_ids: i64 [B, T].
        target_mask: bool [B, T].
        origins: i64 [B], the number of the source that each pair was drawn from.
        place: its chunk and its number there, the same whenever a stream gives it again; None where no stream
            did.
    """

    source_ids: Tensor
    source_mask: Tensor
    target_ids: Tensor
    target_mask: Tensor
    origins: Tensor
    place: tuple[int, int] | None = None

    def to(self, device: torch.device) -> Batch:
        """The same on another device."""
        return Batch(
            self.source_ids.to(device),
            self.source_mask.to(device),
            self.target_ids.to(device),
            self.target_mask.to(device),
            self.origins.to(device),
            self.place,
        )

    def pairs(self) -> Iterator[tuple[list[int], list[int]]]:
        """The token ids of each pair's source and target, without padding."""
        sides = zip(self.source_ids, self.source_mask, self.target_ids, self.target_mask, strict=True)
        for source, source_mask, target, target_mask in sides:
            yield source[source_mask].tolist(), target[target_mask].tolist()

    def num_target_tokens(self) -> int:
        """Real target tokens, end tokens included."""
        return int(self.target_mask.sum())


class WeightedSource(NamedTuple):
    """Pairs, and their share of the pairs drawn in relation to the other sources' weights."""

    pairs: TokenPairs
    weight: float


@dataclass(frozen=True)
class StreamPosition:
    """Where a stream of batches stands.

    Attributes:
        chunk: chunks that were used up.
        batch: batches used up of the chunk after them, those of all rounds together.
        drawn: pairs drawn from each source by the chunks used up.
    """

    chunk: int
    batch: int
    drawn: tuple[int, ...]

    def to_json(self) -> dict[str, object]:
        """For a checkpoint."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, object]) -> StreamPosition:
        """From a checkpoint."""
        chunk, batch, drawn = fields["chunk"], fields["batch"], fields["drawn"]
        if not (isinstance(chunk, int) and isinstance(batch, int) and isinstance(drawn, list)):
            raise TypeError("chunk and batch are integers and drawn is a list of them")
        return cls(chunk, batch, tuple(drawn))


class BatchStream:
    """Endless batches; each source is gone through in a new random order every time.

    Pairs are drawn in chunks. Within a chunk pairs of similar length share a batch, and the batches are
    shuffled: padding stays small and no long run of short sentences comes. A chunk may be gone through in
    several rounds, each in another order, before the next is drawn.

    Every process makes the same stream; process ``rank`` of ``num_processes`` takes its own part of each
    batch's pairs, so that together they see what one process would.
    """

    def __init__(
        self,
        sources: Sequence[WeightedSource],
        *,
        max_tokens: int,
        seed: int,
        chunk_pairs: int = 8192,
        rounds: int = 1,
    ) -> None:
        """Begin.

        Args:
            sources: at least one, none of them empty.
            max_tokens: of a batch, B x max(S, T), padding included; a pair with more makes a batch alone.
            seed: everything random follows from it.
            chunk_pairs: pairs that are sorted by length together; fewer where they would go through every
                source more than once, because copies of a pair, equally long, would share batches.
            rounds: how often each chunk is gone through.

        Raises:
            ValueError: there is no source, one is empty, or a weight, `chunk_pairs` or `rounds` is not
                positive.
        """
        if not sources:
            raise ValueError("there are 0 sources of pairs; at least 1 is needed")
        for number, source in enumerate(sources):
            if not len(source.pairs) or not source.weight > 0:
                raise ValueError(
                    f"source {number} has {len(source.pairs)} pairs and weight {source.weight}; both must be "
                    "more than 0"
                )
        if chunk_pairs < 1:
            raise ValueError(f"chunk_pairs is {chunk_pairs}; it must be at least 1")
        if rounds < 1:
            raise ValueError(f"rounds is {rounds}; it must be at least 1")
        self._sources = sources
        self._shares = np.array([source.weight for source in sources]) / sum(
            source.weight for source in sources
        )
        self._max_tokens = max_tokens
        self._seed = seed
        self._rounds = rounds
        longest_pass = max(
            len(source.pairs) / share if share else math.inf
            for source, share in zip(sources, self._shares.tolist(), strict=True)
        )
        self._chunk_pairs = chunk_pairs if longest_pass >= chunk_pairs else math.ceil(longest_pass)
        self._orders: dict[tuple[int, int], IndexArray] = {}
        self._position = StreamPosition(0, 0, (0,) * len(sources))
        self._batches = self._chunk(self._position)
        self._order = self._order_of(self._position)

    def go_to(self, position: StreamPosition) -> None:
        """Go on where another stream over the same sources stood.

        Raises:
            ValueError: it was over other sources, or batches of another size.
        """
        if len(position.drawn) != len(self._sources):
            raise ValueError(
                f"the position is of {len(position.drawn)} sources and there are {len(self._sources)}; go on "
                "with the sources that the run began with"
            )
        batches = self._chunk(position)
        if not 0 <= position.batch <= len(batches) * self._rounds:
            raise ValueError(
                f"the position is after batch {position.batch} of a chunk that has "
                f"{len(batches) * self._rounds}; go on with the sources, the rounds and the size of batches "
                "that the run began with"
            )
        self._position = position
        self._batches = batches
        self._order = self._order_of(position)

    @property
    def position(self) -> StreamPosition:
        """Where the next batch stands."""
        return self._position

    def passes(self) -> tuple[float, ...]:
        """How often each source was gone through."""
        used = (self._batches[number] for number in self._order[: self._position.batch])
        in_chunk = Counter(source for batch in used for source, _ in batch)
        return tuple(
            (drawn * self._rounds + in_chunk[number]) / len(source.pairs)
            for number, (drawn, source) in enumerate(zip(self._position.drawn, self._sources, strict=True))
        )

    def next_batch(self, *, rank: int = 0, num_processes: int = 1) -> Batch | None:
        """The part of the next batch that is this process's; None where a batch has too few pairs for all."""
        position = self._position
        while position.batch == len(self._order):  # a chunk of few pairs may hold none
            position = StreamPosition(position.chunk + 1, 0, self._drawn_after(position))
            self._batches = self._chunk(position)
            self._order = self._order_of(position)
        number = self._order[position.batch]
        mine = self._batches[number][rank::num_processes]
        self._position = StreamPosition(position.chunk, position.batch + 1, position.drawn)
        if not mine:
            return None
        batch = padded_batch(
            [self._pair(source, index) for source, index in mine], origins=[source for source, _ in mine]
        )
        return replace(batch, place=(position.chunk, number))

    def _quota(self, chunk: int) -> list[int]:
        """Pairs of each source in a chunk: over all chunks the shares hold to within one pair."""
        before = np.floor(self._shares * (chunk * self._chunk_pairs)).astype(np.int64)
        after = np.floor(self._shares * ((chunk + 1) * self._chunk_pairs)).astype(np.int64)
        return [int(count) for count in after - before]

    def _drawn_after(self, position: StreamPosition) -> tuple[int, ...]:
        return tuple(
            drawn + count for drawn, count in zip(position.drawn, self._quota(position.chunk), strict=True)
        )

    def _chunk(self, position: StreamPosition) -> list[list[tuple[int, int]]]:
        """The batches of one chunk, each a list of source number and index."""
        chosen = [
            (source, self._index(source, number))
            for source, (drawn, count) in enumerate(
                zip(position.drawn, self._quota(position.chunk), strict=True)
            )
            for number in range(drawn, drawn + count)
        ]
        random = np.random.default_rng([self._seed, 0, position.chunk])
        random.shuffle(chosen)  # ties of length are broken by chance, not by source
        sized = sorted(
            ((max(len(source_ids), len(target_ids)), len(source_ids), place), entry)
            for place, entry in enumerate(chosen)
            for source_ids, target_ids in (self._pair(*entry),)
        )
        batches: list[list[tuple[int, int]]] = []
        for (longest, _, _), entry in sized:
            # Sorted by length: the one that comes is the longest of its batch.
            if batches and longest * (len(batches[-1]) + 1) <= self._max_tokens:
                batches[-1].append(entry)
            else:
                batches.append([entry])
        random.shuffle(batches)
        return batches

    def _order_of(self, position: StreamPosition) -> list[int]:
        """The numbers of the chunk's batches in the order of all rounds."""
        order = list(range(len(self._batches)))  # which are shuffled
        for later in range(1, self._rounds):
            random = np.random.default_rng([self._seed, 4, position.chunk, later])
            order += random.permutation(len(self._batches)).tolist()
        return order

    def _index(self, source: int, number: int) -> int:
        """Which pair of a source is drawn as its number-th."""
        num_pairs = len(self._sources[source].pairs)
        pass_number, place = divmod(number, num_pairs)
        key = (source, pass_number)
        if key not in self._orders:
            self._orders = {known: order for known, order in self._orders.items() if known[0] != source}
            random = np.random.default_rng([self._seed, 1, source, pass_number])
            self._orders[key] = random.permutation(num_pairs)
        return int(self._orders[key][place])

    def _pair(self, source: int, index: int) -> tuple[Sequence[int], Sequence[int]]:
        pairs = self._sources[source].pairs
        return pairs.source(index), pairs.target(index)  # type: ignore[return-value]  # arrays of integers


def padded_batch(
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]], *, origins: Sequence[int] | None = None
) -> Batch:
    """One batch of pairs of token ids, padded with 0; without `origins` all are of source 0."""
    source_ids, source_mask = padded([source for source, _ in pairs])
    target_ids, target_mask = padded([target for _, target in pairs])
    origin_of_pair = torch.tensor(origins if origins is not None else [0] * len(pairs))
    return Batch(source_ids, source_mask, target_ids, target_mask, origin_of_pair)


def padded(sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Sequences as i64 [B, T], padded with 0, and their mask, bool [B, T], True at real tokens."""
    longest = max(map(len, sequences))
    ids = np.zeros((len(sequences), longest), dtype=np.int64)
    mask = np.zeros((len(sequences), longest), dtype=np.bool_)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = sequence
        mask[row, : len(sequence)] = True
    return torch.from_numpy(ids), torch.from_numpy(mask)
