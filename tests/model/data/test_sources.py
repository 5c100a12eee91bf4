"""Sources of training pairs: what a configuration may say, and samples that do not depend on any order."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from model.data.sampling import lowest_hashes
from model.data.sources import SourceConfig, pairs_of

PAIRS = [(f"word {number}", f"palavra {number}") for number in range(200)]


def sample(pairs: list[tuple[str, str]], num_items: int, seed: int = 1) -> list[tuple[str, str]]:
    chosen = lowest_hashes(
        pairs, num_items=num_items, seed=seed, text_of=lambda pair: pair[0], tie_of=lambda pair: pair[1]
    )
    return list(chosen)


def source_of(folder: Path, pairs: list[tuple[str, str]], **fields: object) -> SourceConfig:
    path = folder / "t.tsv"
    path.write_text("".join(f"{a}\t{b}\n" for a, b in pairs))
    return SourceConfig.model_validate({"name": "t", "path": path} | fields)


@given(
    st.lists(st.tuples(st.sampled_from("abcde"), st.sampled_from("xyz")), max_size=12),
    st.randoms(use_true_random=False),
    st.integers(1, 12),
)
def test_a_sample_does_not_depend_on_the_order(
    pairs: list[tuple[str, str]], random: object, num_items: int
) -> None:
    shuffled = list(pairs)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert sample(shuffled, num_items) == sample(pairs, num_items)


@given(st.lists(st.tuples(st.text(max_size=3), st.text(max_size=2)), max_size=12), st.integers(1, 12))
def test_a_sample_is_a_prefix_of_every_larger_one(pairs: list[tuple[str, str]], num_items: int) -> None:
    pairs = [(a.encode("utf-8", "replace").decode(), b) for a, b in pairs]
    everything = sample(pairs, 100)
    assert sorted(everything) == sorted(pairs)
    assert sample(pairs, num_items) == everything[:num_items]


def test_other_seeds_choose_other_pairs(tmp_path: Path) -> None:
    source = source_of(tmp_path, PAIRS, sample=20)
    first, again, other = (set(pairs_of(source, seed=seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert len(first) == len(other) == 20


def test_without_a_sample_all_pairs_come_in_their_order(tmp_path: Path) -> None:
    assert list(pairs_of(source_of(tmp_path, PAIRS), seed=1)) == PAIRS


def test_reversing_swaps_the_sides_and_nothing_else(tmp_path: Path) -> None:
    plain = list(pairs_of(source_of(tmp_path, PAIRS, sample=20), seed=1))
    swapped = list(pairs_of(source_of(tmp_path, PAIRS, sample=20, reverse=True), seed=1))
    assert swapped == [(target, source) for source, target in plain]


def test_a_source_reads_as_it_stands_in_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "t.tsv").write_text("pt\tshort\tyes\tsim\nbr\tprose\tred\tvermelho\n")
    config = tomllib.loads(
        f"""
        [[data.source]]
        name = "t"
        path = '{tmp_path / "t.tsv"}'
        source_column = 3
        target_column = 4
        where = {{ 1 = ["br"], 2 = ["prose", "phrase"] }}
        weight = 0.5
        """
    )
    source = SourceConfig.model_validate(config["data"]["source"][0])
    assert list(pairs_of(source, seed=1)) == [("red", "vermelho")]


@pytest.mark.parametrize(
    "fields",
    [
        {"weight": 0},
        {"weight": float("inf")},
        {"sample": 0},
        {"name": "a/b"},
        {"source_column": 2},
        {"where": {"one": ["x"]}},
        {"where": {"1": []}},
        {"target_path": "b", "where": {"1": ["x"]}},
        {"target_path": "b", "target_column": 7},
        {"target_path": "b", "source_column": 1},
        {"wieght": 1},
    ],
)
def test_an_impossible_source_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        SourceConfig.model_validate({"name": "t", "path": "a"} | fields)
