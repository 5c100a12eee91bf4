"""`dragoman evaluate` of a tiny bundle by the product itself, in processes of its own."""

import json
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_checkpoint, tiny_options, tiny_texts

from app.__main__ import main
from app.bundle import open_bundle
from exporters.export import export_bundle


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        export_bundle(tiny_checkpoint(shortlist=True), tmp_path / "tiny", tiny_options())
    finally:
        torch.set_num_threads(num_threads)
    return tmp_path / "tiny"


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", *map(str, arguments)])
    return int(ended.value.code or 0)


def test_a_bundle_is_translated_scored_and_recorded(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A folder `app` where the user stands, and settings of another service, must not matter.
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__init__.py").write_text("raise SystemExit('the wrong app')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DRAGOMAN_VARIANT", "cpu-fp32")
    monkeypatch.setenv("DRAGOMAN_USE_SHORTLIST", "false")
    table = tmp_path / "set.tsv"
    table.write_text("".join(f"{text}\u2028{text}\t{text}\n" for text in tiny_texts()), encoding="utf-8")
    arguments = [bundle, f"--testset=set={table}", "--beam-size", 1, "--beam-size", 3, "--workers", 1]
    assert run(*arguments, "--samples", 100, "--json", "j", "--outputs", "out", "--record") == 0
    assert "tiny.beam-3" in capsys.readouterr().out
    first, second = json.loads(Path("j").read_text())["test_sets"][0]["systems"]
    assert (first["variant"], first["shortlist"], second["beam_size"]) == ("cpu-int8", True, 3)
    for system in (first, second):
        lines = (tmp_path / "out" / system["name"] / "set.txt").read_bytes().split(b"\n")[:-1]
        assert len(lines) == len(tiny_texts())
        assert system["speed"]["num_target_tokens"] >= len(lines)
        assert system["speed"]["elapsed_s"] > 0
    scores = open_bundle(bundle).manifest.quality
    assert [(score.beam_size, score.num_segments) for score in scores] == [(1, 12), (3, 12)]


def test_the_product_says_itself_why_it_failed(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "set.tsv").write_text("a\tb\n")
    with (bundle / "sentencepiece.model").open("r+b") as file:
        file.write(b"\xff")
    assert run(bundle, f"--testset=set={tmp_path / 'set.tsv'}", "--workers", 1) == 1
    errors = capsys.readouterr().err
    assert "tiny could not translate test set set (`dragoman translate` ended with 1)" in errors
    assert "sentencepiece.model has sha256" in errors
    assert "Traceback" not in errors
