"""The lexical shortlist: Marian's rule, and a file format that trusts nothing."""

from __future__ import annotations

import struct
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.decoding.shortlist import MAX_ENTRIES, MAX_VOCABULARY_SIZE, Shortlist
from app.errors import BundleCorrupt, BundleError, BundleUnsupported


def make(lists: list[list[int]], *, num_frequent: int) -> Shortlist:
    offsets = np.cumsum([0, *(len(ids) for ids in lists)])
    targets = np.array([target for ids in lists for target in ids], dtype=np.int32)
    return Shortlist(offsets, targets, num_frequent=num_frequent)


def candidates_by_the_rule(lists: list[list[int]], num_frequent: int, source_ids: list[int]) -> list[int]:
    """Marian's rule, one id at a time."""
    chosen = set(range(num_frequent))
    for source_id in source_ids:
        chosen.update(lists[source_id])
    unused = [target for target in range(num_frequent, len(lists)) if target not in chosen]
    while len(chosen) % 8 and unused:
        chosen.add(unused.pop(0))
    return sorted(chosen)


@st.composite
def shortlists(draw: st.DrawFn) -> tuple[list[list[int]], int]:
    vocabulary_size = draw(st.integers(1, 70))
    ids = st.sets(st.integers(0, vocabulary_size - 1), max_size=12).map(sorted)
    lists = draw(st.lists(ids, min_size=vocabulary_size, max_size=vocabulary_size))
    return lists, draw(st.integers(0, vocabulary_size))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), shortlist=shortlists())
def test_the_candidates_are_those_of_marians_rule(
    data: st.DataObject, shortlist: tuple[list[list[int]], int]
) -> None:
    lists, num_frequent = shortlist
    source_ids = data.draw(st.lists(st.integers(0, len(lists) - 1), max_size=20))
    candidates = make(lists, num_frequent=num_frequent).candidates(source_ids)
    assert candidates.dtype == np.int32
    assert candidates.tolist() == candidates_by_the_rule(lists, num_frequent, source_ids)


def test_the_rule_on_an_example_done_by_hand() -> None:
    shortlist = make([[5], [9, 11], *[[]] * 18], num_frequent=2)
    assert shortlist.candidates([1, 0, 1]).tolist() == [0, 1, 2, 3, 4, 5, 9, 11]
    assert shortlist.candidates([1]).tolist() == [0, 1, 2, 3, 4, 5, 9, 11]
    assert shortlist.candidates([]).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert shortlist.targets_of(1).tolist() == [9, 11]


def test_frequent_tokens_are_not_listed_since_they_are_candidates_anyway() -> None:
    shortlist = make([[0, 2, 5], [1], *[[]] * 18], num_frequent=2)
    assert shortlist.targets_of(0).tolist() == [2, 5]
    assert shortlist.targets_of(1).tolist() == []
    assert shortlist.num_entries == 2
    assert shortlist == make([[2, 5], *[[]] * 19], num_frequent=2)
    assert shortlist.candidates([0]).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_a_vocabulary_that_runs_out_ends_the_padding() -> None:
    assert make([[]] * 5, num_frequent=3).candidates([0]).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("source_ids", [[20], [-1], [3, 99, 4]])
def test_a_token_of_another_vocabulary_is_refused(source_ids: list[int]) -> None:
    with pytest.raises(ValueError, match="belongs to another model"):
        make([[]] * 20, num_frequent=3).candidates(source_ids)


@pytest.mark.parametrize(
    ("offsets", "targets", "num_frequent", "reason"),
    [
        ([0], [], 0, "vocabulary size is 0"),
        ([0, 0], [], 2, "num_frequent is 2"),
        ([0, 0], [], -1, "num_frequent is -1"),
        ([1, 1], [0], 0, "offsets must rise"),
        ([0, 2, 1], [0], 0, "offsets must rise"),
        ([0, 1], [0, 0], 0, "offsets must rise"),
        ([0, 1], [1], 0, "outside 0 to 0"),
        ([0, 1], [-1], 0, "outside 0 to 0"),
        ([0, 2, 2], [1, 0], 0, "strictly ascending"),
        ([0, 2, 2], [1, 1], 0, "strictly ascending"),
    ],
)
def test_contradicting_lists_are_refused(
    offsets: list[int], targets: list[int], num_frequent: int, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        Shortlist(np.array(offsets), np.array(targets, dtype=np.int32), num_frequent=num_frequent)


def test_lists_cannot_be_changed_from_outside() -> None:
    offsets, targets = np.array([0, 1, 1]), np.array([1], dtype=np.int32)
    shortlist = Shortlist(offsets, targets, num_frequent=0)
    targets[0] = 0
    assert shortlist.targets_of(0).tolist() == [1]
    with pytest.raises(ValueError, match="read-only"):
        shortlist.targets_of(0)[0] = 0


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shortlist=shortlists())
def test_saving_and_loading_changes_nothing_and_bytes_depend_on_content_alone(
    tmp_path: Path, shortlist: tuple[list[list[int]], int]
) -> None:
    lists, num_frequent = shortlist
    original = make(lists, num_frequent=num_frequent)
    original.save(tmp_path / "a")
    loaded = Shortlist.load(tmp_path / "a")
    assert loaded == original
    loaded.save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("step", [1, 255, 256, 65_535, 65_536])
