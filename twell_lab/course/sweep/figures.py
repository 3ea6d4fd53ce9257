"""Figures of the recorded L1 sweep, each a function of its rows (twell_lab.training.sweep.run); in the style of plots.

`where` is the source that a figure names, as `data.where` gives it.
"""

from __future__ import annotations

import math

import plotly.graph_objects as go
from plotly.colors import sample_colorscale
from plotly.subplots import make_subplots

from ... import plots
from ...training.sweep import cost, pressed, seed_spread, twin
from ..drawing import BESIDE, row_at
from . import data

LIGHT = "#C8C8C8"
LOG = {"type": "log", "tickformat": "~g", "dtick": 1}  # of an axis
_SHADES = ("rgb(230, 159, 0)", "rgb(0, 158, 115)", "rgb(0, 114, 178)", "rgb(72, 15, 105)")  # first layer to last


def short(row: dict) -> str:
    """The name of a run by its coefficient alone: "L1 1.5e-4" or "no L1"."""
    if not (l1 := row["config"]["l1"]):
        return "no L1"
    power = math.floor(math.log10(l1) + 1e-9)
    return f"L1 {l1 / 10**power:.3g}e{power}"


def loss_against_nnz(rows: list[dict], where: str, zeros: float = data.ZEROS, more: float = data.MORE) -> go.Figure:
    """Held-out loss over the number of firing neurons: runs by L1, with dead rows renewed, with other seeds and rates.

    Shaded: at least `zeros` zeros with a loss at most `more` above the twin's.
    """
    runs, base = pressed(rows), twin(rows)
    d_ff, loss = base["config"]["d_ff"], base["validation_bits_per_byte"]
    figure = go.Figure()
    figure.add_shape(
        type="rect",
        x0=min(row["mean_nnz"] for row in runs) / 2,
        x1=(1 - zeros) * d_ff,
        y0=0.97 * loss,
        y1=(1 + more) * loss,
        fillcolor="#DDEBF3",
        line_width=0,
        layer="below",
    )
    figure.add_hline(
        y=loss,
        line={"color": plots.GREY, "width": 1, "dash": "dot"},
        annotation_text="the twin, without L1",
        annotation_position="bottom right",
        annotation_font_size=11,
    )
    figure.add_scatter(
        name="by L1",
        mode="lines+markers+text",
        text=[short(row).removeprefix("L1 ") for row in runs],
        textposition=_beside([row["validation_bits_per_byte"] for row in runs]),
        line={"color": plots.BLUE},
        marker={"size": 10},
        cliponaxis=False,
        **_points(runs, rows),
    )
    again = [row for _, row in data.renewed(rows)]
    seeds = [row for row in rows if row["label"].split(", ")[-1].startswith("seed ")]
    rates = [row for row in rows if row["label"].startswith("lr ") and row is not base]
    for name, some, colour, symbol in (
        ("dead rows renewed", again, plots.RED, "diamond-open"),
        ("another seed", seeds, plots.ORANGE, "square-open"),
        ("no L1, another learning rate", rates, plots.GREY, "circle-open"),
    ):
        if some:
            figure.add_scatter(
                name=name,
                mode="markers+text" if some is seeds else "markers",
                # With L1, another seed lies on the point that it repeats; without, far from it.
                text=["" if row["config"]["l1"] or some is not seeds else data.name(row, rows) for row in some],
                textposition="middle left",
                marker={"size": 11, "color": colour, "symbol": symbol, "line": {"width": 2}},
                **_points(some, rows),
            )
    low, high = (pick(row["mean_nnz"] for row in rows) for pick in (min, max))
    losses = [row["validation_bits_per_byte"] for row in rows]
    figure.update_xaxes(
        title_text=f"neurons firing for a token, of {d_ff}, mean over layers (log scale)",
        type="log",
        tickformat="~g",
        dtick="D2",
        range=[math.log10(1.6 * high), math.log10(low / 1.6)],
    )
    reach = max(losses) - min(losses)
    figure.update_yaxes(
        title_text="held-out novels, bits per byte (lower is better)",
        range=[min(losses) - 0.22 * reach, max(losses) + 0.15 * reach],
    )
    figure.add_annotation(
        x=math.log10((1 - zeros) * d_ff),
        y=min(losses) - 0.2 * reach,
        xanchor="left",
        yanchor="bottom",
        showarrow=False,
        text=f" {zeros:.0%} zeros or more,<br> at most {more:.0%} more loss",
        font={"size": 11},
        align="left",
    )
    figure = plots.styled(figure, f"Loss against sparsity<br><sup>{where}</sup>", height=460)
    return figure.update_layout(margin_t=100)


def _beside(heights: list[float]) -> list[str]:
    """Where the names of a line's points keep clear of it: below valleys and the first, above peaks, else to the left
    of where it rises."""
    places = ["bottom center"]
    for before, here, after in zip(heights, heights[1:], [*heights[2:], math.inf], strict=False):
        places.append("bottom center" if here < before else "top center" if here > after else "top left")
    return places


