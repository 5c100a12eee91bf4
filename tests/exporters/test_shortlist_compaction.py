"""`dragoman export compact-shortlist`: smaller lists that allow no less."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_checkpoint, tiny_options
from typer.testing import CliRunner

import exporters.cli as cli_module
from app.bundle import open_bundle
from app.decoding.shortlist import Shortlist
from app.errors import DragomanError, InvalidOption
from exporters.export import MODEL_CARD_NAME, export_bundle
from exporters.shortlist_compaction import compact_shortlist

SIZE = 12
EOS = 3


def shortlist_of(lists: list[set[int]], *, num_frequent: int) -> Shortlist:
    offsets = np.concatenate([[0], np.cumsum([len(each) for each in lists])]).astype(np.int64)
    targets = [target for each in lists for target in sorted(each)]
    return Shortlist(offsets, np.array(targets, dtype=np.int32), num_frequent=num_frequent)


@given(
    lists=st.lists(st.sets(st.integers(0, SIZE - 1)), min_size=SIZE, max_size=SIZE),
    num_common=st.integers(1, SIZE),
    num_frequent=st.integers(0, 3),
    source=st.lists(st.integers(0, SIZE - 1), max_size=5),
)
def test_no_sentence_loses_a_candidate_and_no_list_is_longer(
    lists: list[set[int]], num_common: int, num_frequent: int, source: list[int]
) -> None:
    before = shortlist_of(lists, num_frequent=num_frequent)
    after = compact_shortlist(before, num_common=num_common, eos_id=EOS)
    assert after.num_frequent == num_frequent
    allowed = set(range(num_frequent)).union(*(lists[token] for token in (*source, EOS)))
    assert allowed <= set(after.candidates([*source, EOS]).tolist())
    for token in set(range(SIZE)) - {EOS}:
        assert set(after.targets_of(token).tolist()) <= lists[token]
    assert len(after.targets_of(EOS)) <= len(before.targets_of(EOS)) + num_common


def test_the_most_listed_move_and_leave_every_other_list() -> None:
    lists = [{5, 7, 9}, {5, 7}, {5}, {2}, *[set[int]() for _ in range(8)]]
    after = compact_shortlist(shortlist_of(lists, num_frequent=0), num_common=2, eos_id=EOS)
    assert [after.targets_of(token).tolist() for token in range(5)] == [[9], [], [], [2, 5, 7], []]


def test_targets_that_no_list_holds_do_not_move() -> None:
    lists = [{5}, *[set[int]() for _ in range(SIZE - 1)]]
    after = compact_shortlist(shortlist_of(lists, num_frequent=0), num_common=SIZE, eos_id=EOS)
    assert after.targets_of(EOS).tolist() == [5]
    assert after.num_entries == 1


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("compaction") / "with"
    export_bundle(tiny_checkpoint(shortlist=True), path, tiny_options("with", ("cpu-fp32",)))
    export_bundle(tiny_checkpoint(), path.with_name("without"), tiny_options("without", ("cpu-fp32",)))
    return path


def run(*arguments: object) -> str:
    result = CliRunner(env={"COLUMNS": "400"}).invoke(
        cli_module.app, ["compact-shortlist", *map(str, arguments)]
    )
    if isinstance(result.exception, DragomanError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_the_command_writes_a_file_or_replaces_the_list(bundle: Path, tmp_path: Path) -> None:
    before = Shortlist.load(open_bundle(bundle).file("shortlist.bin"))
    out = tmp_path / "compact.bin"
    told = run("--bundle", bundle, "--out", out, "--common", 9)
    compact = Shortlist.load(out)
    assert compact == compact_shortlist(before, num_common=9, eos_id=0)
    assert compact.num_entries < before.num_entries
    assert f"{compact.num_entries} entries, {before.num_entries} before" in told
    assert open_bundle(bundle).manifest.shortlist == "shortlist.bin"

    run("--bundle", bundle, "--common", 9)
    replaced = open_bundle(bundle)
    assert replaced.manifest.shortlist is not None
    assert Shortlist.load(replaced.file(replaced.manifest.shortlist)) == compact
    assert replaced.manifest.provenance["shortlist_common"] == "9"
    assert "`dragoman export compact-shortlist`" in (bundle / MODEL_CARD_NAME).read_text(encoding="utf-8")


def test_mistakes_are_named(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "there.bin").touch()
    for arguments, words in (
        (["--bundle", bundle.with_name("without")], "has no shortlist to compact"),
        (["--bundle", bundle, "--out", tmp_path / "there.bin"], "name a new file"),
        (["--bundle", bundle, "--common", 0], "0 common targets are asked for; the range is 1 to"),
        (["--bundle", bundle, "--common", 10**6], "1000000 common targets are asked for; the range is 1 to"),
    ):
        with pytest.raises(InvalidOption, match=words):
            run(*arguments)
