"""`dragoman evaluate` on a tiny bundle whose translations a stand-in for the product makes."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import tiny_checkpoint, tiny_options
from typer.testing import CliRunner

import model.evaluation.cli as cli_module
from app.bundle import open_bundle
from app.errors import BundleCorrupt, DragomanError, InvalidOption
from exporters.export import export_bundle
from model.evaluation import bundle_system

SOURCES = "one two three\nfour five six\n"
REFERENCES = "um dois três quatro\nquatro cinco seis sete\n"


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("exported") / "tiny"
    try:
        export_bundle(tiny_checkpoint(shortlist=True), folder, tiny_options())
    finally:
        torch.set_num_threads(num_threads)
    return folder


@pytest.fixture
def bundle(exported: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "tiny"
    copy.mkdir()
    for file in exported.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


@pytest.fixture
def testset(tmp_path: Path) -> str:
    (tmp_path / "s.en").write_text(SOURCES)
    (tmp_path / "s.pt").write_text(REFERENCES)
    return f"--testset=small={tmp_path / 's.en'},{tmp_path / 's.pt'}"


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What the product answers, by beam size."""
    answers = {"1": REFERENCES, "4": REFERENCES.replace("seis", "seis e")}

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        options = dict(zip(command[5:-1:2], command[6:-1:2], strict=True))
        Path(options["--output"]).write_text(answers[options["--beam-size"]])
        report = {"num_lines": 2, "num_target_tokens": 9, "elapsed_s": 0.5}
        Path(options["--report"]).write_text(json.dumps(report))
        return SimpleNamespace(returncode=0, stderr=b"")

    monkeypatch.setattr(bundle_system.subprocess, "run", run)
    return answers


def run(*arguments: object) -> str:
    result = CliRunner(env={"COLUMNS": "400"}).invoke(cli_module.app, list(map(str, arguments)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_ready_translations_need_neither_languages_nor_models(testset: str, tmp_path: Path) -> None:
    ready = tmp_path / "mine"
    ready.write_text(REFERENCES)
    text = run(f"mine={ready}", testset, "--json", tmp_path / "j")
    assert "100.00" in text
    facts = json.loads((tmp_path / "j").read_text())
    assert facts["source"] is None
    assert facts["test_sets"][0]["systems"][0]["kind"] == "file"


def test_each_variant_and_beam_size_counts_as_a_system(
    bundle: Path, testset: str, tmp_path: Path, answer: dict[str, str]
) -> None:
    run(
        bundle, f"mine={tmp_path / 's.pt'}", testset, "--beam-size", 1, "--beam-size", 4,
        "--variant", "cpu-fp32", "--variant", "cpu-int8", "--samples", 100,
        "--json", tmp_path / "j", "--outputs", tmp_path / "out",
    )  # fmt: skip
    facts = json.loads((tmp_path / "j").read_text())
    assert (facts["source"], facts["target"]) == ("en", "pt")
    names = [system["name"] for system in facts["test_sets"][0]["systems"]]
    assert names == [
        "tiny.cpu-int8.beam-1",
        "tiny.cpu-int8.beam-4",
        "tiny.cpu-fp32.beam-1",
        "tiny.cpu-fp32.beam-4",
        "mine",
    ]
    assert (tmp_path / "out" / "tiny.cpu-fp32.beam-4" / "small.txt").read_text() == answer["4"]


def test_scores_are_recorded_beside_those_measured_in_another_way(
    bundle: Path, testset: str, answer: dict[str, str]
) -> None:
    run(bundle, testset, "--record")
    run(f"again={bundle}", testset, "--record", "--beam-size", 4, "--length-penalty", 0.5)
    answer["1"] = REFERENCES.replace("dois", "duas")
    run(bundle, testset, "--record", "--no-shortlist")
    run(bundle, testset, "--record", "--length-penalty", 0.5)
    opened = open_bundle(bundle)
    found = {
        (score.beam_size, score.length_penalty, score.shortlist): score for score in opened.manifest.quality
    }
    assert len(opened.manifest.quality) == 3
    assert set(found) == {(1, 0.5, True), (4, 0.5, True), (1, 1.0, False)}
    assert found[1, 0.5, True].bleu < 100
    card = opened.file("MODEL_CARD.md").read_text(encoding="utf-8")
    assert card.count("## Quality") == 1
    assert "| small | cpu-int8 | beam 4, length penalty 0.5 | yes | 2 |" in card
    assert "| small | cpu-int8 | greedy | no | 2 |" in card


def test_mistakes_are_named_before_any_work(
    bundle: Path, testset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("the product was called")

    monkeypatch.setattr(bundle_system.subprocess, "run", never)
    ready = tmp_path / "s.pt"
    service = "http://127.0.0.1:9"
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "manifest.json").write_text("{")
    empty, key = tmp_path / "empty", tmp_path / "key"
    empty.write_text("\n")
    key.write_text("dk_1\n")
    for arguments, words in (
        (["absent"], "neither a bundle's folder, nor a URL, nor a file"),
        (["ana:geheim@host:8000"], "^…@host:8000 is neither"),
        ([ready], "ready translations need a name: NAME="),
        ([tmp_path], "holds no manifest.json"),
        ([service], "name the languages with --source and --target; the bundles' are not known"),
        ([bundle, "--source", "en"], "--source and --target go together"),
        ([bundle, "--variant", "tpu"], "--variant is tpu"),
        ([bundle, bundle], "two systems tiny"),
        ([bundle, "--beam-size", 4, "--beam-size", 4], "two systems tiny.beam-4"),
        ([f"mine={ready}", "--record"], "--record is for bundles"),
        ([bundle, "--record", "--max-lines", 1], "leave out --max-lines or --record"),
        ([bundle, "--json", tmp_path / "no" / "j"], "is not a folder"),
        ([service, "--key-file", tmp_path / "no-key"], "no-key cannot be read as a key"),
        ([service, "--key-file", damaged], "damaged cannot be read as a key"),
        ([service, "--key-file", empty], "empty does not hold one key; write the key alone"),
        ([bundle, "--key-file", key], "--key-file is for services, and no URL is given"),
    ):
        with pytest.raises(InvalidOption, match=words):
            run(*arguments, testset)
    second = f"--testset=second={tmp_path / 's.en'},{tmp_path / 's.pt'}"
    with pytest.raises(InvalidOption, match="is one file, but there are 2 test sets"):
        run(f"mine={ready}", testset, second)
    with pytest.raises(BundleCorrupt, match="is not JSON"):
        run(damaged, testset)


def test_a_bundle_of_several_pairs_has_its_pair_named_and_records_no_score(
    bundle: Path, testset: str, answer: dict[str, str]
) -> None:
    facts = json.loads((bundle / "manifest.json").read_text())
    facts["pairs"].append({"source": "en", "target": "es", "target_token_id": None})
    (bundle / "manifest.json").write_text(json.dumps(facts))
    with pytest.raises(InvalidOption, match="the bundles' are en to es, en to pt"):
        run(bundle, testset)
    run(bundle, testset, "-s", "en", "-t", "pt")
    with pytest.raises(DragomanError, match="has 2 pairs"):
        run(bundle, testset, "-s", "en", "-t", "pt", "--record")


def test_only_the_first_lines_are_scored_on_demand(
    bundle: Path, testset: str, tmp_path: Path, answer: dict[str, str]
) -> None:
    answer["1"] = REFERENCES.split("\n")[0] + "\n"
    assert "small, 1 lines" in run(bundle, testset, "--max-lines", 1)
