"""Prepared pairs: the ids of what the filters keep, made once and found again while nothing has changed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from app.errors import CheckpointError, InvalidOption
from app.text import Tokenizer
from model.data.exclusions import Exclusions
from model.data.filters import FilterConfig
from model.data.prepare import Preparation, prepare
from model.data.sources import SourceConfig
from model.data.vocabulary import EOS_ID, VocabularyOptions, train_vocabulary

PAIRS = [(f"word {number} here", f"palavra {number} aqui") for number in range(30)]
SNOWMAN = ("word here", "palavra ☃ aqui")  # the vocabulary has no such sign
LONG = (" ".join("word" for _ in range(40)), " ".join("palavra" for _ in range(40)))


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vocabulary") / "v.spm"
    texts = [text for pair in PAIRS for text in pair]
    path.write_bytes(train_vocabulary(texts, VocabularyOptions(num_pieces=27, byte_fallback=False)))
    return path


@pytest.fixture
def preparation(tmp_path: Path, tokenizer_path: Path) -> Preparation:
    return Preparation(
        source_language="en",
        target_language="pt",
        filters=FilterConfig(off=frozenset({"language"})),
        exclusions=Exclusions(["Word 3, here!"]),
        tokenizer=Tokenizer.open(tokenizer_path, eos_id=EOS_ID),
        tokenizer_path=tokenizer_path,
        max_tokens=32,
        seed=1,
        cache_directory=tmp_path / "cache",
    )


@pytest.fixture
def source(tmp_path: Path) -> SourceConfig:
    path = tmp_path / "t.tsv"
    pairs = [*PAIRS, PAIRS[0], ("", "x"), SNOWMAN, LONG]
    path.write_text("".join(f"{a}\t{b}\n" for a, b in pairs))
    return SourceConfig(name="t", path=path)


def test_the_pairs_are_the_ids_of_what_the_filters_keep(
    source: SourceConfig, preparation: Preparation
) -> None:
    prepared = prepare(source, preparation)
    expected = [pair for pair in PAIRS if pair[0] != "word 3 here"]
    assert len(prepared.pairs) == len(expected)
    for index, pair in enumerate(expected):
        ids = [prepared.pairs.source(index).tolist(), prepared.pairs.target(index).tolist()]
        assert ids == [preparation.tokenizer.encode_source(text) for text in pair]
        assert ids[0][-1] == ids[1][-1] == EOS_ID
    counts = prepared.counts.of_source["t"]
    assert (counts.num_read, counts.num_kept) == (34, 29)
    assert counts.num_rejected == {"excluded": 1, "duplicate": 1, "empty": 1, "tokens": 1, "unknown": 1}


def test_a_second_run_finds_what_the_first_one_made(source: SourceConfig, preparation: Preparation) -> None:
    first = prepare(source, preparation)
    second = prepare(source.model_copy(update={"weight": 3.0}), preparation)
    assert (first.was_cached, second.was_cached) == (False, True)
    assert second.counts == first.counts
    assert second.path == first.path
    assert second.pairs.source_ids.tolist() == first.pairs.source_ids.tolist()
    assert sorted(path.suffix for path in preparation.cache_directory.iterdir()) == [".json", ".safetensors"]


def test_whatever_the_pairs_follow_from_makes_them_anew(
    source: SourceConfig, preparation: Preparation, tmp_path: Path
) -> None:
    sampled = source.model_copy(update={"sample": 5})
    other_vocabulary = tmp_path / "other.spm"
    other_vocabulary.write_bytes(preparation.tokenizer_path.read_bytes() + b"\x00")
    digests = [
        preparation.digest(source),
        preparation.digest(sampled),
        replace(preparation, seed=2).digest(sampled),
        preparation.digest(source.model_copy(update={"reverse": True})),
        replace(preparation, max_tokens=31).digest(source),
        replace(preparation, exclusions=Exclusions()).digest(source),
        replace(preparation, filters=FilterConfig()).digest(source),
        replace(preparation, target_language="es").digest(source),
        replace(preparation, tokenizer_path=other_vocabulary).digest(source),
    ]
    stat = source.path.stat()
    os.utime(source.path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1_000_000_000))
    digests.append(preparation.digest(source))
    assert len(set(digests)) == len(digests)


def test_what_no_pair_follows_from_changes_nothing(source: SourceConfig, preparation: Preparation) -> None:
    digest = preparation.digest(source)
    assert digest == preparation.digest(source.model_copy(update={"weight": 2.0, "name": "u"}))
    assert digest == replace(preparation, seed=2).digest(source)


def test_the_order_of_a_set_of_rules_is_not_written() -> None:
    one, other = (
        FilterConfig(off=frozenset(rules)) for rules in (("script", "copied"), ("copied", "script"))
    )
    assert one.model_dump_json() == other.model_dump_json()
    assert '["copied","script"]' in one.model_dump_json()


def test_a_source_of_which_nothing_is_left_is_refused(source: SourceConfig, preparation: Preparation) -> None:
    with pytest.raises(InvalidOption, match=r"source t: none of 34 pairs is kept .*script 3"):
        prepare(source, replace(preparation, source_language="ru"))
    assert not preparation.cache_directory.exists()


def test_an_interrupted_run_leaves_nothing_that_looks_complete(
    source: SourceConfig, preparation: Preparation
) -> None:
    source.path.write_bytes(source.path.read_bytes() + b"one column\n")
    with pytest.raises(InvalidOption, match="line 35"):
        prepare(source, preparation)
    assert not preparation.cache_directory.exists()


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_damage_in_the_cache_is_named(source: SourceConfig, preparation: Preparation, suffix: str) -> None:
    path = prepare(source, preparation).path.with_suffix(suffix)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CheckpointError, match=r"delete it"):
        prepare(source, preparation)


def test_a_missing_file_is_named(source: SourceConfig, preparation: Preparation) -> None:
    source.path.unlink()
    with pytest.raises(InvalidOption, match=r"t\.tsv cannot be read: No such file"):
        prepare(source, preparation)
