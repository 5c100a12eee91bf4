"""Figures become files: the same bytes each time, and nothing is replaced unasked."""

from __future__ import annotations

import struct
from pathlib import Path

import matplotlib
import pytest

from app.errors import InvalidOption
from model.figures.positions import draw_codes, draw_dot_products
from model.figures.scaling import draw_scaling
from model.figures.style import COLOURS, WIDTH_IN, Destination, save


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_drawing_twice_gives_the_same_bytes(suffix: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        save(draw_codes(d_model=8, num_positions=6), tmp_path / f"{name}{suffix}")
    assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()


def test_the_readers_own_matplotlib_settings_change_nothing(tmp_path: Path) -> None:
    save(draw_dot_products(d_model=8, max_distance=5), tmp_path / "a.png")
    with matplotlib.rc_context({"font.size": 20.0, "axes.facecolor": "red", "savefig.dpi": 30}):
        save(draw_dot_products(d_model=8, max_distance=5), tmp_path / "b.png")
        assert matplotlib.rcParams["font.size"] == 20.0
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_a_figure_is_a_little_wider_than_a_readme(tmp_path: Path) -> None:
    save(draw_scaling(max_head_size=4), tmp_path / "a.png")
    width, _ = struct.unpack(">II", (tmp_path / "a.png").read_bytes()[16:24])
    assert width == round(120 * WIDTH_IN)


def test_no_date_and_no_version_is_in_an_svg(tmp_path: Path) -> None:
    save(draw_codes(d_model=8, num_positions=6), tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert "<dc:date>" not in text
    assert matplotlib.__version__ not in text


def test_no_partial_file_is_left(tmp_path: Path) -> None:
    save(draw_codes(d_model=8, num_positions=6), tmp_path / "new" / "a.png")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.png"]


def test_colours_differ() -> None:
    assert len(set(COLOURS)) == len(COLOURS)


def test_a_folder_gets_a_file_for_each_figure(tmp_path: Path) -> None:
    files = Destination(tmp_path / "new", suffix=".svg").files(["a", "b"])
    assert files == {"a": tmp_path / "new" / "a.svg", "b": tmp_path / "new" / "b.svg"}


def test_a_file_takes_one_figure(tmp_path: Path) -> None:
    assert Destination(tmp_path / "x.PNG").files(["a"]) == {"a": tmp_path / "x.PNG"}
    with pytest.raises(InvalidOption, match="2 figures"):
        Destination(tmp_path / "x.png").files(["a", "b"])


@pytest.mark.parametrize("name", ["x.jpg", "x.pdf"])
def test_an_unknown_format_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match=r"or \.svg"):
        Destination(tmp_path / name).files(["a"])


def test_a_file_in_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="does not exist"):
        Destination(tmp_path / "no" / "x.png").files(["a"])


def test_a_file_without_a_suffix_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(InvalidOption, match="without a known suffix"):
        Destination(tmp_path / "x").files(["a"])


def test_existing_files_are_replaced_only_by_force(tmp_path: Path) -> None:
    (tmp_path / "b.png").write_text("old")
    with pytest.raises(InvalidOption, match="--force"):
        Destination(tmp_path).files(["a", "b"])
    assert Destination(tmp_path, force=True).files(["a", "b"])["b"] == tmp_path / "b.png"
