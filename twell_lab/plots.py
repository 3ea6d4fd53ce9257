"""Plotly figures of what the library returns (a FiringProfile, a TwELL), and the plain numbers they draw. May import
formats and core.

Each function that draws returns a plotly `Figure`, and raises StackError where plotly is missing; nothing else here
needs it.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from .core import InputError, StackError

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

# Okabe and Ito's colours, which readers with any colour vision can tell apart.
BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
SKY, RED, GREY = "#56B4E9", "#D55E00", "#8A8A8A"
COLOURS = (BLUE, RED, GREEN, ORANGE, PURPLE, SKY)
INK, FAINT = "#222222", "#E6E6E6"

# ---- plain numbers and names ----


def layer_names(names: list[str]) -> list[str]:
    """Return short names of modules, such as `layer 3` for `layers.3.mlp`; the full ones where those are not unique."""
    numbers = [next((part for part in name.split(".") if part.isdigit()), None) for name in names]
    if None in numbers or len(set(numbers)) < len(numbers):
        return [name or "layer" for name in names]
    return [f"layer {number}" for number in numbers]


def share(value: float) -> str:
    """Return a share of one as a percentage, with two digits where it is small."""
    percent = 100 * value
    if percent == 0 or percent >= 9.95:
        return f"{percent:.0f}%"
    return f"{percent:.1f}%" if percent >= 0.095 else f"{percent:.2g}%"


def tile_of(twell, row: int, tile: int) -> dict:
    """Return one tile of one row of a formats.TwELL as a dict, which can be drawn and JSON can hold.

    {row, tile, width (columns in this tile), count (kept values), dtype, slots, words (the stored words that
    are used, as whole numbers, the count first), tail (the values that did not fit, as words too)}.
    """
    from .formats import join_words  # not at the top: the other functions of this module need no torch

    rows, tiles, words = twell.packed.shape
    for name, value, end in (("row", row, rows), ("tile", tile, tiles)):
        if not 0 <= value < end:
            raise InputError(f"{name} is {value!r}; this TwELL has {name}s 0 to {end - 1}")
    stored, bits = twell.packed[row, tile].tolist(), 8 * twell.packed.element_size()
    first, width = tile * twell.tile, min(twell.tile, twell.shape[1] - tile * twell.tile)
    mine = slice(*twell.tail_pointer[row : row + 2].tolist())
    column, value = twell.tail_column[mine] - first, twell.tail_value[mine]
    here = (column >= 0) & (column < width)
    return {
        "row": row,
        "tile": tile,
        "width": width,
        "count": stored[0],
        "slots": words - 1,
        "dtype": str(twell.dtype).removeprefix("torch."),
        "tail": [word % 2**bits for word in join_words(value[here], column[here]).tolist()],
        "words": [word % 2**bits for word in stored[: min(stored[0], words - 1) + 1]],
    }


def decode(word: int, dtype: str) -> tuple[float, int]:
    """Return (value, column) of a stored TwELL word, for its value's dtype."""
    shift, integer, kind = {"float32": (32, "<I", "<f"), "float16": (16, "<H", "<e")}.get(dtype, (16, "<I", "<f"))
    bits = word >> shift << (16 if dtype == "bfloat16" else 0)  # bfloat16 is the upper half of a float32
    return struct.unpack(kind, struct.pack(integer, bits))[0], word % 2**shift


def percentiles(histogram: Iterable[int]) -> tuple[int, int]:
    """Return the 5th and 95th percentile of what a histogram over 0, 1, 2, ... counts; zeros where it is empty."""
    seen = list(accumulate(int(count) for count in histogram))
    total = seen[-1] if seen else 0
    return (bisect_right(seen, 0.05 * total), bisect_left(seen, 0.95 * total)) if total else (0, 0)


def apart(heights: list[float], least: float) -> list[float]:
    """Return heights for the names of lines that end at these heights, in the same order and at least `least` apart:
    where two are nearer, the upper one is moved up."""
    places, below = [0.0] * len(heights), -math.inf
    for i in sorted(range(len(heights)), key=lambda i: heights[i]):
        places[i] = below = max(heights[i], below + least)
    return places


# ---- figures ----


def firing_by_layer(profile) -> Figure:
    """Draw how many neurons fire in each layer of a FiringProfile: mean share, and the span that holds the middle 90%
    of tokens."""
    mean = [100 * layer.density for layer in profile.layers]
    ends = [[100 * n / layer.d_ff for n in percentiles(layer.nnz_histogram)] for layer in profile.layers]
    # The figures stand below the bars: above them they would collide with the whiskers.
    names = layer_names([layer.name for layer in profile.layers])
    figure = _figure()
    figure.add_bar(
        x=[f"{name}<br>{here:.0f}%" if here >= 9.5 else f"{name}<br>{here:.1f}%" for name, here in zip(names, mean)],
        y=mean,
        marker_color=BLUE,
        error_y={
            # With a heavy tail the mean can lie above the 95th percentile: then the whisker has length 0.
            "array": [max(0.0, high - here) for here, (_, high) in zip(mean, ends)],
            "arrayminus": [max(0.0, here - low) for here, (low, _) in zip(mean, ends)],
            "color": INK,
            "thickness": 1,
            "width": 4,
        },
        hovertemplate="%{y:.2f}%<extra></extra>",
    )
    figure.update_yaxes(title_text=_FIRING, rangemode="tozero")
    figure.update_xaxes(title_text="feed-forward layer")
    return styled(figure, "Share of neurons that fire (whiskers: the middle 90% of tokens)")


