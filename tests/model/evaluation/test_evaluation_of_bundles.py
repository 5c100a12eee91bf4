"""Bundles by a stand-in for `dragoman translate`: what it is called with, and what its end means."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.bundle import Bundle
from app.errors import BundleError, InvalidOption, InvalidRequest
from model.evaluation import bundle_system
from model.evaluation.bundle_system import BundleSystem
from model.evaluation.system import Decoding, Languages
from model.evaluation.testset import TestSet

TESTSET = TestSet("t", ("one\u2028and", "", "three"), ("x", "y", "z"))


class Product:
    """Upper-cases the input file, as the product's command line does with a model."""

    def __init__(self) -> None:
        self.options: dict[str, str] = {}
        self.flags: list[str] = []
        self.environment: dict[str, str] = {}
        self.exit_code = 0
        self.words = b""
        self.lost = 0

    def run(self, command: list[str], **named: Any) -> SimpleNamespace:
        assert command[:5] == [sys.executable, "-P", "-m", "app", "translate"]
        self.options = dict(zip(command[5:-1:2], command[6:-1:2], strict=True))
        self.flags = command[-1:]
        self.environment = named["env"]
        assert named["stdin"] == named["stdout"] == subprocess.DEVNULL
        if self.exit_code == 0:
            lines = Path(self.options["--input"]).read_bytes().upper().split(b"\n")
            Path(self.options["--output"]).write_bytes(b"\n".join(lines[self.lost :]))
            report = {"num_lines": 3, "num_target_tokens": 12, "elapsed_s": 0.5, "variant": "cpu-int8"}
            Path(self.options["--report"]).write_text(json.dumps(report))
        stderr = self.words if named["stderr"] == subprocess.PIPE else None
        return SimpleNamespace(returncode=self.exit_code, stderr=stderr)


@pytest.fixture
def product(monkeypatch: pytest.MonkeyPatch) -> Product:
    product = Product()
    monkeypatch.setattr(bundle_system.subprocess, "run", product.run)
    return product


def system_of(path: Path, **changes: Any) -> BundleSystem:
    manifest: Any = SimpleNamespace(id="b", variants={"cpu-int8": None}, shortlist="list.bin")
    values: dict[str, Any] = {
        "variant": "cpu-int8",
        "use_shortlist": True,
        "decoding": Decoding(4, 0.6),
        "num_workers": None,
    }
    return BundleSystem("sys", Bundle(path, manifest), Languages("en", "pt"), **(values | changes))


def test_the_product_translates_and_says_how_long_it_took(product: Product, tmp_path: Path) -> None:
    found = system_of(tmp_path).translate(TESTSET)
    assert found.lines == ("ONE\u2028AND", "", "THREE")
    assert found.speed is not None
    assert (found.speed.lines_per_s, found.speed.target_tokens_per_s) == (6, 24)
    source = Path(product.options.pop("--input"))
    assert Path(product.options.pop("--output")).parent == Path(product.options.pop("--report")).parent
    assert not source.parent.exists()
    assert product.options == {
        "--bundle": str(tmp_path),
        "--source": "en",
        "--target": "pt",
        "--variant": "cpu-int8",
        "--device": "cpu",
        "--beam-size": "4",
        "--length-penalty": "0.6",
    }
    assert product.flags == ["--shortlist"]


def test_the_product_is_this_very_one(
    product: Product, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    system_of(tmp_path, num_workers=3, use_shortlist=False).translate(TESTSET)
    first, second = product.environment["PYTHONPATH"].split(os.pathsep)
    assert (Path(first) / "app" / "__main__.py").is_file()
    assert second == "/elsewhere"
    assert product.options["--workers"] == "3"
    assert product.flags == ["--no-shortlist"]


def test_a_failing_product_is_told_in_its_own_words(product: Product, tmp_path: Path) -> None:
    product.words = b"dragoman: the disk is full\n"
    for exit_code, kind in ((1, BundleError), (2, InvalidRequest), (-9, BundleError)):
        product.exit_code = exit_code
        with pytest.raises(kind, match=rf"ended with {exit_code}\): the disk is full$"):
            system_of(tmp_path).translate(TESTSET)


def test_remarks_of_the_product_are_passed_on(
    product: Product, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    system_of(tmp_path).translate(TESTSET)
    assert capsys.readouterr().err == ""
    product.words = b"2 of the lines reached the limit\n"
    system_of(tmp_path).translate(TESTSET)
    assert capsys.readouterr().err == "sys, t: 2 of the lines reached the limit\n"


def test_on_a_terminal_the_product_draws_its_own_progress(
    product: Product, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    product.exit_code = 1
    with pytest.raises(BundleError, match="its words are above"):
        system_of(tmp_path).translate(TESTSET)
    assert capsys.readouterr().err == "sys translates t\n"


def test_a_lost_line_is_noticed(product: Product, tmp_path: Path) -> None:
    product.lost = 1
    with pytest.raises(BundleError, match="made 2 lines of the 3 of test set t"):
        system_of(tmp_path).translate(TESTSET)


def test_a_variant_that_the_bundle_has_not_is_refused(tmp_path: Path) -> None:
    system_of(tmp_path).check(TESTSET)
    with pytest.raises(InvalidOption, match="bundle b has no variant cpu-fp32; it has cpu-int8"):
        system_of(tmp_path, variant="cpu-fp32").check(TESTSET)


def test_a_shortlist_counts_only_where_there_is_one_and_it_is_used(tmp_path: Path) -> None:
    assert system_of(tmp_path).facts["shortlist"] is True
    assert system_of(tmp_path, use_shortlist=False).facts["shortlist"] is False
    system = system_of(tmp_path)
    system.bundle.manifest.shortlist = None  # type: ignore[misc]
    assert system.facts["shortlist"] is False
