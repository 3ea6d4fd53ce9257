"""Figures of the first notebooks, each a function of rows and numbers; in the style of `plots`."""

from __future__ import annotations

import plotly.graph_objects as go

from ... import plots
from ...ops.clock import quartiles
from .. import charts
from ..charts import groups, say
from .data import ms

LINES = {"COO": plots.ORANGE, "CSR": plots.RED, "CSR + conversion": plots.PURPLE, "ELL": plots.BLUE}


def bars(
    samples: dict[str, list[float]],
    title: str,
    base: str | None = None,
    shown: str = "median; whiskers hold the middle half",
) -> go.Figure:
    """Draw the median time of each call as a bar, with whiskers that span the middle half of its samples, if several.
    samples: name -> milliseconds; base: the name the others are compared with, grey; shown: what the axis says of the
    bars."""
    rows = []
    for name, values in samples.items():
        (middle, _), ordered = quartiles(values), sorted(values)
        ends = {"low": middle - ordered[len(values) // 4], "high": ordered[(3 * len(values) - 1) // 4] - middle}
        rows.append({"name": name, "ms": middle, "of": "single calls" if len(values) == 1 else "medians", **ends})
    figure, looks = go.Figure(), {}
    for of, mine in groups(rows, "of").items():  # a single reading has no whiskers, not some of length 0
        ends = {"array": [row["high"] for row in mine], "arrayminus": [row["low"] for row in mine]}
        colours = [plots.GREY if row["name"] == base else plots.BLUE for row in mine]
        looks[of] = {"marker": {"color": colours}, "showlegend": False}
        looks[of] |= {"error_x": ends | {"color": plots.INK, "thickness": 1, "width": 4}} if of == "medians" else {}
    said = lambda row: f"{row['name']}: {row['ms']:.3g} ms"
    charts.bars(figure, rows, "name", "ms", "of", hover=said, looks=looks, across=True)
    for row in rows:
        times = next((other["ms"] for other in rows if other["name"] == base), 0.0) / row["ms"]
        ratio = f"  ({times:{',.0f' if times >= 100 else '.3g'}}x)" if base and row["name"] != base else ""
        # The whisker's end, not the bar's, decides where the figure beside it may stand.
        say(figure, row["ms"] + row["high"], row["name"], f"{ms(row['ms'])}{ratio}", "left", xshift=8)
    most, height = max(row["ms"] + row["high"] for row in rows), 44 * len(rows)
    figure = charts.finish(figure, title, height=height, x=f"milliseconds ({shown})", across=True)
    figure.update_xaxes(range=[0, 1.28 * most]).update_yaxes(categoryorder="array", categoryarray=[*samples])
    return figure.update_layout(barmode="overlay")


def against_density(rows: list[dict], title: str) -> go.Figure:
    """Draw how many times as fast as dense each format is, by density. rows: of `data.against_density` and
    `data.recorded` (dotted), each with `where`."""
    shown = sorted((row for row in rows if row["path"] != "dense"), key=lambda row: row["density"])
    name = lambda row: f"{row['path']}, {row['where']}"
    said = lambda row: f"{name(row)}: {row['density']:.2%} stored: {row['x_dense']:.2f}x of {row['dense_ms']:.3g} ms"
    looks = {name(row): {"colour": LINES.get(row["path"], plots.GREEN), "symbol": "circle"} for row in shown}
    for other in looks:
        looks[other] |= {"dash": "dot", "symbol": "diamond-open"} if "recorded" in other else {}
    percent = lambda row: 100 * row["density"]
    figure = charts.lines(go.Figure(), shown, percent, "x_dense", name, hover=said, looks=looks)
    axes = {"x": "density: values that are not zero, %", "log_x": {float(f"{percent(row):.1g}") for row in shown}}
    axes |= {"y": "times as fast as dense", "log_y": (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)}
    return charts.finish(charts.one(figure), title, height=340, **axes)
