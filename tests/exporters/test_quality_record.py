"""Scores go into a bundle beside those that were measured in another way."""

import fcntl
import threading
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_checkpoint, tiny_options

from app.bundle import open_bundle
from app.bundle.manifest import Manifest, QualityScore
from app.errors import BundleError
from exporters import quality
from exporters.export import MODEL_CARD_NAME, export_bundle, prepare_manifest
from exporters.model_card import quality_section
from exporters.quality import add_quality, record_quality


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        export_bundle(tiny_checkpoint(), tmp_path / "tiny", tiny_options(variants=("cpu-fp32",)))
    finally:
        torch.set_num_threads(num_threads)
    return tmp_path / "tiny"


def score_of(
    bleu: float, *, beam_size: int = 1, length_penalty: float = 1.0, shortlist: bool = True
) -> QualityScore:
    return QualityScore(
        test_set="pud",
        variant="cpu-fp32",
        shortlist=shortlist,
        beam_size=beam_size,
        length_penalty=length_penalty,
        num_segments=1000,
        bleu=bleu,
        bleu_signature="b",
        chrf=60.0,
        chrf_signature="c",
    )


def test_scores_that_differ_in_decoding_alone_stand_side_by_side(bundle: Path) -> None:
    record_quality(bundle, [score_of(40.0)])
    add_quality(bundle, [score_of(41.0, beam_size=4), score_of(42.0, beam_size=4, length_penalty=0.5)])
    add_quality(bundle, [score_of(43.0, shortlist=False)])
    opened = open_bundle(bundle)
    assert [score.bleu for score in opened.manifest.quality] == [40.0, 41.0, 42.0, 43.0]
    assert opened.file(MODEL_CARD_NAME).read_text(encoding="utf-8").count("| pud |") == 4


def test_a_score_measured_again_takes_the_place_of_the_old_one(bundle: Path) -> None:
    add_quality(bundle, [score_of(40.0), score_of(41.0, beam_size=4)])
    # A length penalty has no say in greedy search.
    add_quality(bundle, [score_of(40.5, length_penalty=0.5), score_of(41.5, beam_size=4)])
    assert [score.bleu for score in open_bundle(bundle).manifest.quality] == [40.5, 41.5]


def test_two_that_record_at_once_do_not_drop_each_other_s_scores(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_for_the_lock = threading.Semaphore(0)
    others: list[threading.Thread] = []
    flock = fcntl.flock

    def counted_flock(descriptor: int, operation: int) -> None:
        asked_for_the_lock.release()
        flock(descriptor, operation)

    def prepare_while_another_comes(path: Path, manifest: Manifest) -> Path:
        if not others:
            others.append(threading.Thread(target=add_quality, args=(bundle, [score_of(41.0, beam_size=4)])))
            others[0].start()
            assert asked_for_the_lock.acquire(timeout=20)
            assert asked_for_the_lock.acquire(timeout=20), "the other one comes while this one writes"
        return prepare_manifest(path, manifest)

    monkeypatch.setattr(quality.fcntl, "flock", counted_flock)
    monkeypatch.setattr(quality, "prepare_manifest", prepare_while_another_comes)
    add_quality(bundle, [score_of(40.0)])
    others[0].join(timeout=20)
    assert [score.bleu for score in open_bundle(bundle).manifest.quality] == [40.0, 41.0]


def test_a_bundle_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="nowhere"):
        add_quality(tmp_path / "nowhere", [score_of(40.0)])


def test_the_card_says_how_each_score_was_decoded() -> None:
    text = quality_section(
        [score_of(40.0), score_of(41.239, beam_size=4, length_penalty=0.6, shortlist=False)]
    )
    lines = text.splitlines()
    assert "| pud | cpu-fp32 | greedy | yes | 1000 | 40.00 | 60.00 |" in lines
    assert "| pud | cpu-fp32 | beam 4, length penalty 0.6 | no | 1000 | 41.24 | 60.00 |" in lines
    table = [line for line in lines if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1
    assert lines.count("- BLEU `b`, chrF `c`") == 1
