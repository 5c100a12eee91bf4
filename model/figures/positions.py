"""Two figures of the sinusoidal position codes: the codes themselves, and what their dot products say."""

from __future__ import annotations

from matplotlib.figure import Figure

from model.config import PositionLayout
from model.figures.style import COLOURS, DIVERGING, WIDTH_IN, house_style
from model.positions import position_codes

_LAYOUTS: dict[PositionLayout, str] = {
    "interleaved": "interleaved (the paper)",
    "halves": "two halves (Marian)",
}


@house_style()
def draw_codes(*, d_model: int, num_positions: int) -> Figure:
    """Show both layouts as heat maps: positions downwards, dimensions to the right.

    Args:
        d_model: d, even.
        num_positions: T, rows of the map.
    """
    figure = Figure(figsize=(WIDTH_IN, 3.6), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, (layout, title) in zip(axes, _LAYOUTS.items(), strict=True):
        codes = position_codes(num_positions, d_model, layout=layout)  # [T, d]
        image = axis.imshow(
            codes.numpy(), cmap=DIVERGING, vmin=-1, vmax=1, aspect="auto", interpolation="nearest"
        )
        axis.set(title=title, xlabel="dimension")
        axis.grid(visible=False)
    axes[0].set_ylabel("position (tokens)")
    figure.colorbar(image, ax=axes, label="value of the code")
    return figure


@house_style()
def draw_dot_products(*, d_model: int, max_distance: int) -> Figure:
    """Show that the dot product of two codes is a function of their distance: sum_k cos(w_k (t - s)).

    Three starting positions are drawn over each other; the paper's layout. The curve is symmetric, falls
    quickly and then wavers: it tells how far, not in which direction.

    Args:
        d_model: d, even.
        max_distance: the furthest neighbour on either side, in tokens.
    """
    starts = (max_distance, 3 * max_distance, 20 * max_distance)
    codes = position_codes(max(starts) + max_distance + 1, d_model, layout="interleaved").double()  # [T, d]
    distances = range(-max_distance, max_distance + 1)
    figure = Figure(figsize=(WIDTH_IN, 3.2), layout="constrained")
    axis = figure.subplots()
    for start, colour, width in zip(starts, COLOURS, (5.0, 3.0, 1.0), strict=False):
        near = codes[start - max_distance : start + max_distance + 1]  # [2 * max_distance + 1, d]
        products = near @ codes[start] / (d_model / 2)
        axis.plot(distances, products.numpy(), color=colour, linewidth=width, label=f"from position {start}")
    axis.set(
        xlabel="distance (tokens)",
        ylabel="dot product of two codes\n(1 = with itself)",
        title=f"d = {d_model}: the three curves are one",
    )
    axis.legend()
    return figure
