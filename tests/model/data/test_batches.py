from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.data.batches import Batch, BatchStream, StreamPosition, WeightedSource, padded_batch
from model.data.dataset import TokenPairs

lengths = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=40)


def source_of(sides: Sequence[tuple[int, int]], *, number: int, weight: float = 1.0) -> WeightedSource:
    """Pairs of the given lengths, whose every token says which pair of which source it is of."""
    pairs = [
        ([1000 * number + index + 1] * source, [1000 * number + index + 1] * target)
        for index, (source, target) in enumerate(sides)
    ]
    return WeightedSource(TokenPairs.from_pairs(pairs), weight)


def keys(batch: Batch | None) -> list[int]:
    return [] if batch is None else batch.source_ids[:, 0].tolist()


def batches_of(stream: BatchStream) -> Iterator[Batch]:
    while True:
        batch = stream.next_batch()
        assert batch is not None
        yield batch


def up_to_chunk(stream: BatchStream, num_chunks: int) -> list[Batch]:
    """All batches of the first chunks."""
    taken: list[Batch] = []
    while True:
        before = stream.position
        batch = stream.next_batch()
        assert batch is not None
        if stream.position.chunk >= num_chunks:
            stream.go_to(before)
            return taken
        taken.append(batch)


@settings(deadline=None, max_examples=60)
@given(lengths, st.integers(1, 100), st.integers(0, 9), st.integers(5, 60))
def test_one_source_is_gone_through_once_before_any_pair_comes_again(
    sides: list[tuple[int, int]], chunk_pairs: int, seed: int, max_tokens: int
) -> None:
    stream = BatchStream(
        [source_of(sides, number=0)], max_tokens=max_tokens, seed=seed, chunk_pairs=chunk_pairs
    )
    drawn: list[int] = []
    while len(drawn) < 3 * len(sides):
        drawn.extend(keys(next(batches_of(stream))))
        if stream.position.batch == len(stream._batches):  # a chunk ends here
            counts = Counter(drawn)
            assert max(counts.values()) - min(counts[index + 1] for index in range(len(sides))) <= 1


@settings(deadline=None, max_examples=40)
@given(lengths)
def test_a_source_smaller_than_a_chunk_makes_batches_without_copies(sides: list[tuple[int, int]]) -> None:
    stream = BatchStream([source_of(sides, number=0)], max_tokens=200, seed=3)
    seen: list[int] = []
    for batch in itertools.islice(batches_of(stream), 20):
        assert len(set(keys(batch))) == len(keys(batch))
        seen.extend(keys(batch))
    for start in range(0, len(seen) - len(sides) + 1, len(sides)):
        assert sorted(seen[start : start + len(sides)]) == [index + 1 for index in range(len(sides))]


