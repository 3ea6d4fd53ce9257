"""Figures of the notebook on other sparsities, each a function of rows and numbers; in the style of `plots`."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ... import plots
from ..drawing import nothing, squares
from ..recorded import sources
from .data import BLOCK_SIZES, FORMATS, products

_TICKS = (0.5, 0.25, 0.1, 0.05, 0.01, 0.001)  # densities
SILENT, KEPT = "#F2F2F2", plots.BLUE
IN_THE_WAY = ["fours", *(f"blocks {size}" for size in BLOCK_SIZES), "error"]
_MARKS = ("circle", "square", "diamond", "cross", "x", "triangle-up", "star", "hexagon", "triangle-down", "pentagon")


def patterns(masks: dict) -> go.Figure:
    """Where a matrix is not zero, pattern by pattern. masks: bool [rows, columns] by the pattern's name."""
    figure = make_subplots(rows=1, cols=len(masks), horizontal_spacing=0.02, subplot_titles=[*masks])
    for column, mask in enumerate(masks.values(), start=1):
        squares(figure, mask.int().tolist(), (SILENT, KEPT), row=1, col=column, hoverinfo="skip")
    figure.update_xaxes(showticklabels=False, showgrid=False, constrain="domain")
    figure.update_yaxes(showticklabels=False, showgrid=False, autorange="reversed", scaleanchor="x")
    figure = plots.styled(figure, "Blue: a value. Grey: a zero", height=270)
    return figure.update_annotations(font_size=12)


def _colours(paths: Iterable[str]) -> dict[str, str]:
    """A colour for each method, always the same among these."""
    return {path: plots.COLOURS[i % len(plots.COLOURS)] for i, path in enumerate(dict.fromkeys(paths))}


def beside_dense(rows: list[dict]) -> go.Figure:
    """Times as fast as dense, by pattern, a bar for each method. rows: of one share of zeros, as `timed_here` gives."""
    timed = products(rows)
    if not timed:
        return nothing("Products of matrices with zeros")
    figure = go.Figure()
    for path, colour in _colours(row["path"] for row in timed).items():
        mine = [row for row in timed if row["path"] == path]
        figure.add_bar(
            x=[row["pattern"] for row in mine],
            y=[row["x_dense"] for row in mine],
            text=[f"{row['x_dense']:.2g}" for row in mine],
            textposition="outside",
            constraintext="none",
            textfont_size=10,
            cliponaxis=False,
            name=path,
            marker_color=colour,
            hovertemplate="%{x}, " + path + ": %{y:.2f} times as fast as dense<extra></extra>",
        )
    figure.add_hline(y=1, line={"color": plots.INK, "width": 1, "dash": "dot"}, layer="below")
    figure.update_yaxes(rangemode="tozero", title_text="times as fast as dense")
    best = max(row["x_dense"] for row in timed)
    pairs = {(row["path"], row["pattern"]) for row in timed}
    every = len({path for path, _ in pairs}) * len({pattern for _, pattern in pairs})
    said = sources(timed) + "; no bar: not timed" * (len(pairs) < every)
    title = f"{1 - timed[0]['density']:.0%} zeros: at most {best:.2g} times as fast<br><sup>{said}</sup>"
    figure = plots.styled(figure, title, height=420)
    return figure.update_layout(barmode="group", margin={"t": 70, "b": 80}, legend={"y": -0.12, "yanchor": "top"})


def loss_by_sparsity(rows: list[dict]) -> go.Figure:
    """Return how much more a model's loss is, in percent, over the share of weights that became zero, a line for each
    way."""
    figure = go.Figure()
    for i, method in enumerate(dict.fromkeys(row["method"] for row in rows)):
        mine = [row for row in rows if row["method"] == method]
        figure.add_scatter(
            x=[100 * row["sparsity"] for row in mine],
            y=[100 * row["more"] for row in mine],
            mode="lines+markers",
            name=method,
            line={"color": plots.COLOURS[i % len(plots.COLOURS)]},
            marker={"size": 13 if len(mine) == 1 else 8, "symbol": _MARKS[i % len(_MARKS)]},
            hovertemplate=method + ", %{x:.0f}% zeros: %{y:+.1f}% loss<extra></extra>",
        )
    figure.update_xaxes(title_text="weights of the feed-forward layers that became zero, %")
    figure.update_yaxes(title_text="more loss, %", rangemode="tozero")
    return plots.styled(figure, "Pruned once, not trained again", height=420)


