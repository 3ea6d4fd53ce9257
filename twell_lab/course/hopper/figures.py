"""Figures of notebook 09, each a function of rows and numbers; in the style of `plots`.

What comes from a record says "recorded on <device>, <day>", the reader's own points "yours, now". A figure without data
says so instead of failing: a checkout may have no record yet.
"""

from __future__ import annotations

import math

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ... import plots
from ..drawing import nothing
from ..recorded import sources
from . import calls

PATHS = {
    "planned": plots.BLUE,
    "planned compiled": plots.SKY,
    "forced twell": plots.RED,
    "forced hot_cold": plots.ORANGE,
    "forced dense": plots.GREY,
    "forced portable": plots.GREEN,
    "forced mma.sync": plots.PURPLE,
}
CALLS = {"dense eager": "torch's dense layer", "dense": "dense, our kernels", "twell": "TwELL"}  # of "host-time" rows
NAMES = {
    "planned": "planned",
    "planned compiled": "planned, compiled",
    "forced twell": "TwELL, forced",
    "forced hot_cold": "hot/cold, forced",
    "forced dense": "dense, forced",
    "forced portable": "TwELL, portable",
    "forced mma.sync": "TwELL, mma.sync",
}


def speedups(cells: list[dict], own: list[dict], tokens: int) -> go.Figure:
    """Times as fast as dense over the mean nnz, for one number of tokens: planned, planned compiled, TwELL forced.

    cells: `data.cells` of the record; own: the same of `data.yours`, drawn as large circles.
    """
    cells = [cell for cell in cells if cell["tokens"] == tokens]
    own = [cell for cell in own if cell["tokens"] == tokens]
    title = f"{tokens:,} tokens: times as fast as the dense layer"
    if not cells and not own:
        return nothing(title)
    figure = go.Figure()
    for path in ("planned", "planned compiled", "forced twell", "forced portable", "forced mma.sync"):
        here = sorted((cell for cell in cells if cell["path"] == path), key=lambda cell: cell["nnz"])
        if here:
            figure.add_scatter(
                x=[cell["nnz"] for cell in here],
                y=[cell["x"] for cell in here],
                mode="lines+markers",
                line={"color": PATHS[path], "dash": "dot"},
                marker={"symbol": "diamond-open", "size": 9},
                name=f"{NAMES[path]}, {here[0]['where']}",
                customdata=[[cell["choice"] or "", cell["ms"]] for cell in here],
                hovertemplate="nnz %{x:.0f}: %{y:.2f}x, %{customdata[1]:.3g} ms %{customdata[0]}",
            )
    for path in ("planned", "forced twell"):
        here = [cell for cell in own if cell["path"] == path]
        if here:
            figure.add_scatter(
                x=[cell["nnz"] for cell in here],
                y=[cell["x"] for cell in here],
                mode="markers",
                marker={"symbol": "circle", "size": 13, "color": PATHS[path]},
                name=f"{NAMES[path]}, {here[0]['where']}",
                hovertemplate="nnz %{x:.0f}: %{y:.2f}x",
            )
    _line_at_one(figure, "the dense layer")
    _nnz_axis(figure, [*cells, *own])
    figure.update_yaxes(title_text="times as fast", rangemode="tozero")
    return _legend_below(plots.styled(figure, title, height=430))


def predicted_against_measured(points: list[dict]) -> go.Figure:
    """The planner's candidates: measured over predicted ms, the chosen ones filled. points: `data.plan_points`."""
    title = "The planner's predictions, and what its own trials measured"
    if not points:
        return nothing(title)
    figure = go.Figure()
    paths = {"dense": plots.GREY, "twell": plots.RED, "hot_cold": plots.ORANGE}
    for path, colour in paths.items():
        for chosen in (True, False):
            here = [p for p in points if p["path"].split()[1] == path and bool(p["chosen"]) is chosen]
            if here:
                figure.add_scatter(
                    x=[p["predicted_ms"] for p in here],
                    y=[p["ms"] for p in here],
                    mode="markers",
                    name=f"{path}{', chosen' * chosen}",
                    marker={
                        "color": colour,
                        "size": 9,
                        "symbol": "circle" if chosen else "circle-open",
                        "line": {"width": 1.5, "color": colour},
                    },
                    customdata=[
                        [
                            p["path"].removeprefix("plan: "),
                            f"{p['tokens']:,} tokens, nnz {p['nnz']:.0f}, {p['d_model']} x {p['d_ff']}",
                        ]
                        for p in here
                    ],
                    hovertemplate="%{customdata[0]} (%{customdata[1]}): predicted %{x:.3g} ms, measured %{y:.3g} "
                    "ms<extra></extra>",
                )
    values = [p[key] for p in points for key in ("predicted_ms", "ms")]
    ends = [min(values) / 1.4, max(values) * 1.4]
    figure.add_scatter(
        x=ends, y=ends, mode="lines", line={"color": plots.INK, "width": 1}, showlegend=False, hoverinfo="skip"
    )
    span, ticks = [math.log10(v) for v in ends], _decades(*ends)
    figure.update_xaxes(
        title_text="predicted ms", type="log", range=span, tickvals=ticks, ticktext=[f"{t:g}" for t in ticks]
    )
    figure.update_yaxes(
        title_text="measured ms", type="log", range=span, tickvals=ticks, ticktext=[f"{t:g}" for t in ticks]
    )
    return _from(figure, title, sources(points), 480)