def picked(rows: list[dict], index: int = 0, where: str = "") -> go.Figure:
    """One run of the sweep among all: loss against nnz, nnz during training, and nnz of its layers at the end."""
    runs = pressed(rows)
    figure = make_subplots(
        rows=1,
        cols=3,
        horizontal_spacing=0.1,
        column_widths=[0.32, 0.38, 0.3],
        subplot_titles=["loss against nnz", "nnz, while training", "nnz by layer, at the end"],
    )
    figure.add_scatter(
        mode="lines+markers",
        line={"color": LIGHT, "width": 1},
        showlegend=False,
        row=1,
        col=1,
        **_points(runs, rows),
    )
    for row in runs:
        figure.add_scatter(
            x=row["history"]["step"],
            y=row["history"]["nnz"],
            mode="lines",
            name=short(row),
            showlegend=False,
            hovertemplate="step %{x}: %{y:.3g}",
            row=1,
            col=2,
        )
    layers = [f"{number}" for number in range(len(runs[0]["layers"]))]
    figure.add_bar(
        x=layers,
        y=[0] * len(layers),
        marker_color=plots.BLUE,
        showlegend=False,
        row=1,
        col=3,
        cliponaxis=False,
        textposition="outside",
        textfont={"size": 10},
        hovertemplate="layer %{x}: %{y:.3g}<extra></extra>",
    )
    figure.update_xaxes(LOG, autorange="reversed", title_text="mean nnz (log scale)", row=1, col=1)
    figure.update_yaxes(title_text="bits per byte", row=1, col=1)
    figure.update_xaxes(title_text="step", row=1, col=2)
    figure.update_yaxes(LOG, title_text="mean nnz (log scale)", row=1, col=2)
    figure.update_xaxes(title_text="layer", row=1, col=3)
    figure = plots.styled(figure, "", height=400).update_layout(margin_t=110)
    figure.update_annotations(font_size=12)
    pick(figure, rows, index, where)
    return figure


def pick(figure: go.Figure, rows: list[dict], index: int, where: str = "") -> None:
    """Pick another run in a figure that `picked` made (a FigureWidget of it too)."""
    runs = pressed(rows)
    row = row_at(runs, index)
    points = figure.data[0].marker
    points.color = [plots.BLUE if number == index else LIGHT for number in range(len(runs))]
    points.size = [14 if number == index else 8 for number in range(len(runs))]
    for number in range(len(runs)):
        line = figure.data[1 + number].line
        line.color, line.width = (plots.BLUE, 3) if number == index else (LIGHT, 1)
    bars, nnz = figure.data[1 + len(runs)], [layer["nnz"] for layer in row["layers"]]
    bars.y, bars.text = nnz, [f"{value:.0f}" if value >= 10 else f"{value:.1f}" for value in nnz]
    figure.layout.yaxis3.range = [0, 1.18 * max(*nnz, 1e-3)]
    figure.layout.title.text = (
        f"{short(row)}: {row['mean_nnz']:.3g} of {row['config']['d_ff']} neurons fire ({row['zeros']:.1%} zeros), "
        f"{row['validation_bits_per_byte']:.3f} bits per byte, {cost(row, rows):+.1%} against the twin"
        f"<br><sup>{where}</sup>"
    )


def over_time(rows: list[dict], where: str) -> go.Figure:
    """Every run of the sweep during training: held-out loss on the left, firing neurons on the right."""
    runs = pressed(rows)
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.12)
    for row, colour in zip(runs, [plots.GREY, *sample_colorscale(_SHADES, len(runs) - 1)], strict=True):
        history = row["history"]
        # A small L1 changes little: the line without L1 is drawn first and wide, so that it can be seen behind others.
        line = {"color": colour, "width": 2 if row["config"]["l1"] else 6}
        for col, key, said in ((1, "val_bits_per_byte", "%{y:.3f} bits per byte"), (2, "nnz", "%{y:.3g} neurons")):
            points = [(step, y) for step, y in zip(history["step"], history[key], strict=True) if y is not None]
            figure.add_scatter(
                x=[step for step, _ in points],
                y=[y for _, y in points],
                mode="lines+markers" if col == 1 else "lines",
                name=short(row),
                legendgroup=short(row),
                line=line,
                showlegend=col == 1,
                hovertemplate=f"step %{{x}}: {said}",
                row=1,
                col=col,
            )
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text="held-out novels, bits per byte", row=1, col=1)
    figure.update_yaxes(LOG, title_text=f"neurons firing, of {runs[0]['config']['d_ff']} (log scale)", row=1, col=2)
    figure = plots.styled(figure, f"Loss and firing neurons during training<br><sup>{where}</sup>", height=430)
    return figure.update_layout(legend=BESIDE | {"tracegroupgap": 0})


