"""What `dragoman export prune-shortlist` leaves of a list: by an oracle, and through the command."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_checkpoint, tiny_options, tiny_words
from typer.testing import CliRunner

import exporters.cli as cli_module
import exporters.shortlist_pruning as pruning_module
from app.bundle import open_bundle
from app.decoding.shortlist import Shortlist
from app.errors import DragomanError, InvalidOption
from exporters.export import MODEL_CARD_NAME, export_bundle
from exporters.shortlist_pruning import PruningOptions, prune_shortlist
from exporters.word_alignment import TokenPairs

SIZE = 12
EOS = 0
Ids = list[int]

ids = st.lists(st.integers(1, SIZE - 1), min_size=1, max_size=5)


def token_pairs(pairs: list[tuple[Ids, Ids]]) -> TokenPairs:
    sides = list(zip(*pairs, strict=True))
    offsets = [
        np.concatenate([[0], np.cumsum([len(each) for each in side])]).astype(np.int64) for side in sides
    ]
    flat = [np.concatenate([np.array(each, np.int32) for each in side]) for side in sides]
    return TokenPairs(flat[0], offsets[0], flat[1], offsets[1], num_empty=0, num_long=0)


def shortlist_of(lists: list[set[int]], *, num_frequent: int = 0) -> Shortlist:
    offsets = np.concatenate([[0], np.cumsum([len(each) for each in lists])]).astype(np.int64)
    targets = [target for each in lists for target in sorted(each)]
    return Shortlist(offsets, np.array(targets, dtype=np.int32), num_frequent=num_frequent)


@given(
    pairs=st.lists(st.tuples(ids, ids), min_size=1, max_size=12),
    lists=st.lists(st.sets(st.integers(0, SIZE - 1)), min_size=SIZE, max_size=SIZE),
    rare_below=st.integers(1, 4),
    together=st.integers(1, 3),
    chunk=st.integers(1, 5),
)
def test_what_stays_is_rare_or_borne_out(
    pairs: list[tuple[Ids, Ids]], lists: list[set[int]], rare_below: int, together: int, chunk: int
) -> None:
    expected = []
    for source, targets in enumerate(lists):
        with_source = [target for its_source, target in pairs if source in its_source]
        expected.append(
            {
                target
                for target in targets
                if len(with_source) < rare_below
                or sum(target in side for side in with_source) >= together
                or target in (EOS, source)
            }
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pruning_module, "_CHUNK_PAIRS", chunk)
        pruned = prune_shortlist(
            shortlist_of(lists), token_pairs(pairs), PruningOptions(rare_below, together), eos_id=EOS
        )
    assert [set(pruned.targets_of(source).tolist()) for source in range(SIZE)] == expected


def test_the_frequent_ones_stay_frequent() -> None:
    before = shortlist_of([{1, 5, 7}] * SIZE, num_frequent=3)
    after = prune_shortlist(before, token_pairs([([4], [7])] * 9), PruningOptions(2, 1), eos_id=EOS)
    assert after.num_frequent == 3
    assert after.targets_of(4).tolist() == [7]
    assert after.targets_of(5).tolist() == [5, 7]


@pytest.mark.parametrize(
    ("changes", "name"), [({"rare_below": 0}, "rare_below"), ({"together": -1}, "together")]
)
def test_limits_that_mean_nothing_are_refused(changes: dict[str, int], name: str) -> None:
    with pytest.raises(InvalidOption, match=f"{name} is .*; it is at least 1"):
        PruningOptions(**changes)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("pruning") / "with"
    export_bundle(tiny_checkpoint(shortlist=True), path, tiny_options("with", ("cpu-fp32",)))
    export_bundle(tiny_checkpoint(), path.with_name("without"), tiny_options("without", ("cpu-fp32",)))
    return path


@pytest.fixture
def table(tmp_path: Path) -> Path:
    words, path = tiny_words(), tmp_path / "text.tsv"
    path.write_text("".join(f"{words[n % 20]}\t{words[n % 20 + 20]}\n" for n in range(200)), encoding="utf-8")
    return path


def run(*arguments: object) -> str:
    result = CliRunner(env={"COLUMNS": "400"}).invoke(
        cli_module.app, ["prune-shortlist", *map(str, arguments)]
    )
    if isinstance(result.exception, DragomanError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_the_command_writes_a_file_or_replaces_the_list(bundle: Path, table: Path, tmp_path: Path) -> None:
    before = Shortlist.load(open_bundle(bundle).file("shortlist.bin"))
    out = tmp_path / "pruned.bin"
    told = run(table, "--bundle", bundle, "--out", out, "--rare-below", 5, "--together", 1)
    pruned = Shortlist.load(out)
    assert 0 < pruned.num_entries < before.num_entries
    assert f"{pruned.num_entries} of {before.num_entries} targets stay, by 200 pairs" in told
    assert open_bundle(bundle).manifest.shortlist == "shortlist.bin"

    run(table, "--bundle", bundle, "--rare-below", 5, "--together", 1)
    replaced = open_bundle(bundle)
    assert replaced.manifest.shortlist is not None
    assert Shortlist.load(replaced.file(replaced.manifest.shortlist)) == pruned
    assert replaced.manifest.provenance["shortlist_pruned"] == "by 200 pairs: rare below 5, together 1"
    assert "`dragoman export prune-shortlist`" in (bundle / MODEL_CARD_NAME).read_text(encoding="utf-8")


def test_mistakes_are_named_before_the_long_work(bundle: Path, table: Path, tmp_path: Path) -> None:
    for arguments, words in (
        ([table, "--bundle", bundle.with_name("without")], "has no shortlist to prune"),
        ([table, "--bundle", bundle, "--out", table], "name a new file"),
        ([table, table, "--bundle", bundle, "--target-text", table], "join the files"),
        ([table, "--bundle", bundle, "--together", 0], "together is 0; it is at least 1"),
    ):
        with pytest.raises(InvalidOption, match=words):
            run(*arguments)