def loss_map(cells: list[dict]) -> go.Figure:
    """Times as fast as dense for each path, nnz and number of tokens: blue is faster, red slower. cells: `data.cells`.

    A column is a workload; columns are grouped by the number of tokens at once.
    """
    title = "Where sparsity wins and where it loses: times as fast as dense"
    cells = [cell for cell in cells if cell["path"] in PATHS]
    if not cells:
        return nothing(title)
    tokens = sorted({cell["tokens"] for cell in cells})
    order = [path for path in reversed(PATHS) if any(cell["path"] == path for cell in cells)]
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
            textfont={"size": 10},
            xgap=2,
            ygap=2,
            showscale=False,
            x0=first,
            dx=1,
            y=[NAMES[path] for path in order],
            zmin=-1,
            zmax=1,
            colorscale=[[0, "#C8452B"], [0.45, "#F6D9D0"], [0.5, "#FFFFFF"], [0.55, "#D5E6F2"], [1, "#2F7FB8"]],
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
        title_text="mean nnz",
        tickvals=places,
        ticktext=labels,
        showgrid=False,
        zeroline=False,
        range=[-0.7, first - 0.7],
    )
    figure.update_yaxes(showgrid=False, type="category")
    figure = _from(figure, title, sources(cells), 190 + 30 * len(order))
    figure.update_annotations(font_size=11)
    return figure


def _columns(cells: list[dict]) -> list[tuple[float, float]]:
    """The (lowest, highest) nnz of each workload of these cells: a drawn one only comes near the mean asked for."""
    groups: list[list[float]] = []
    for nnz in sorted(cell["nnz"] for cell in cells):
        if groups and nnz <= 1.15 * groups[-1][0]:
            groups[-1].append(nnz)
        else:
            groups.append([nnz])
    return [(group[0], group[-1]) for group in groups]


def trained_layers(found: list[dict]) -> go.Figure:
    """Layers of trained models at their own firing: times as fast as dense on each path. found: `data.trained`."""
    title = "Layers of trained models: times as fast as dense"
    if not found:
        return nothing(title)
    figure = go.Figure()
    for path, colour in PATHS.items():
        here = [cell for cell in found if cell["path"] == path]
        if here:
            names = [
                [f"L1 {cell['l1']:g}" for cell in here],
                [f"layer {cell['layer']}<br>nnz {cell['nnz']:.0f}" for cell in here],
            ]
            figure.add_bar(
                x=names,
                y=[cell["x"] for cell in here],
                marker_color=colour,
                name=NAMES[path],
                customdata=[cell["choice"] or "" for cell in here],
                hovertemplate="%{y:.2f}x %{customdata}",
            )
    figure.add_hline(y=1, line={"color": plots.INK, "width": 1})
    figure.update_yaxes(title_text="times as fast as dense", rangemode="tozero")
    return _from(figure, title, sources(found), 440)


def decode(found: list[dict], where: str) -> go.Figure:
    """Microseconds for few tokens, dense and sparse, with the least time for reading the weights. found: `data.decode`.

    where: where they were recorded."""
    title = "Few tokens: microseconds a layer, weights from memory"
    if not found:
        return nothing(title)
    names = [f"{row['tokens']} token{'s' * (row['tokens'] > 1)}" for row in found]
    figure = go.Figure()
    for key, floor, name, colour in (
        ("dense", "dense_floor", "dense", plots.GREY),
        ("planned", "floor", "sparse", plots.BLUE),
    ):
        figure.add_bar(
            x=names,
            y=[row[key] for row in found],
            name=name,
            marker_color=colour,
            offsetgroup=key,
            opacity=0.45,
            text=[f"{row[key]:.1f}" for row in found],
            textposition="outside",
            hovertemplate="%{y:.1f} us",
        )
        figure.add_bar(
            x=names,
            y=[row[floor] for row in found],
            name=f"{name}: memory alone",
            marker_color=colour,
            offsetgroup=key,
            text=[f"{row[floor]:.1f}" for row in found],
            textposition="inside",
            hovertemplate="%{y:.1f} us at least",
        )
    figure.update_yaxes(title_text="us", rangemode="tozero")
    return _from(figure, title, where, 420)