def where_it_fires(rows: list[dict], index: int = 0, where: str = "") -> go.Figure:
    """One run: firing neurons of each layer by position in a window, and the bytes with the fewest and the most."""
    row = row_at(pressed(rows), index)
    figure = make_subplots(
        rows=1,
        cols=2,
        horizontal_spacing=0.16,
        column_widths=[0.6, 0.4],
        subplot_titles=["by position in the window", "bytes with most and with fewest"],
    )
    seen, ends = row["positions"], data.extremes(row)
    for layer, (nnz, colour) in enumerate(zip(seen["nnz"], sample_colorscale(_SHADES, len(seen["nnz"])), strict=True)):
        figure.add_scatter(
            x=[start + 1 for start in seen["start"]],
            y=[value or None for value in nnz],
            mode="lines+markers",
            marker={"size": 5},
            name=f"layer {layer}",
            line={"color": colour},
            hovertemplate="position %{x}: %{y:.3g}",
            row=1,
            col=1,
        )
    figure.add_bar(
        x=[round(nnz, 2) for _, nnz in ends],
        y=[name for name, _ in ends],
        orientation="h",
        marker_color=plots.BLUE,
        showlegend=False,
        hovertemplate="%{y}: %{x:.3g} neurons<extra></extra>",
        row=1,
        col=2,
    )
    ticks = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    figure.update_xaxes(title_text="position, from 1 (log scale)", type="log", tickvals=ticks, row=1, col=1)
    figure.update_yaxes(LOG, title_text="neurons firing (log scale)", row=1, col=1)
    figure.update_xaxes(title_text="neurons firing, mean over layers", rangemode="tozero", row=1, col=2)
    figure.update_yaxes(tickfont={"size": 10}, row=1, col=2)
    if len(ends) < len(row["bytes"]["value"]):  # others lie between the fewest and the most
        line = {"color": plots.GREY, "width": 1, "dash": "dot"}
        figure.add_hline(y=len(ends) / 2 - 0.5, line=line, row=1, col=2)
    figure = plots.styled(figure, f"{short(row)}: where it fires<br><sup>{where}</sup>", height=460)
    legend = {"orientation": "h", "x": 0, "y": -0.2, "yanchor": "top"}
    return figure.update_layout(margin_t=110, margin_b=90, legend=legend).update_annotations(font_size=12)


def dead_by_layer(rows: list[dict], where: str) -> go.Figure:
    """Dead neurons by layer, with and without re-initialisation: a panel for each L1 that was trained both ways."""
    pairs = data.renewed(rows)
    figure = make_subplots(
        rows=1,
        cols=len(pairs),
        shared_yaxes=True,
        horizontal_spacing=0.05,
        subplot_titles=[short(before) for before, _ in pairs],
    )
    for column, pair in enumerate(pairs, start=1):
        for row, name, colour in zip(
            pair, ("left as they are", "dead rows renewed"), (plots.GREY, plots.BLUE), strict=True
        ):
            share = [100 * layer["dead"] / row["config"]["d_ff"] for layer in row["layers"]]
            figure.add_bar(
                x=[str(number) for number in range(len(share))],
                y=share,
                name=name,
                marker_color=colour,
                showlegend=column == 1,
                hovertemplate="layer %{x}: %{y:.1f}%",
                row=1,
                col=column,
            )
    figure.update_xaxes(title_text="layer")
    figure.update_yaxes(title_text="neurons dead, %", rangemode="tozero", col=1)
    figure = plots.styled(
        figure,
        f"Dead neurons: silent on all of {pairs[0][0]['counted']:,} held-out bytes<br><sup>{where}</sup>",
        height=400,
    ).update_layout(margin_t=120)
    return figure.update_annotations(font_size=12).update_layout(legend={"y": -0.25, "yanchor": "top"}, margin_b=90)


def sentence(content: bytes, nnz: list[float], model: str) -> go.Figure:
    """Neurons firing at each byte of a sentence. model: what to call it."""
    places = list(range(len(content)))
    names = [chr(byte) if 32 < byte < 127 else "\u00b7" if byte == 32 else data.byte_name(byte) for byte in content]
    hover = "%{customdata}: %{y:.1f}<extra></extra>"
    figure = go.Figure(go.Bar(x=places, y=nnz, marker_color=plots.BLUE, customdata=names, hovertemplate=hover))
    font = {"family": "monospace", "size": 11}
    figure.update_xaxes(tickmode="array", tickvals=places, ticktext=names, tickangle=0, tickfont=font)
    figure.update_yaxes(title_text="neurons firing, mean over layers", rangemode="tozero")
    return plots.styled(figure, f"Neurons firing at each byte: {model}", height=330)


def _points(some: list[dict], rows: list[dict]) -> dict:
    """Where runs lie in a figure of loss over nnz, and what is said while the pointer is over them."""
    spread = seed_spread(rows)
    beside = "" if spread is None else f" (another seed: {spread:.1%})"
    return {
        "x": [max(row["mean_nnz"], 1e-2) for row in some],
        "y": [row["validation_bits_per_byte"] for row in some],
        "customdata": [[data.name(row, rows), row["zeros"], cost(row, rows)] for row in some],
        "hovertemplate": "%{customdata[0]}: %{x:.3g} fire, %{customdata[1]:.2%} zeros, %{y:.4f} bits per byte, "
        "%{customdata[2]:+.2%} against the twin" + beside + "<extra></extra>",
    }
