"""Plots of notebook 09, each a function of rows and numbers; in the style of `plots`. (Its drawings are in `drawings`.)

What comes from a record says "recorded on <device>, <day>", the reader's own points "yours, now". A figure without data
says so instead of failing: a checkout may have no record yet.
"""

from __future__ import annotations

import math

import plotly.graph_objects as go

from ... import plots
from ..drawing import nothing
from .data import FEW, FUSED, PLANNED, TORCH, TWELL, by_nnz, estimate

PATHS = {PLANNED: plots.BLUE, "planned compiled": plots.SKY, TWELL: plots.RED, TORCH: plots.INK, FUSED: plots.GREY}
NAMES = {
    PLANNED: "planned",
    "planned compiled": "planned, compiled",
    TWELL: "TwELL",
    "forced hot_cold": "hot/cold",
    TORCH: "torch's dense layer",
    FUSED: "fused dense layer",
}


def parts(found: list[dict], own: list[dict] = ()) -> go.Figure:
    """Milliseconds of torch's dense layer, of the fused one and of the planned one, by mean nnz, with each step's
    factor. found: `data.parts` of the record; own: of `data.yours`, drawn as circles."""
    title = "16,384 tokens: what the fused dense layer gives, and what sparsity adds"
    if not found:
        return nothing(title)
    mine = NAMES if all(row["fuses"] for row in own) else NAMES | {FUSED: "dense layer, which this GPU does not fuse"}
    figure, names = go.Figure(), [f"{row['nnz']:.0f}" for row in found]
    for key, path, gives, text in (
        ("torch_ms", TORCH, "", lambda row: ""),
        ("fused_ms", FUSED, ", and what fusing gives", lambda row: f"{row['fused']:.2f}x"),
        ("planned_ms", PLANNED, ", and what sparsity adds", lambda row: f"{row['sparsity']:.2f}x"),
    ):
        figure.add_bar(
            x=names,
            y=[row[key] for row in found],
            name=NAMES[path] + gives,
            marker_color=PATHS[path],
            offsetgroup=key,
            text=[text(row) for row in found],
            textposition="outside",
            constraintext="none",
            cliponaxis=False,
            customdata=[row["choice"] if path == PLANNED else "" for row in found],
            hovertemplate="nnz %{x}: %{y:.3g} ms %{customdata}",
        )
        if own:
            figure.add_scatter(
                x=[min(names, key=lambda name: abs(float(name) - row["nnz"])) for row in own],
                y=[row[key] for row in own],
                mode="markers",
                name=f"{mine[path]}: yours, now",
                offsetgroup=key,
                marker={"size": 11, "color": PATHS[path], "line": {"color": "white", "width": 1.5}},
                hovertemplate="%{y:.3g} ms",
            )
    figure.update_layout(barmode="group", scattermode="group")
    figure.update_xaxes(title_text="neurons that fire for a token, mean (of 5,632)", type="category")
    figure.update_yaxes(title_text="ms", rangemode="tozero")
    return _from(figure, title, [*found, *own], 420)


def against_nnz(rows: list[dict], tokens: int = 16384) -> go.Figure:
    """Recorded milliseconds over the mean nnz, with the floor of the dense layer and the estimate of TwELL as lines.

    rows: `data.recorded`."""
    title = f"{tokens:,} tokens: a layer's time, by neurons that fire"
    found = by_nnz(rows, tokens)
    if not found:
        return nothing(title)
    ends = [nnz for points in found.values() for nnz, _ in points]
    span = [min(ends) * (max(ends) / min(ends)) ** (i / 60) for i in range(61)]
    figure = go.Figure()
    for colour, name, which in ((plots.GREY, "floor of a dense layer", 0), (plots.RED, "estimate for TwELL", 1)):
        figure.add_scatter(
            x=span,
            y=[estimate(nnz, tokens)[which] for nnz in span],
            mode="lines",
            name=name,
            line={"color": colour, "dash": "dot"},
            hovertemplate="nnz %{x:.0f}: %{y:.3g} ms",
        )
    symbols = {TORCH: "square", FUSED: "diamond", TWELL: "circle", PLANNED: "star"}
    for path, points in found.items():
        figure.add_scatter(
            x=[nnz for nnz, _ in points],
            y=[ms for _, ms in points],
            mode="lines+markers",
            name=NAMES[path],
            line={"color": PATHS[path], "width": 1},
            marker={"symbol": symbols[path], "size": 10, "color": PATHS[path]},
            hovertemplate="nnz %{x:.0f}: %{y:.3g} ms",
        )
    ticks = [nnz for nnz, _ in found.get(TWELL, found[next(iter(found))])]
    figure.update_xaxes(
        title_text="neurons that fire for a token, mean, of 5,632 (log scale)",
        type="log",
        tickvals=ticks,
        ticktext=[f"{tick:.0f}" for tick in ticks],
    )
    most = max(ms for points in found.values() for _, ms in points)
    figure.update_yaxes(title_text="ms", range=[0, 1.25 * most])
    return _from(figure, title, rows, 420)


