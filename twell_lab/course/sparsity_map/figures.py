"""Figures of the notebook on other sparsities, each a function of rows and numbers; in the style of `plots`."""

from __future__ import annotations

from statistics import fmean

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ... import plots
from ..charts import MARKS, bars, finish, groups, lines, one, squares
from .data import BLOCK_SIZES, FORMATS, products

TICKS = (0.5, 0.25, 0.1, 0.05, 0.01, 0.001)  # densities
SILENT, KEPT = "#F2F2F2", plots.BLUE
IN_THE_WAY = ["fours", *(f"blocks {size}" for size in BLOCK_SIZES), "error"]
TIMES = "times as fast as dense"


def beside_dense(rows: list[dict]) -> go.Figure:
    """Draw times as fast as dense, by pattern, a bar for each method. rows: of one share of zeros, of `timed_here`."""
    timed, many = products(rows), lambda row: f"{row['x_dense']:.2g}"
    said = lambda row: f"{row['pattern']}, {row['path']}: {row['x_dense']:.2f} times as fast as dense"
    figure = one(bars(go.Figure(), timed, "pattern", "x_dense", "path", hover=said, text=many, textfont_size=10))
    best = max(timed, key=lambda row: row["x_dense"])
    title = f"{1 - best['density']:.0%} zeros: at most {best['x_dense']:.2g} times as fast"
    return finish(figure, title, timed, 300, y=TIMES, also=["no bar: not timed"])


def after_training(rows: list[dict]) -> go.Figure:
    """Draw how many bits a byte more than the dense model a pruned one needs, before it is trained on and after, each
    seed a line. rows: what `data.retrained` returned."""
    figure = go.Figure()
    zeros = {path: [row["sparsity"] for row in some] for path, some in groups(rows, "path").items()}
    name = lambda end: end["path"] if "%" in end["path"] else f"{end['path']}, {fmean(zeros[end['path']]):.0%}"
    said = lambda end: f"{end['path']}, {end['sparsity']:.0%} zeros, seed {end['seed']}: {end['bits']:+.3f}"
    look = {"colour": plots.GREY, "width": 1, "marker": {"size": 10, "symbol": ["circle-open", "circle"]}}
    look["marker"]["color"] = plots.BLUE
    for row in rows:
        ends = [row | {"bits": row[when]} for when in ("before", "after")]
        lines(figure, ends, "bits", name, "seed", hover=said, looks={row["seed"]: look}, showlegend=False)
    title = f"Pruned, and trained on for {rows[0]['steps']} steps" if rows else "Pruned, and trained on"
    axis = "bits a byte more than dense; open: pruned, filled: and trained on"
    return finish(figure, title, rows, 40 + 32 * len(zeros), x=axis, across=True).update_xaxes(rangemode="tozero")


