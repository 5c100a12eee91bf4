"""docs/transformer.md names tests, files, functions and figures: each exists, and each claim is on it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "transformer.md"
TEXT = PAGE.read_text(encoding="utf-8")
MAX_FIGURE_BYTES, MAX_FIGURES_BYTES = 150_000, 1_000_000


def claims() -> set[str]:
    files = (ROOT / "tests" / "model").glob("test_transformer_claims_*.py")
    return {
        name
        for file in files
        if file != Path(__file__)
        for name in re.findall(r"^def (test_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    }


def test_the_page_names_every_claim_that_is_tested_and_no_other() -> None:
    assert set(re.findall(r"`(test_\w+)`", TEXT)) == claims()


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", TEXT))))
def test_every_link_of_the_page_leads_somewhere(link: str) -> None:
    assert link.startswith("https://") or (PAGE.parent / link).exists()


@pytest.mark.parametrize(
    ("name", "file"), sorted(set(re.findall(r"\[`([\w.]+)`\]\((\.\./[\w/]+\.py)\)", TEXT)))
)
def test_every_name_that_links_to_a_file_is_defined_there(name: str, file: str) -> None:
    source = (PAGE.parent / file).read_text(encoding="utf-8")
    for part in name.split("."):
        assert re.search(rf"(?:def|class) {part}\b|^{part}\b", source, re.MULTILINE), part


def test_every_figure_is_shown_and_small_enough_for_a_repository() -> None:
    figures = [path for path in (ROOT / "docs" / "figures").iterdir() if path.suffix in (".png", ".svg")]
    assert figures
    for figure in figures:
        assert f"(figures/{figure.name})" in TEXT
        assert figure.stat().st_size < MAX_FIGURE_BYTES
    assert sum(figure.stat().st_size for figure in figures) < MAX_FIGURES_BYTES
