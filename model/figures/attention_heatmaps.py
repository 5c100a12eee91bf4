"""Attention as heat maps: every layer and head of one kind of attention in one figure, words on the axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from matplotlib.figure import Figure
from torch import Tensor

from model.figures.attention_weights import AttentionMaps
from model.figures.style import SEQUENTIAL, WIDTH_IN, house_style

AttentionKind = Literal["encoder", "decoder", "cross"]
ATTENTION_KINDS: tuple[AttentionKind, ...] = get_args(AttentionKind)

_AXES: Mapping[AttentionKind, tuple[str, str, str]] = {
    "encoder": ("Encoder self-attention", "source piece that looks", "source piece looked at"),
    "decoder": ("Decoder self-attention", "decoder's input that looks", "decoder's input looked at"),
    "cross": ("Cross-attention", "target piece being chosen", "source piece looked at"),
}
_MAX_COLUMNS = 4
_LABELS_IN = 0.9


def num_columns(num_layers: int, num_heads: int) -> int:
    """Layers side by side where there are 4 to 6, else as many heads as divide evenly, at most 4."""
    if _MAX_COLUMNS <= num_layers <= _MAX_COLUMNS + 2:
        return num_layers
    return max(count for count in range(1, _MAX_COLUMNS + 1) if num_heads % count == 0)


def panel_order(num_layers: int, num_heads: int) -> list[tuple[int, int]]:
    """Which (layer, head) stands in each panel, row after row."""
    if num_columns(num_layers, num_heads) == num_layers:
        return [(layer, head) for head in range(num_heads) for layer in range(num_layers)]
    return [(layer, head) for layer in range(num_layers) for head in range(num_heads)]


@house_style()
def draw_attention(maps: AttentionMaps, kind: AttentionKind) -> Figure:
    """Draw one kind of attention.

    Args:
        maps: of `attention_of`.
        kind: which attention.

    Raises:
        ValueError: the decoder's self-attention is asked of a model that has none.
    """
    title, y_label, x_label = _AXES[kind]
    weights, rows, columns = _of_kind(maps, kind)
    num_layers, num_heads = weights.shape[:2]
    width = num_columns(num_layers, num_heads)
    height = num_layers * num_heads // width
    panel_in = (WIDTH_IN - _LABELS_IN) / width
    figure = Figure(
        figsize=(WIDTH_IN, height * (panel_in * len(rows) / len(columns) + 0.22) + _LABELS_IN + 1.1),
        layout="constrained",
    )
    panels = figure.subplots(height, width, sharex=True, sharey=True, squeeze=False)
    font_size = max(4.0, min(8.0, 60.0 * panel_in / max(len(rows), len(columns))))
    for axis, (layer, head) in zip(panels.flat, panel_order(num_layers, num_heads), strict=True):
        image = axis.imshow(
            weights[layer, head].numpy(),
            cmap=SEQUENTIAL,
            vmin=0,
            vmax=1,
            aspect="auto",
            interpolation="nearest",
        )
        axis.set_title(f"layer {layer + 1}, head {head + 1}", fontsize=7.5, pad=2)
        axis.grid(visible=False)
        axis.tick_params(length=1.5, pad=1, labelsize=font_size)
        axis.tick_params(axis="x", labelrotation=90)
    # The panels share their axes, and with them these ticks.
    panels[0, 0].set_xticks(range(len(columns)), [_shown(piece) for piece in columns])
    panels[0, 0].set_yticks(range(len(rows)), [_shown(piece) for piece in rows])
    bar = figure.colorbar(image, ax=panels, location="top", shrink=0.5, fraction=0.012, pad=0.005, aspect=40)
    bar.set_label("attention weight")
    figure.supylabel(y_label, fontsize=9)
    figure.supxlabel(x_label, fontsize=9)
    figure.suptitle(f"{title}: {num_layers} layers of {num_heads} heads; each row sums to 1", fontsize=10)
    return figure


def _of_kind(maps: AttentionMaps, kind: AttentionKind) -> tuple[Tensor, Sequence[str], Sequence[str]]:
    """The weights [L, H, rows, columns] and the pieces on both axes."""
    if kind == "encoder":
        return maps.encoder, maps.source_pieces, maps.source_pieces
    if kind == "cross":
        return maps.cross, maps.target_pieces, maps.source_pieces
    if maps.decoder is None:
        raise ValueError(
            "the decoder has recurrent cells (SSRU) in the place of self-attention: no weights to draw"
        )
    return maps.decoder, maps.input_pieces, maps.input_pieces


def _shown(piece: str) -> str:
    """A piece as a label: a middle dot for the space before a word; a dollar sign is no formula."""
    return piece.replace("\u2581", "·").replace("$", r"\$")