def host_and_wall(rows: list[dict], own: list[dict]) -> go.Figure:
    """Milliseconds until a plain call returns and until its result is there, over the tokens: a panel for each path,
    forward above, forward and backward below. The wait between the two is a vertical line. Each panel also has the
    dense layer's result, and a dashed line where the wait becomes longer than the call.

    rows: `calls.recorded`, drawn as diamonds; own: `calls.yours`, drawn as circles.
    """
    title = "A plain call: when it returns, and when its result is there"
    found = calls.lines([*rows, *own])
    if not found:
        return nothing(title)
    workloads, paths = ([*dict.fromkeys(key[i] for key in found)] for i in (0, 1))
    panels = [CALLS.get(path, path.replace("_", "/")) for path in paths]
    figure = make_subplots(
        rows=len(workloads),
        cols=len(paths),
        shared_yaxes=True,
        horizontal_spacing=0.025,
        vertical_spacing=0.1,
        column_titles=panels,
    )
    named: set[str] = set()

    def draw(part: list[dict], key: str, name: str, at: dict, colour: str, symbol: str, **looks) -> None:
        figure.add_scatter(
            x=[row["tokens"] for row in part],
            y=[float(f"{row[key]:.4g}") for row in part],
            mode="markers",
            name=name,
            legendgroup=name,
            showlegend=name not in named,
            hovertemplate="%{x:,} tokens: %{y:.3g} ms",
            marker={"symbol": symbol, "size": 9, "color": colour, "line": {"color": colour, "width": 1.5}},
            **looks,
            **at,
        )
        named.add(name)

    for (workload, path), part in found.items():
        at = {"row": 1 + workloads.index(workload), "col": 1 + paths.index(path)}
        for mine, whose, symbol in ((rows, "recorded", "diamond-open"), (own, "yours, now", "circle")):
            here = calls.lines(mine).get((workload, path), [])
            if not here:
                continue
            if path != calls.DENSE and mine is rows:
                name = f"the result of {CALLS[calls.DENSE]} is there, {whose}"
                draw(here, "dense_wall_ms", name, at, plots.GREY, "line-ew")
            waits = [float(f"{row['wall_ms'] - row['ms']:.4g}") for row in here]
            wait = {"array": [0] * len(here), "arrayminus": waits}
            looks = {"error_y": wait | {"color": plots.BLUE, "thickness": 1.5, "width": 0}}
            draw(here, "wall_ms", f"the result is there, {whose}", at, plots.BLUE, symbol, **looks)
            draw(here, "ms", f"the call returns, {whose}", at, plots.ORANGE, symbol)
        if tokens := calls.crossing([row for row in part if row["where"] == part[0]["where"]]):
            figure.add_vline(x=tokens, line={"color": plots.INK, "width": 1, "dash": "dash"}, **at)
    counts = sorted({row["tokens"] for row in [*rows, *own]})
    figure.update_xaxes(
        type="log",
        range=[math.log10(counts[0] / 2), math.log10(counts[-1] * 2)],
        tickvals=counts,
        ticktext=[f"{count:,}" for count in counts],
        tickfont_size=9,
        tickangle=0,
    )
    figure.update_xaxes(title={"text": "tokens", "font": {"size": 11}, "standoff": 4}, row=len(workloads))
    values = [row[key] for row in [*rows, *own] for key in ("ms", "wall_ms")]
    ticks = _decades(min(values) / 1.3, max(values) * 1.3)
    figure.update_yaxes(type="log", tickvals=ticks, ticktext=[f"{tick:g}" for tick in ticks])
    for i, workload in enumerate(workloads, 1):
        figure.update_yaxes(title={"text": f"{workload}, ms", "font": {"size": 12}}, row=i, col=1)
    figure = _from(figure, title, sources([*rows, *own]), 80 + 220 * len(workloads))
    figure.update_annotations(font_size=12)
    return _legend_below(figure).update_layout(legend_y=-0.16)


# ---- parts ----


def _from(figure: go.Figure, title: str, where: str, height: int) -> go.Figure:
    """The usual style with a second line below the title that says where the numbers are from."""
    figure = plots.styled(figure, f"{title}<br><sub>{where}</sub>", height=height + 20)
    return figure.update_layout(margin_t=110, title_y=1 - 34 / (height + 20), title_yanchor="middle")


def _line_at_one(figure: go.Figure, text: str) -> None:
    figure.add_hline(y=1, line={"color": plots.INK, "width": 1})
    figure.add_annotation(
        x=1, xref="paper", y=1, xanchor="right", yanchor="bottom", showarrow=False, text=text, font={"size": 11}
    )


def _nnz_axis(figure: go.Figure, cells: list[dict]) -> None:
    ticks = [low for low, _ in _columns(cells)]
    figure.update_xaxes(
        title_text="neurons that fire for a token, mean (of 5,632)",
        type="log",
        tickvals=ticks,
        ticktext=[f"{tick:.0f}" for tick in ticks],
    )


def _legend_below(figure: go.Figure) -> go.Figure:
    lines = len([trace for trace in figure.data if trace.showlegend is not False])
    return figure.update_layout(
        legend={"orientation": "v", "yanchor": "top", "y": -0.2, "x": 0},
        margin_b=70 + 20 * lines,
        height=figure.layout.height + 20 * lines,
    )


def _decades(low: float, high: float) -> list[float]:
    return [
        m * 10.0**e
        for e in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for m in (1, 3)
        if low <= m * 10.0**e <= high
    ]
