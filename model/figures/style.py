"""How every figure looks and how it becomes a file: without a display, and byte for byte the same again."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import font_manager
from matplotlib.figure import Figure
from PIL import Image

from app.errors import InvalidOption

# Okabe and Ito 2008, "Color Universal Design": told apart by colour-blind readers too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# A second sign beside the colour, for prints in grey.
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
SEQUENTIAL = "cividis"
DIVERGING = "PuOr"

FORMATS = (".png", ".svg")
# Inches: at 120 dots an inch a little more than the 830 pixels that a README is wide.
WIDTH_IN = 8.0

# matplotlib brings the first; it lacks Chinese, Japanese and Korean, for which one of the others is taken if
# it is installed. Without any, matplotlib warns and draws boxes.
_FONTS = (
    "DejaVu Sans",
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Source Han Sans SC",
    "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei",
    "PingFang SC",
    "Microsoft YaHei",
    "Arial Unicode MS",
)

_STYLE: dict[Any, object] = {
    "font.size": 10.0,
    "axes.titlesize": 10.0,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "lines.markersize": 4.5,
    "savefig.dpi": 120,
    # Ids inside an SVG are drawn at random unless a salt is given.
    "svg.hashsalt": "dragoman",
}


@contextmanager
def house_style() -> Iterator[None]:
    """Draw and save with the settings above, whatever the reader's own matplotlibrc says."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        installed = set(font_manager.get_font_names())
        matplotlib.rcParams["font.family"] = [name for name in _FONTS if name in installed]
        yield


@dataclass(frozen=True)
class Destination:
    """Where figures go.

    Attributes:
        path: a file that ends in .png or .svg, for one figure; or a folder, which is made.
        force: whether existing files are replaced.
        suffix: the format in a folder, ``".png"`` or ``".svg"``.
    """

    path: Path
    force: bool = False
    suffix: str = ".png"

    def files(self, names: list[str]) -> dict[str, Path]:
        """Name a file for each figure, before any time is spent on drawing.

        Args:
            names: what the figures are called in a folder, without a suffix.

        Returns:
            The file of each figure.

        Raises:
            InvalidOption: one file is given for several figures, its suffix is unknown, a file exists and
                ``force`` is not set, or the folder of a file does not exist.
        """
        if self.path.suffix.lower() in FORMATS:
            if len(names) != 1:
                raise InvalidOption(
                    f"--out {self.path} is one file, but there are {len(names)} figures"
                    f" ({', '.join(names)}); give a folder, or choose one with --only"
                )
            if not self.path.parent.is_dir():
                raise InvalidOption(f"the folder of --out {self.path} does not exist; make it first")
            files = {names[0]: self.path}
        elif self.path.suffix and not self.path.is_dir():
            raise InvalidOption(
                f"--out {self.path} ends in {self.path.suffix}; figures are {' or '.join(FORMATS)},"
                " and a new folder's name has no dot"
            )
        elif self.path.exists() and not self.path.is_dir():
            raise InvalidOption(
                f"--out {self.path} is a file without a known suffix; give .png, .svg or a folder"
            )
        else:
            files = {name: self.path / f"{name}{self.suffix}" for name in names}
        existing = [str(file) for file in files.values() if file.exists()]
        if existing and not self.force:
            raise InvalidOption(f"{', '.join(existing)} exists; name another --out, or replace with --force")
        return files


@house_style()
def save(figure: Figure, path: Path) -> None:
    """Write a figure; a file that is there keeps its content until the new one is complete.

    Args:
        figure: drawn within `house_style`.
        path: ends in .png or .svg; its folder is made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    suffix = path.suffix.lower()
    if suffix == ".svg":
        # None leaves a field out: dates and versions would make equal figures differ.
        figure.savefig(partial, format="svg", metadata={"Date": None, "Creator": None})
    else:
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png")
        # A palette of 256 colours makes the file a third as large; nothing here has more that one could see.
        with Image.open(drawn) as image:
            image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(
                partial, format="png", optimize=True
            )
    partial.replace(path)
