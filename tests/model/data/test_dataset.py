from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from app.errors import CheckpointError
from model.data.dataset import TokenPairs

sides = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6)


@given(st.lists(st.tuples(sides, sides), max_size=8))
def test_pairs_come_out_as_they_went_in(pairs: list[tuple[list[int], list[int]]]) -> None:
    packed = TokenPairs.from_pairs(iter(pairs))
    assert len(packed) == len(pairs)
    assert [(packed.source(n).tolist(), packed.target(n).tolist()) for n in range(len(packed))] == pairs
    assert packed.lengths().tolist() == [[len(source), len(target)] for source, target in pairs]


def test_a_file_gives_back_the_pairs(tmp_path: Path) -> None:
    pairs = [([5, 0], [7, 8, 0]), ([0], [9, 0])]
    TokenPairs.from_pairs(pairs).save(tmp_path / "pairs")
    loaded = TokenPairs.load(tmp_path / "pairs")
    assert [(loaded.source(n).tolist(), loaded.target(n).tolist()) for n in range(2)] == pairs
    assert [path.name for path in tmp_path.iterdir()] == ["pairs"]


def test_no_pairs_are_a_file_too(tmp_path: Path) -> None:
    TokenPairs.from_pairs([]).save(tmp_path / "pairs")
    assert len(TokenPairs.load(tmp_path / "pairs")) == 0


def test_an_empty_side_is_refused_by_number() -> None:
    with pytest.raises(ValueError, match="pair 1 has an empty side"):
        TokenPairs.from_pairs([([1], [1]), ([], [1])])


def test_a_token_beyond_32_bits_is_refused() -> None:
    with pytest.raises(OverflowError):
        TokenPairs.from_pairs([([2**31], [1])])


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "pairs"
    TokenPairs.from_pairs([([5, 0], [0])]).save(path)

    def failing(arrays: object, partial: Path) -> None:
        partial.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr("model.data.dataset.save_file", failing)
    with pytest.raises(OSError, match="no space"):
        TokenPairs.from_pairs([([6, 0], [0])]).save(path)
    assert TokenPairs.load(path).source(0).tolist() == [5, 0]


@pytest.mark.parametrize("keep", [0, 7, 40, -3])
def test_a_file_that_was_cut_is_refused_by_name(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "pairs"
    TokenPairs.from_pairs([([5, 0], [0])]).save(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="pairs does not hold token pairs"):
        TokenPairs.load(path)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="absent does not hold token pairs"):
        TokenPairs.load(tmp_path / "absent")


@pytest.mark.parametrize(
    "change",
    [
        {"source_starts": np.array([0, 1, 3], dtype=np.int64)},
        {"source_starts": np.array([1, 2], dtype=np.int64)},
        {"source_starts": np.array([], dtype=np.int64)},
        {"target_starts": np.array([0, 1, 1], dtype=np.int64)},
        {"target_starts": np.array([0, 2, 1], dtype=np.int64)},
        {"source_ids": np.array([0.5, 0.0], dtype=np.float32)},
        {"source_starts": np.array(2, dtype=np.int64)},
        {"target_ids": np.array([[0]], dtype=np.int32)},
        {
            "source_ids": np.array([1, 2], dtype=np.int32),
            "source_starts": np.array([0, 1, 2], dtype=np.int64),
        },
        {"another": np.array([1], dtype=np.int64)},
    ],
)
def test_contradictions_in_a_file_are_refused(tmp_path: Path, change: dict[str, np.ndarray]) -> None:
    path = tmp_path / "pairs"
    TokenPairs.from_pairs([([5, 0], [0])]).save(path)
    save_file(load_file(path) | change, path)
    with pytest.raises(CheckpointError, match="delete it"):
        TokenPairs.load(path)