def after_training(rows: list[dict]) -> go.Figure:
    """Return how many bits a byte more than the dense model a pruned one needs, before it is trained on and after, each
    seed a line. rows: what `data.retrained` returned."""
    if not rows:
        return nothing("Pruned, and trained on")
    figure, most = go.Figure(), max(max(row["before"], row["after"]) for row in rows)
    zeros = {path: [row["sparsity"] for row in rows if row["path"] == path] for path in {row["path"] for row in rows}}
    called = {path: path if "%" in path else f"{path}, {sum(each) / len(each):.0%}" for path, each in zeros.items()}
    for row in rows:
        figure.add_scatter(
            x=[row["before"], row["after"]],
            y=[called[row["path"]]] * 2,
            mode="lines+markers",
            line={"color": plots.GREY, "width": 1},
            marker={"size": 10, "symbol": ["circle-open", "circle"], "color": plots.BLUE},
            showlegend=False,
            hovertemplate=f"{row['path']}, {row['sparsity']:.0%} zeros, seed {row['seed']}: %{{x:+.3f}}<extra></extra>",
        )
    figure.update_xaxes(
        title_text="bits a byte more than dense; open: pruned, filled: and trained on",
        range=[-0.03 * most, 1.06 * most],
    )
    figure.update_yaxes(autorange="reversed")
    title = f"Pruned, and trained on for {rows[0]['steps']} steps<br><sup>{sources(rows)}</sup>"
    figure = plots.styled(figure, title, height=120 + 32 * len({row["path"] for row in rows}))
    return figure.update_layout(margin_l=190)