def test_the_pairs_of_one_batch_are_that_batch_again_and_again() -> None:
    """What learns one batch by heart relies on it."""
    sides = [(1 + index % 9, 1 + index % 7) for index in range(300)]
    first = BatchStream([source_of(sides, number=0)], max_tokens=120, seed=2).next_batch()
    assert first is not None
    lengths = [
        (int(s.sum()), int(t.sum())) for s, t in zip(first.source_mask, first.target_mask, strict=True)
    ]
    stream = BatchStream([source_of(lengths, number=0)], max_tokens=120, seed=2)
    for batch in itertools.islice(batches_of(stream), 5):
        assert sorted(keys(batch)) == [index + 1 for index in range(len(lengths))]


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(lengths, st.floats(1e-3, 1e3, allow_nan=False)), min_size=1, max_size=4),
    st.integers(1, 70),
)
def test_the_shares_of_the_sources_hold_to_within_a_pair_in_every_chunk(
    drawn: list[tuple[list[tuple[int, int]], float]], chunk_pairs: int
) -> None:
    sources = [source_of(sides, number=n, weight=weight) for n, (sides, weight) in enumerate(drawn)]
    stream = BatchStream(sources, max_tokens=50, seed=1, chunk_pairs=chunk_pairs)
    total = sum(weight for _, weight in drawn)
    counts: Counter[int] = Counter()
    for _ in range(12):
        batch = next(batches_of(stream))
        assert [key // 1000 for key in keys(batch)] == batch.origins.tolist()
        counts.update(batch.origins.tolist())
        if stream.position.batch == len(stream._batches):
            expected = (stream.position.chunk + 1) * stream._chunk_pairs
            for number, (_, weight) in enumerate(drawn):
                assert abs(counts[number] - expected * weight / total) < 1 + 1e-6
            assert stream.passes() == tuple(
                counts[number] / len(sides) for number, (sides, _) in enumerate(drawn)
            )


@settings(deadline=None, max_examples=60)
@given(lengths, st.integers(1, 60), st.integers(1, 50))
def test_no_batch_has_more_tokens_than_it_may_unless_one_pair_has(
    sides: list[tuple[int, int]], max_tokens: int, chunk_pairs: int
) -> None:
    stream = BatchStream([source_of(sides, number=0)], max_tokens=max_tokens, seed=2, chunk_pairs=chunk_pairs)
    for batch in itertools.islice(batches_of(stream), 20):
        num_pairs, longest = batch.source_ids.shape
        assert num_pairs == 1 or num_pairs * max(longest, batch.target_ids.shape[1]) <= max_tokens


def test_batches_are_filled_and_hold_pairs_of_similar_length() -> None:
    sides = [(1 + index % 20, 1 + index % 20) for index in range(2000)]
    stream = BatchStream([source_of(sides, number=0)], max_tokens=200, seed=2)
    batches = up_to_chunk(stream, 1)
    real = sum(int(batch.source_mask.sum()) for batch in batches)
    padded = sum(batch.source_ids.numel() for batch in batches)
    assert real / padded > 0.95
    assert real / len(batches) > 0.85 * 200
    shapes = [batch.source_ids.shape[1] for batch in batches]
    assert shapes != sorted(shapes)  # long and short ones take turns


@settings(deadline=None, max_examples=50)
@given(lengths, lengths, st.integers(0, 25), st.integers(1, 60), st.integers(0, 3), st.integers(1, 3))
def test_a_stream_that_goes_to_a_position_gives_the_same_batches(
    first: list[tuple[int, int]],
    second: list[tuple[int, int]],
    stop_at: int,
    chunk_pairs: int,
    seed: int,
    rounds: int,
) -> None:
    def stream() -> BatchStream:
        sources = [source_of(first, number=0, weight=2.0), source_of(second, number=1, weight=0.3)]
        return BatchStream(sources, max_tokens=40, seed=seed, chunk_pairs=chunk_pairs, rounds=rounds)

    whole = stream()
    for _ in range(stop_at):
        whole.next_batch()
    written = json.loads(json.dumps(whole.position.to_json()))
    resumed = stream()
    resumed.go_to(StreamPosition.from_json(written))
    assert resumed.passes() == whole.passes()
    for _ in range(8):
        one, other = whole.next_batch(), resumed.next_batch()
        assert one is not None
        assert other is not None
        assert list(one.pairs()) == list(other.pairs())
        assert one.origins.tolist() == other.origins.tolist()
        assert one.place == other.place
    assert resumed.position == whole.position


def test_in_every_round_the_batches_of_a_chunk_come_once_and_in_another_order() -> None:
    sides = [(1 + index % 20, 1 + index % 20) for index in range(600)]
    sources = [source_of(sides, number=0)]
    once = up_to_chunk(BatchStream(sources, max_tokens=100, seed=2, chunk_pairs=300), 2)
    stream = BatchStream(sources, max_tokens=100, seed=2, chunk_pairs=300, rounds=3)
    for chunk in range(2):
        of_chunk = [keys(batch) for batch in once if batch.place is not None and batch.place[0] == chunk]
        rounds = [[stream.next_batch() for _ in of_chunk] for _ in range(3)]
        found = [[(batch.place, keys(batch)) for batch in one if batch is not None] for one in rounds]
        assert [batch_keys for _, batch_keys in found[0]] == of_chunk
        assert sorted(found[0]) == sorted(found[1]) == sorted(found[2])
        assert found[0] != found[1] != found[2] != found[0]
    assert stream.passes() == (3.0,)


@pytest.mark.parametrize("rounds", [0, -1])
def test_there_is_at_least_one_round(rounds: int) -> None:
    with pytest.raises(ValueError, match=f"rounds is {rounds}"):
        BatchStream([source_of([(1, 1)], number=0)], max_tokens=10, seed=1, rounds=rounds)


@settings(deadline=None, max_examples=40)
@given(lengths, st.integers(2, 5), st.integers(1, 80))
def test_the_processes_share_out_each_batch(
    sides: list[tuple[int, int]], num_processes: int, max_tokens: int
) -> None:
    def stream() -> BatchStream:
        return BatchStream([source_of(sides, number=0)], max_tokens=max_tokens, seed=4)

    alone, parts = stream(), [stream() for _ in range(num_processes)]
    for _ in range(10):
        whole = keys(alone.next_batch())
        shares = [
            keys(part.next_batch(rank=rank, num_processes=num_processes)) for rank, part in enumerate(parts)
        ]
        assert sorted(itertools.chain(*shares)) == sorted(whole)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert shares[0]
        assert {part.position for part in parts} == {alone.position}


def test_another_seed_and_another_pass_give_another_order() -> None:
    def order(seed: int, num_chunks: int) -> list[int]:
        stream = BatchStream([source_of([(3, 3)] * 50, number=0)], max_tokens=3, seed=seed)
        return [key for batch in up_to_chunk(stream, num_chunks) for key in keys(batch)]

    assert order(1, 1) == order(1, 1)
    assert order(1, 1) != order(2, 1)
    twice = order(1, 2)
    assert twice[:50] != twice[50:]


@pytest.mark.parametrize("weight", [1e-9, 1e-300])
def test_a_source_with_next_to_no_weight_holds_nothing_up(weight: float) -> None:
    sources = [source_of([(1, 1)] * 5, number=0), source_of([(1, 1)], number=1, weight=weight)]
    stream = BatchStream(sources, max_tokens=4, seed=1, chunk_pairs=2)
    for batch in itertools.islice(batches_of(stream), 100):
        assert batch.origins.tolist() == [0] * len(batch.origins)


def test_chunks_of_one_pair_over_many_sources_come_to_an_end_and_take_all_in_turn() -> None:
    sources = [source_of([(1, 1)] * 3, number=number) for number in range(7)]
    stream = BatchStream(sources, max_tokens=10, seed=1, chunk_pairs=1)
    origins = [
        number for batch in itertools.islice(batches_of(stream), 70) for number in batch.origins.tolist()
    ]
    counts = Counter(origins)
    assert set(counts) == set(range(7))
    assert max(counts.values()) - min(counts.values()) <= 1


def test_padding_is_masked_on_both_sides() -> None:
    batch = padded_batch([([5, 6, 0], [7, 0]), ([8, 0], [9, 4, 3, 0])], origins=[1, 0])
    assert batch.source_ids.tolist() == [[5, 6, 0], [8, 0, 0]]
    assert batch.source_mask.tolist() == [[True, True, True], [True, True, False]]
    assert batch.target_ids.tolist() == [[7, 0, 0, 0], [9, 4, 3, 0]]
    assert batch.target_mask.tolist() == [[True, True, False, False], [True] * 4]
    assert batch.origins.tolist() == [1, 0]
    assert batch.num_target_tokens() == 6
    assert list(batch.pairs()) == [([5, 6, 0], [7, 0]), ([8, 0], [9, 4, 3, 0])]
    assert {batch.source_ids.dtype, batch.target_ids.dtype, batch.origins.dtype} == {torch.int64}
    assert {batch.source_mask.dtype, batch.target_mask.dtype} == {torch.bool}


@pytest.mark.parametrize(
    ("sources", "chunk_pairs", "message"),
    [
        ([], 8, "0 sources"),
        ([WeightedSource(TokenPairs.from_pairs([]), 1.0)], 8, "0 pairs"),
        ([source_of([(1, 1)], number=0, weight=0.0)], 8, "weight 0.0"),
        ([source_of([(1, 1)], number=0, weight=float("nan"))], 8, "weight nan"),
        ([source_of([(1, 1)], number=0)], 0, "chunk_pairs is 0"),
    ],
)
def test_streams_that_could_give_nothing_are_refused(
    sources: list[WeightedSource], chunk_pairs: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        BatchStream(sources, max_tokens=8, seed=1, chunk_pairs=chunk_pairs)


@pytest.mark.parametrize(
    ("position", "message"),
    [
        (StreamPosition(0, 0, (0, 0)), "of 2 sources"),
        (StreamPosition(0, 9, (0,)), "after batch 9 of a chunk"),
    ],
)
def test_a_position_of_another_run_is_refused(position: StreamPosition, message: str) -> None:
    stream = BatchStream([source_of([(1, 1)] * 4, number=0)], max_tokens=2, seed=1)
    with pytest.raises(ValueError, match=message):
        stream.go_to(position)
    assert stream.position == StreamPosition(0, 0, (0,))