def test_differences_of_any_size_survive(tmp_path: Path, step: int) -> None:
    original = make([[0, step, 2 * step], [], [2 * step]] + [[]] * (2 * step), num_frequent=1)
    original.save(tmp_path / "shortlist")
    assert Shortlist.load(tmp_path / "shortlist") == original


def test_shortlists_differ_by_their_lists_and_their_frequent_ids() -> None:
    assert make([[0], [1]], num_frequent=1) != make([[0], [1]], num_frequent=2)
    assert make([[0], [1]], num_frequent=1) != make([[0, 1], []], num_frequent=1)
    assert make([[0], [1]], num_frequent=1) != make([[0], [0]], num_frequent=1)


def packed(
    *,
    mark: bytes = b"DRGNLIST",
    version: int = 1,
    vocabulary_size: int = 3,
    num_frequent: int = 1,
    num_planes: int = 1,
    num_entries: int = 2,
    body: bytes = struct.pack("<3I", 2, 0, 0) + b"\0\1",
) -> bytes:
    header = struct.pack("<8s5I", mark, version, vocabulary_size, num_frequent, num_planes, num_entries)
    return header + zlib.compress(body)


def test_the_format_on_an_example_done_by_hand(tmp_path: Path) -> None:
    (tmp_path / "shortlist").write_bytes(packed())
    assert Shortlist.load(tmp_path / "shortlist") == make([[0, 1], [], []], num_frequent=1)


LENGTHS = struct.pack("<3I", 2, 0, 0)
HOSTILE = {
    "empty": (b"", "no shortlist's mark"),
    "cut inside the header": (packed()[:27], "no shortlist's mark"),
    "another mark": (packed(mark=b"PK345678"), "no shortlist's mark"),
    "no vocabulary": (packed(vocabulary_size=0), "vocabulary size is 0"),
    "a huge vocabulary": (packed(vocabulary_size=2**32 - 1), f"expected 1 to {MAX_VOCABULARY_SIZE}"),
    "a huge number of entries": (packed(num_entries=2**32 - 1), f"expected 0 to {MAX_ENTRIES}"),
    "no planes": (packed(num_planes=0), "bytes per difference is 0"),
    "too many planes": (packed(num_planes=4), "bytes per difference is 4"),
    "more frequent ids than words": (packed(num_frequent=4), "num_frequent is 4"),
    "a body that is too long": (packed(body=LENGTHS + b"\0\1\1"), "longer or shorter"),
    "a body that is too short": (packed(body=LENGTHS + b"\0"), "longer or shorter"),
    "a truncated body": (packed()[:-1], "longer or shorter"),
    "a body with something behind": (packed() + b"\0", "longer or shorter"),
    "a damaged body": (packed()[:-3] + b"\0\0\0", "damaged"),
    "lengths beyond the entries": (
        packed(body=struct.pack("<3I", 2, 1, 0) + b"\0\1"),
        "the lists hold 3 entries",
    ),
    "lengths whose sum overflows": (
        packed(body=struct.pack("<3I", 2**32 - 1, 3, 0) + b"\0\1"),
        f"the lists hold {2**32 + 2} entries",
    ),
    "a target beyond the vocabulary": (
        packed(body=LENGTHS + b"\2\1"),
        "a target id is 3, expected ids below 3",
    ),
    "a target twice": (packed(body=LENGTHS + b"\1\0"), "strictly ascending"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_wrong_file_is_refused_by_name_and_reason(tmp_path: Path, case: str) -> None:
    content, reason = HOSTILE[case]
    path = tmp_path / "shortlist.bin"
    path.write_bytes(content)
    with pytest.raises(BundleCorrupt, match=reason) as caught:
        Shortlist.load(path)
    assert caught.value.message.startswith("shortlist.bin: ")


def test_a_body_that_unpacks_to_far_more_than_announced_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "shortlist.bin"
    path.write_bytes(packed()[:28] + zlib.compress(bytes(1 << 25)))
    tracemalloc.start()
    try:
        with pytest.raises(BundleCorrupt, match="longer or shorter"):
            Shortlist.load(path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1 << 20


def test_another_format_version_is_unsupported_rather_than_corrupt(tmp_path: Path) -> None:
    (tmp_path / "shortlist").write_bytes(packed(version=2))
    with pytest.raises(BundleUnsupported, match="format version is 2, this release reads 1"):
        Shortlist.load(tmp_path / "shortlist")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleCorrupt, match="unreadable"):
        Shortlist.load(tmp_path / "nowhere")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    position=st.integers(0, 27 + 14),
    replacement=st.binary(min_size=1, max_size=4),
    length=st.none() | st.integers(0, 42),
)
def test_no_damage_raises_anything_but_a_bundle_error(
    tmp_path: Path, position: int, replacement: bytes, length: int | None
) -> None:
    body = LENGTHS + b"\0\1"
    plain = bytearray(packed()[:28] + body)
    plain[position : position + len(replacement)] = replacement
    path = tmp_path / "shortlist"
    path.write_bytes(bytes(plain[:28]) + zlib.compress(bytes(plain[28:length])))
    try:
        shortlist = Shortlist.load(path)
    except BundleError:
        return
    assert shortlist.num_entries <= 2
