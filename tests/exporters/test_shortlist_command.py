"""`dragoman export shortlist`: into a bundle or a file, and every mistake named before the long work."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import VOCABULARY_SIZE, tiny_checkpoint, tiny_options, tiny_tokenizer, tiny_words
from typer.testing import CliRunner

import exporters.cli as cli_module
import exporters.shortlist_cli as shortlist_cli
from app.bundle import MANIFEST_NAME, open_bundle
from app.bundle.manifest import QualityScore
from app.decoding.shortlist import Shortlist
from app.errors import BundleUnsupported, DragomanError, InvalidOption
from exporters.bundle_shortlist import put_into_bundle
from exporters.export import MODEL_CARD_NAME, export_bundle
from exporters.quality import record_quality
from exporters.shortlist_training import TrainedShortlist

pytest.importorskip("thot")

SCORES = [
    QualityScore(
        test_set=name, variant="cpu-fp32", shortlist=shortlist, num_segments=9, bleu=40.0, bleu_signature="b",
        chrf=60.0, chrf_signature="c",
    )
    for name, shortlist in (("with-list", True), ("without-list", False))
]  # fmt: skip


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("exported")
    try:
        for name, shortlist in (("with", True), ("without", False)):
            checkpoint = tiny_checkpoint(shortlist=shortlist)
            export_bundle(checkpoint, folder / name, tiny_options(name, ("cpu-fp32",)))
    finally:
        torch.set_num_threads(num_threads)
    return folder


@pytest.fixture
def bundle(exported: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "bundle"
    copy.mkdir()
    for file in (exported / "with").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


@pytest.fixture
def table(tmp_path: Path) -> Path:
    words = tiny_words()
    path = tmp_path / "text.tsv"
    path.write_text("".join(f"{words[n % 20]}\t{words[20 + n % 20]}\n" for n in range(60)), encoding="utf-8")
    return path


@pytest.fixture
def spm(tmp_path: Path) -> Path:
    path = tmp_path / "vocabulary.model"
    path.write_bytes(tiny_tokenizer())
    return path


def empty_shortlist(vocabulary_size: int) -> Shortlist:
    offsets = np.zeros(vocabulary_size + 1, dtype=np.int64)
    return Shortlist(offsets, np.zeros(0, dtype=np.int32), num_frequent=1)


def run(*arguments: object) -> str:
    # Wide, so that a message is not broken where a test looks for it.
    result = CliRunner(env={"COLUMNS": "400"}).invoke(cli_module.app, ["shortlist", *map(str, arguments)])
    if isinstance(result.exception, DragomanError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stderr


def test_a_file_is_written_from_a_sentencepiece_model(table: Path, spm: Path, tmp_path: Path) -> None:
    words = run(table, "--tokenizer", spm, "--out", tmp_path / "list.bin")
    assert "aligned 60 pairs; left out: 0 with an empty side" in words
    shortlist = Shortlist.load(tmp_path / "list.bin")
    assert shortlist.vocabulary_size == VOCABULARY_SIZE
    # The tiny model's end of sentence is its piece 0, its unknown piece 1.
    assert all(0 in shortlist.targets_of(source) for source in range(VOCABULARY_SIZE))
    assert all(1 not in shortlist.targets_of(source) for source in range(VOCABULARY_SIZE))


def test_the_same_text_gives_the_same_file(table: Path, spm: Path, tmp_path: Path) -> None:
    for name in "ab":
        run(table, "--tokenizer", spm, "--out", tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_bundle_gets_the_list_and_loses_the_scores_of_the_old_one(bundle: Path, table: Path) -> None:
    record_quality(bundle, SCORES)
    old = open_bundle(bundle).manifest
    words = run(table, "--bundle", bundle)
    assert "1 scores that were measured with the old shortlist are removed" in words
    opened = open_bundle(bundle)
    new = opened.manifest
    assert old.shortlist != new.shortlist
    assert {path.name for path in bundle.iterdir()} == {*new.files, MANIFEST_NAME}
    assert set(new.files) - {new.shortlist} == set(old.files) - {old.shortlist}
    assert new.shortlist is not None
    assert Shortlist.load(opened.file(new.shortlist)).vocabulary_size == VOCABULARY_SIZE
    assert [score.test_set for score in new.quality] == ["without-list"]
    assert new.provenance["shortlist_pairs"] == "60"
    card = opened.file(MODEL_CARD_NAME).read_text(encoding="utf-8")
    assert "without-list" in card
    assert "with-list" not in card.replace("without-list", "")
    assert card.startswith("A random model.\n")


def test_a_second_list_replaces_the_first_and_its_section_of_the_card(bundle: Path, table: Path) -> None:
    run(table, "--bundle", bundle)
    run(table, "--bundle", bundle, "--best", 3)
    opened = open_bundle(bundle)
    card = opened.file(MODEL_CARD_NAME).read_text(encoding="utf-8")
    assert card.count("## Shortlist") == 1
    assert "best 3," in card
    before = {path.name: path.read_bytes() for path in bundle.iterdir()}
    run(table, "--bundle", bundle, "--best", 3)
    assert {path.name: path.read_bytes() for path in bundle.iterdir()} == before


def test_a_bundle_with_out_is_left_as_it_is(bundle: Path, table: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in bundle.iterdir()}
    run(table, "--bundle", bundle, "--out", tmp_path / "list.bin")
    assert {path.name: path.read_bytes() for path in bundle.iterdir()} == before
    assert Shortlist.load(tmp_path / "list.bin").num_entries > 0


def test_what_is_left_out_or_unread_is_said(table: Path, spm: Path, tmp_path: Path) -> None:
    table.write_text(f"\tx\n{'abc ' * 50}\tx\n{table.read_text()}")
    out = tmp_path / "list.bin"
    words = run(table, "--tokenizer", spm, "--out", out, "--max-pairs", 32, "--max-tokens", 40)
    assert "aligned 30 pairs; left out: 1 with an empty side, 1 with more than 40 tokens" in words
    assert "goes on after the 32 pairs of --max-pairs; the rest was not read" in words


def test_two_files_are_taken_with_target_text(spm: Path, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("abc\nde\n")
    (tmp_path / "b").write_text("fg\nhij\n")
    words = run(
        tmp_path / "a", "--target-text", tmp_path / "b", "--tokenizer", spm, "--out", tmp_path / "list"
    )
    assert "aligned 2 pairs" in words


def test_several_tables_are_read_one_after_the_other(table: Path, spm: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.tsv"
    other.write_text("abc\tfg\n")
    words = run(table, other, "--tokenizer", spm, "--out", tmp_path / "list")
    assert "aligned 61 pairs" in words


def test_mistakes_are_named_before_any_alignment(
    bundle: Path, table: Path, spm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> TrainedShortlist:
        raise AssertionError("the long work began")

    monkeypatch.setattr(shortlist_cli, "train_shortlist", never)
    out = tmp_path / "list.bin"
    for arguments, words in (
        ([table], "give one of the two"),
        ([table, "--bundle", bundle, "--tokenizer", spm], "give one of the two"),
        ([table, "--tokenizer", spm], "needs --out"),
        ([table, "--bundle", bundle, "--eos-id", 0], "--eos-id goes with --tokenizer"),
        ([table, "--tokenizer", spm, "--out", table], "exists"),
        ([table, "--tokenizer", spm, "--out", tmp_path / "no" / "list"], "exists, or its folder does not"),
        ([table, "--bundle", bundle, "--best", 0], "best targets is 0"),
        ([table, "--bundle", bundle, "--source-column", 2], "both column 2"),
        ([table, table, "--bundle", bundle, "--target-text", table], "2 are given"),
    ):
        with pytest.raises(InvalidOption, match=words):
            run(*arguments)
    assert not out.exists()


def test_a_bundle_without_shortlist_graphs_is_refused_before_any_alignment(
    exported: Path, table: Path, tmp_path: Path
) -> None:
    with pytest.raises(BundleUnsupported, match=r"no shortlist graphs for cpu-fp32.*--out"):
        run(table, "--bundle", exported / "without")
    run(table, "--bundle", exported / "without", "--out", tmp_path / "list")
    assert (tmp_path / "list").is_file()


def test_an_empty_text_is_refused_and_nothing_is_written(spm: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(InvalidOption, match="no pair to align: of 0 pairs"):
        run(tmp_path / "empty", "--tokenizer", spm, "--out", tmp_path / "list.bin")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "vocabulary.model"]


def test_a_list_of_another_vocabulary_is_refused(bundle: Path) -> None:
    other = empty_shortlist(VOCABULARY_SIZE + 1)
    before = {path.name: path.read_bytes() for path in bundle.iterdir()}
    with pytest.raises(
        InvalidOption, match=f"{VOCABULARY_SIZE + 1} tokens, bundle with has {VOCABULARY_SIZE}"
    ):
        put_into_bundle(bundle, other, {}, command="shortlist")
    assert {path.name: path.read_bytes() for path in bundle.iterdir()} == before