def firing_by_position(profile) -> Figure:
    """Draw the share of neurons that fire at the first tokens of a sequence and at later ones: all layers together as a
    thick line, each layer as a thin one with its name at its end. InputError for a FiringProfile in which no position
    is known."""
    rows, names = profile.by_position(), layer_names([layer.name for layer in profile.layers])
    if not rows:
        raise InputError(
            "no position of a token is known in this profile; accepted: one made from token ids or sequences"
        )
    until = lambda row: f"-{row['last']}" if row["last"] else " on"
    places = [f"{row['first']}" + ("" if row["last"] == row["first"] else until(row)) for row in rows]
    figure = _figure()
    for number, name in enumerate(names):
        figure.add_scatter(
            x=places,
            y=[None if (share := row["layers"][number]) is None else 100 * share for row in rows],
            mode="lines",
            line={"color": SKY, "width": 1},
            name="each layer",
            legendgroup="layers",
            showlegend=number == 0,
            hovertemplate=f"{name}, %{{x}}: %{{y:.3g}}%<extra></extra>",
        )
    figure.add_scatter(
        x=places,
        y=[100 * row["density"] for row in rows],
        mode="lines+markers",
        line={"color": BLUE, "width": 3},
        name="all layers together",
        customdata=[row["tokens"] for row in rows],
        hovertemplate="%{x}: %{y:.3g}% (%{customdata:,} tokens)<extra></extra>",
    )
    # Each thin line is named where it ends, and the figure is as high as the names of all layers need.
    line, above = 13, 130  # pixels: a name; what is above and below the lines
    height = max(400, above + line * len(names))
    shares = [value for row in rows for value in (row["density"], *row["layers"]) if value is not None]
    top = 108 * max(shares) or 1.0
    ends = [(name, 100 * end) for name, end in zip(names, rows[-1]["layers"]) if end is not None]
    at = apart([end for _, end in ends], top * line / (height - above))
    for (name, _), y in zip(ends, at, strict=True):
        figure.add_annotation(
            x=len(places) - 1, y=y, text=name, showarrow=False, xanchor="left", xshift=8, font={"size": 10}
        )
    figure.update_xaxes(title_text="position in its sequence, from 0", type="category")
    figure.update_yaxes(title_text=_FIRING, rangemode="tozero", range=[0, max([top, *at])])
    return styled(figure, "Share of neurons that fire, by position in the sequence", height=height)


def neuron_frequency(profile, layer: int = 0) -> Figure:
    """Draw on which share of the tokens each neuron of one layer fires, most used first, and how many never fire.

    profile: a FiringProfile. layer: which of its layers, from 0; InputError for one that is not there."""
    layers = profile.layers
    if not 0 <= layer < len(layers):
        raise InputError(f"layer is {layer!r}; this profile has layers 0 to {len(layers) - 1}")
    values = sorted((100 * float(value) for value in layers[layer].neuron_frequency), reverse=True)
    alive = [value for value in values if value > 0]
    numbers, hover = list(range(1, len(alive) + 1)), "neuron %{x}: %{y:.3g}% of tokens"
    figure = _figure()
    figure.add_scatter(x=numbers, y=alive, mode="lines", line={"color": BLUE}, hovertemplate=hover)
    figure.update_yaxes(
        title_text="fires on this share of tokens, % (log scale)",
        type="log",
        dtick=1,
        tickformat="~g",
        range=[math.log10(alive[-1] / 1.5), 2.05] if alive else [-1, 2],
    )
    figure.update_xaxes(title_text="neuron, most used first", range=[0, len(values) * 1.01])
    if len(alive) < len(values):
        text = f"{len(values) - len(alive)} of {len(values)}<br>never fire"
        figure.add_vrect(x0=len(alive), x1=len(values), fillcolor=FAINT, line_width=0, layer="below")
        figure.add_annotation(
            text=text, align="right", x=len(values), xanchor="right", y=0.97, yref="paper", showarrow=False
        )
    name = layer_names([one.name for one in layers])[layer]
    return styled(figure, f"How often each neuron fires: {name}")


# ---- parts ----

_FIRING = "neurons firing for a token, %"


def styled(figure: Figure, title: str, height: int = 400) -> Figure:
    """Return the figure itself, with the look that all figures here have. height: in pixels."""
    figure.update_layout(
        template="plotly_white",
        height=height,
        bargap=0.25,
        hoverlabel={"namelength": -1},
        title={"text": title, "x": 0, "xref": "paper", "font": {"size": 15}},
        font={"family": "system-ui, sans-serif", "size": 12, "color": INK},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0},
        margin={"l": 60, "r": 20, "t": 80, "b": 50},
    )
    return figure.update_yaxes(ticklabelstandoff=4)  # else names touch the bars and points beside them


def _figure(**panels: Any) -> Figure:
    """Return an empty figure, cut into panels as plotly's `make_subplots` does where any are asked for."""
    try:
        from plotly.graph_objects import Figure
        from plotly.subplots import make_subplots
    except ImportError:
        raise StackError("figures need plotly, which is not installed: pip install plotly") from None
    return make_subplots(**panels) if panels else Figure()