def loss_map(cells: list[dict]) -> go.Figure:
    """Times as fast as dense for each path, nnz and number of tokens: blue is faster, orange slower.

    cells: `data.cells`. A column is a workload; columns are grouped by the number of tokens at once.
    """
    title = "Times as fast as torch's dense layer, by the GPU's clock: blue wins, orange loses"
    cells = [cell for cell in cells if cell["path"] in NAMES]
    if not cells:
        return nothing(title)
    tokens = sorted({cell["tokens"] for cell in cells})
    order = [path for path in reversed(NAMES) if any(cell["path"] == path for cell in cells)]
    figure = go.Figure()
    places, labels, first = [], [], 0.0  # of the columns, from left to right, with a gap after each number of tokens
    for count in tokens:
        here = [cell for cell in cells if cell["tokens"] == count]
        columns = _columns(here)
        z, text, hover = ([[empty] * len(columns) for _ in order] for empty in (None, "", ""))
        for cell in here:
            line, place = (
                order.index(cell["path"]),
                next(i for i, (low, high) in enumerate(columns) if low <= cell["nnz"] <= high),
            )
            z[line][place], text[line][place] = max(-1.0, min(1.0, math.log2(cell["x"]))), f"{cell['x']:.2f}"
            hover[line][place] = f"{NAMES[cell['path']]}, nnz {cell['nnz']:.0f}: {cell['x']:.2f}x" + (
                f", takes {cell['choice']}" if cell["choice"] else ""
            )
        figure.add_heatmap(
            z=z,
            text=text,
            customdata=hover,
            texttemplate="%{text}",
            textfont={"size": 10, "color": plots.INK},
            xgap=2,
            ygap=2,
            showscale=False,
            x0=first,
            dx=1,
            y=[NAMES[path] for path in order],
            zmin=-1,
            zmax=1,
            colorscale=[[0, "#EE9A66"], [0.45, "#F9E2D2"], [0.5, "#FFFFFF"], [0.55, "#D5E6F2"], [1, "#5FA8D3"]],
            hovertemplate="%{customdata}<extra></extra>",
            hoverongaps=False,
        )
        middle = first + (len(columns) - 1) / 2
        figure.add_annotation(x=middle, y=1, yref="paper", yanchor="bottom", text=f"{count:,}", showarrow=False)
        places += [first + i for i in range(len(columns))]
        labels += [f"{(low + high) / 2:.0f}" for low, high in columns]
        first += len(columns) + 0.4
    figure.add_annotation(
        x=0,
        xref="paper",
        xanchor="right",
        xshift=-6,
        y=1,
        yref="paper",
        yanchor="bottom",
        text="tokens",
        showarrow=False,
    )
    figure.update_xaxes(
        title_text="neurons that fire for a token, mean (of 5,632)",
        tickvals=places,
        ticktext=labels,
        showgrid=False,
        zeroline=False,
        range=[-0.7, first - 0.7],
    )
    figure.update_yaxes(showgrid=False, type="category")
    also = f"up to {FEW} tokens replayed from a CUDA graph; the README counts plain calls"
    figure = _from(figure, title, cells, 200 + 32 * len(order), also)
    figure.update_layout(margin_l=120)
    return figure.update_annotations(font_size=11)


def _columns(cells: list[dict]) -> list[tuple[float, float]]:
    """The (lowest, highest) nnz of each workload of these cells: a drawn one only comes near the mean asked for."""
    groups: list[list[float]] = []
    for nnz in sorted(cell["nnz"] for cell in cells):
        if groups and nnz <= 1.15 * groups[-1][0]:
            groups[-1].append(nnz)
        else:
            groups.append([nnz])
    return [(group[0], group[-1]) for group in groups]


def host_share(rows: list[dict]) -> go.Figure:
    """The share of a plain call's wall time that passes before the call returns, over the tokens: torch's dense layer
    and TwELL, without gradients. rows: `calls.recorded`."""
    title = "How much of a plain call is the host's: what passes before the call returns"
    if not rows:
        return nothing(title)
    figure = go.Figure()
    for path, name, colour, symbol in (
        ("dense eager", NAMES[TORCH], plots.INK, "square"),
        ("twell", NAMES[TWELL], plots.RED, "circle"),
    ):
        here = sorted((row for row in rows if row["path"] == path), key=lambda row: row["tokens"])
        figure.add_scatter(
            x=[row["tokens"] for row in here],
            y=[100 * row["ms"] / row["wall_ms"] for row in here],
            mode="lines+markers",
            name=name,
            line={"color": colour},
            marker={"symbol": symbol, "size": 9},
            customdata=[[1e3 * row["ms"], 1e3 * row["wall_ms"]] for row in here],
            hovertemplate="%{x:,} tokens: returns after %{customdata[0]:.3g} us, result after %{customdata[1]:.4g} us",
        )
    counts = sorted({row["tokens"] for row in rows})
    ticks = {"tickvals": counts, "ticktext": [f"{count:,}" for count in counts]}
    figure.update_xaxes(title_text="tokens (log scale)", type="log", **ticks)
    figure.update_yaxes(title_text="% of the wall time", range=[0, 104])
    return _from(figure, title, rows, 330)


def _from(figure: go.Figure, title: str, rows: list[dict], height: int, *also: str) -> go.Figure:
    """The usual style, with lines below the title: each different `where` of the rows, and `also`. The legend is below
    the plot, where it covers neither. height: with one such line."""
    told = [*dict.fromkeys(row["where"] for row in rows), *also]
    more = 16 * (len(told) - 1)
    full = height + 40 + more
    figure = plots.styled(figure, f"{title}<br><sub>{'<br>'.join(told)}</sub>", height=full)
    return figure.update_layout(
        margin={"t": 85 + more, "b": 100},
        title={"y": 1 - 34 / full, "yanchor": "middle"},
        legend={"y": -75 / (height - 145), "yanchor": "top"},
    )
