"""Figures of points of density and loss, as `data` returns them."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from ... import plots
from ..charts import finish, groups, lines
from .data import HERE

LOOKS = {
    "cut": {"colour": plots.RED, "symbol": "circle"},
    "convert": {"colour": plots.PURPLE, "symbol": "square"},
    "train": {"colour": plots.BLUE, "symbol": "diamond"},
}
DASHES = ("solid", "dot", "dash")
TICKS = (0.1, 0.2, 0.3, 0.5, 1, 2, 3, 4, 5, 7, 10, 20, 30, 50, 100)  # percent of neurons
TITLE, TOP = "Three ways to few neurons, and what each costs", 12.0  # %: what is above is said in the title, not drawn


def cut(points: list[dict]) -> go.Figure:
    """Draw the loss over the share of neurons that thresholds leave, a line for each model, each point named."""
    top = max(TOP, *(point["high"] for point in points))
    figure = picture(points, "What a cut costs on held-out text (95% intervals)", top)
    room = 115 * max(point["density"] for point in points)  # %: left of the first point stands its name
    for line in figure.data:
        names = [said.partition(":")[0] for said in line.hovertext]
        line.update(mode="lines+markers+text", text=names, textposition="top left")
    return figure.update_xaxes(autorangeoptions_include=room).update_layout(showlegend=False)


def picture(points: Sequence[dict], title: str = TITLE, top: float = TOP) -> go.Figure:
    """Draw the change of the loss over density: a colour a way, filled where measured here, open where recorded."""
    figure, looks = go.Figure(), {}
    models = [*dict.fromkeys(point["model"] for point in points)]
    ordered = sorted(points, key=lambda point: point["density"])
    for name, mine in groups(ordered, _name).items():
        dash = DASHES[models.index(mine[0]["model"]) % len(DASHES)]
        looks[name] = LOOKS[mine[0]["way"]] | {"dash": dash, "width": 1.5, "size": 10}
        if mine[0]["where"] == HERE:
            ends = {"array": [point["high"] - point["change"] for point in mine]}
            looks[name]["error_y"] = ends | {"arrayminus": [point["change"] - point["low"] for point in mine]}
        else:
            looks[name]["symbol"] += "-open"
    said = lambda point: f"{point['what']}: {point['density']:.2%} fire, {point['change']:+.2f}% loss, {point['where']}"
    lines(figure, ordered, lambda point: 100 * point["density"], "change", _name, hover=said, looks=looks)
    figure.add_hline(y=0, line={"color": plots.GREY, "width": 1})
    sources, above = {point["where"] for point in points} - {HERE}, sum(point["change"] > top for point in points)
    told = ["filled: measured here"] * bool(sources) + [f"open: {where}" for where in sorted(sources)]
    told += [f"not drawn: {above} above {top:g}%"] * (above > 0)
    axes = {"x": "neurons that fire for a token, %", "y": "change of the loss, %"}
    figure = finish(figure, title, height=360, also=told, log_x=TICKS, **axes)
    return figure.update_xaxes(autorange="reversed").update_yaxes(range=[-1.5, top])


def _name(point: dict) -> str:
    """Return what a point's line is called: one trained with L1 is a twin of the model beside which it is drawn."""
    way, model = point["way"], point["model"]
    name = f"{way}: {model}" if way != "train" else f"train with L1: {'' if 'weights' in model else 'twin of '}{model}"
    return name + ", recorded" * (point["where"] != HERE)