def by_zeros(rows: list[dict], paths: Iterable[str] | None = None) -> go.Figure:
    """Times as fast as dense over the share of zeros, a panel for each pattern, a line for each method: the map.
    2:4, which has one share of zeros, is left out.

    paths: the methods that are drawn; None: those that are faster than dense anywhere."""
    timed = [row for row in products(rows) if row["pattern"] != "2:4"]
    drawn = {row["path"] for row in timed if row["x_dense"] > 1} if paths is None else set(paths)
    timed = [row for row in timed if row["path"] in drawn]
    shown = list(dict.fromkeys(row["pattern"] for row in timed))
    if not shown:
        return nothing("Which method wins, by pattern and share of zeros")
    down = -(-len(shown) // 2)
    panels = [[{} if 2 * row + col < len(shown) else None for col in range(2)] for row in range(down)]
    figure = make_subplots(
        rows=down, cols=2, specs=panels, subplot_titles=shown, shared_yaxes="all", vertical_spacing=0.34 / down
    )
    for i, (path, colour) in enumerate(_colours(row["path"] for row in timed).items()):
        named = False
        for at, pattern in enumerate(shown):
            mine = [row for row in timed if (row["path"], row["pattern"]) == (path, pattern)]
            if not mine:
                continue
            mine.sort(key=lambda row: row["density"])
            figure.add_scatter(
                x=[row["density"] for row in mine],
                y=[row["x_dense"] for row in mine],
                customdata=[1 - row["density"] for row in mine],
                mode="lines+markers",
                name=path,
                legendgroup=path,
                showlegend=not named,
                # Of two lines on each other both are seen: the second one has gaps, and smaller marks.
                line={"color": colour, "dash": "dot" if i >= len(plots.COLOURS) else "dash" if i % 2 else "solid"},
                marker={"size": 7 if i % 2 else 11, "symbol": _MARKS[i % len(_MARKS)]},
                hovertemplate=path + ", %{customdata:.1%} zeros: %{y:.2f} times as fast<extra></extra>",
                row=1 + at // 2,
                col=1 + at % 2,
            )
            named = True
    figure.update_xaxes(type="log", autorange="reversed", tickvals=_TICKS, tickangle=0)
    figure.update_xaxes(ticktext=[f"{100 * (1 - each):g}%" for each in _TICKS])
    figure.update_xaxes(title_text="zeros (log scale of the rest)", title_font_size=12, title_standoff=6)
    figure.update_yaxes(type="log", dtick=1)
    figure.update_yaxes(title_text="times as fast as dense<br>(log scale)", title_font_size=12, col=1)
    figure.add_hline(y=1, line={"color": plots.INK, "width": 1, "dash": "dot"})
    title = f"Which method wins, by pattern and share of zeros<br><sup>{sources(timed)}</sup>"
    figure = plots.styled(figure, title, height=130 + 270 * down).update_annotations(font_size=12)
    return figure.update_layout(margin={"t": 90, "b": 110}, legend={"y": -0.2 / down - 0.06, "yanchor": "top"})


def picture(view: dict) -> go.Figure:
    """Return what is left of a weight above a threshold: a corner of it, density by row, what breaks 2:4 and blocks and
    the error of the product, bytes and time by format. view: what `data.view` returned."""
    figure = make_subplots(
        rows=2,
        cols=3,
        specs=[[{"rowspan": 2}, {}, {}], [None, {}, {}]],
        column_widths=[0.3, 0.35, 0.35],
        horizontal_spacing=0.07,
        vertical_spacing=0.28,
        subplot_titles=[
            "a corner of it",
            "kept in a row, %",
            "fours with 3 or 4, filled blocks, error, %",
            "bytes, % of dense",
            "ms of the product here",
        ],
    )
    squares(figure, [[0]], (SILENT, KEPT), row=1, col=1, hoverinfo="skip")
    places = [*range(len(view["by_row"]))]
    line = {"x": places, "mode": "lines", "line": {"color": plots.BLUE}, "hoverinfo": "skip"}
    figure.add_scatter(**line, showlegend=False, row=1, col=2)
    for names, colour, row, col in (
        (IN_THE_WAY, plots.RED, 1, 3),
        (FORMATS, plots.SKY, 2, 2),
        (FORMATS, plots.ORANGE, 2, 3),
    ):
        hover = "%{x}: %{text}<extra></extra>"
        looks = {"marker_color": colour, "textposition": "none", "showlegend": False, "hovertemplate": hover}
        figure.add_bar(x=names, **looks, row=row, col=col)
        # The numbers stand with the names: the browser would measure each text on a bar anew, at each move.
        figure.update_xaxes(tickvals=[*range(len(names))], tickangle=0, automargin=False, row=row, col=col)
    figure.update_xaxes(title_text="rows, fullest first", title_font_size=12, title_standoff=4, row=1, col=2)
    for col in (2, 3):
        figure.update_yaxes(range=[0, 105], row=1, col=col)
    figure.update_xaxes(visible=False, constrain="domain", row=1, col=1)
    square = {"autorange": "reversed", "scaleanchor": "x", "constrain": "domain", "constraintoward": "top"}
    figure.update_yaxes(visible=False, **square, row=1, col=1)
    figure.update_yaxes(range=[0, 305], row=2, col=2)
    figure.update_yaxes(rangemode="tozero", row=2, col=3)
    figure = plots.styled(figure, "", height=560)
    figure.update_layout(margin={"t": 110, "b": 70})
    figure.update_annotations(font_size=12)
    move(figure, view)
    return figure


def move(figure: go.Figure, view: dict) -> None:
    """Show another view of the same weight in a figure that `picture` made (a FigureWidget of it too). "no": the format
    does not take this weight, or this machine not the format."""
    corner, rows, broken, size, took = figure.data
    # Plotly looks at each number of a list by itself. Of objects, since it writes other arrays in a way of its own into
    # a stored figure, which older versions do not read.
    corner.z = view["kept"].int().numpy(force=True).astype(object)
    rows.y = (100 * np.asarray(view["by_row"])).astype(object)
    in_the_way = [view["violations"], *view["filled"].values(), view["error"]]
    dense = view["bytes"]["dense"]
    shares = [None if view["bytes"][name] is None else view["bytes"][name] / dense for name in FORMATS]
    times = [view["ms"][name] for name in FORMATS]
    for bars, numbers, many, form in (
        (broken, in_the_way, 100, ".0%"),
        (size, shares, 100, ".0%"),
        (took, times, 1, ".2g"),
    ):
        bars.y = [0 if each is None else many * each for each in numbers]
        bars.text = texts = ["no" if each is None else f"{each:{form}}" for each in numbers]
        names = [name.replace(" ", "<br>") for name in bars.x]
        below = [f"{text}<br>{name}" for text, name in zip(texts, names, strict=True)]
        figure.layout[bars.xaxis.replace("x", "xaxis")].ticktext = below
    there = {name: share for name, share in zip(FORMATS, shares) if share is not None}
    small, quick = (min(some, key=some.__getitem__) for some in (there, {n: ms for n, ms in view["ms"].items() if ms}))
    figure.layout.title.text = (
        f"{view['density']:.1%} of the weights kept, the product off by {view['error']:.1%}<br><sup>fewest bytes as "
        f"{small} ({there[small]:.0%} of dense), least time as {quick}</sup>"
    )