def by_zeros(rows: list[dict]) -> go.Figure:
    """Draw times as fast as dense over the share of zeros, a panel for each pattern, a line for each method that is
    faster than dense anywhere: the map. 2:4, which has one share of zeros, is left out."""
    timed = sorted((row for row in products(rows) if row["pattern"] != "2:4"), key=lambda row: row["density"])
    wins = {row["path"]: i for i, row in enumerate(timed) if row["x_dense"] > 1}
    panels = groups([row for row in timed if row["path"] in wins], "pattern")
    title = "Which method wins, by pattern and share of zeros"
    if not panels:
        return finish(go.Figure(), title)
    down = -(-len(panels) // 2)
    figure = make_subplots(down, 2, subplot_titles=[*panels], shared_yaxes="all", vertical_spacing=0.34 / down)
    # Of two lines on each other both are seen: the second one has gaps, and smaller marks.
    kinds = {"dash": "solid", "size": 11}, {"dash": "dash", "size": 7}
    usual = lambda i: {"colour": plots.COLOURS[i % len(plots.COLOURS)], "symbol": MARKS[i % len(MARKS)]}
    looks = {path: usual(i) | kinds[i % 2] for i, path in enumerate(wins)}
    said = lambda row: f"{row['path']}, {1 - row['density']:.1%} zeros: {row['x_dense']:.2f} times as fast"
    for i, mine in enumerate(panels.values()):
        lines(figure, mine, "density", "x_dense", "path", hover=said, looks=looks, row=1 + i // 2, col=1 + i % 2)
    log = (0.1, 0.3, 1, 3, 10, 30)
    figure = finish(one(figure), title, timed, 240 * down, x="zeros, %", log_x=TICKS, log_y=log)
    figure.update_xaxes(autorange="reversed", ticktext=[f"{100 * (1 - tick):g}" for tick in sorted(TICKS)])
    return figure.update_yaxes(title_text=TIMES, col=1).update_annotations(font_size=12)


def picture(view: dict) -> go.Figure:
    """Draw what is left of a weight above a threshold: a corner of it, density by row, what breaks 2:4 and blocks and
    the error of the product, bytes and time by format. view: what `data.view` returned."""
    titles = ["a corner of it", "kept in a row, %", "fours with 3 or 4, filled blocks, error, %"]
    titles += ["bytes, % of dense", "ms of the product here"]
    cuts = {"column_widths": [0.3, 0.35, 0.35], "horizontal_spacing": 0.07, "vertical_spacing": 0.28}
    specs = [[{"rowspan": 2}, {}, {}], [None, {}, {}]]
    figure = make_subplots(rows=2, cols=3, specs=specs, subplot_titles=titles, **cuts)
    squares(figure, [[0]], (SILENT, KEPT), row=1, col=1, hoverinfo="skip")
    line = {"x": [*range(len(view["by_row"]))], "mode": "lines", "line": {"color": plots.BLUE}, "hoverinfo": "skip"}
    figure.add_scatter(**line, row=1, col=2)
    for names, colour, row, col in (
        (IN_THE_WAY, plots.RED, 1, 3),
        (FORMATS, plots.SKY, 2, 2),
        (FORMATS, plots.ORANGE, 2, 3),
    ):
        hover = "%{x}: %{text}<extra></extra>"
        figure.add_bar(x=names, marker_color=colour, textposition="none", hovertemplate=hover, row=row, col=col)
        # The numbers stand with the names: the browser would measure each text on a bar anew, at each move.
        figure.update_xaxes(tickvals=[*range(len(names))], tickangle=0, automargin=False, row=row, col=col)
    figure.update_xaxes(title_text="rows, fullest first", title_font_size=12, title_standoff=4, row=1, col=2)
    for ends, row, col in (([0, 105], 1, 2), ([0, 105], 1, 3), ([0, 305], 2, 2)):
        figure.update_yaxes(range=ends, row=row, col=col)
    square = {"autorange": "reversed", "scaleanchor": "x", "constraintoward": "top"}
    figure.update_xaxes(visible=False, constrain="domain", row=1, col=1)
    figure.update_yaxes(visible=False, constrain="domain", **square, row=1, col=1)
    figure.update_yaxes(rangemode="tozero", row=2, col=3)
    figure = plots.styled(figure, "", height=560).update_annotations(font_size=12)
    figure.update_layout(margin={"t": 110, "b": 70}, showlegend=False)
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
    shares = {name: count and count / dense for name, count in view["bytes"].items()}
    for trace, numbers, many, form in (
        (broken, in_the_way, 100, ".0%"),
        (size, [shares[name] for name in FORMATS], 100, ".0%"),
        (took, [view["ms"][name] for name in FORMATS], 1, ".2g"),
    ):
        trace.y = [0 if number is None else many * number for number in numbers]
        trace.text = ["no" if number is None else f"{number:{form}}" for number in numbers]
        below = [f"{text}<br>{name.replace(' ', '<br>')}" for text, name in zip(trace.text, trace.x, strict=True)]
        figure.layout[trace.xaxis.replace("x", "xaxis")].ticktext = below
    small, quick = (
        min((name for name in some if some[name] is not None), key=some.__getitem__) for some in (shares, view["ms"])
    )
    figure.layout.title.text = (
        f"{view['density']:.1%} of the weights kept, the product off by {view['error']:.1%}<br><sup>fewest bytes as "
        f"{small} ({shares[small]:.0%} of dense), least time as {quick}</sup>"
    )
