"""Figures of notebook 05, each a function of what `data` returned."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from ... import plots
from .data import HERE

COLOURS = {"cut": plots.RED, "convert": plots.PURPLE, "train": plots.BLUE}
_SYMBOLS = {"cut": "circle", "convert": "square", "train": "diamond"}
_DASHES = ("solid", "dot", "dash")
TOP = 12.0  # percent: points above are said in the title, not drawn


def cut(points: list[dict]) -> go.Figure:
    """Loss over the share of neurons that thresholds leave, a line for each model, each point named."""
    figure = picture(points, "What a cut costs on held-out text (95% intervals)")
    room = 115 * max(point["density"] for point in points)  # %: left of the first point stands its name
    figure.update_xaxes(dtick="D1", autorangeoptions_include=room)  # a few percent: a tick for each
    for line in figure.data:
        line.update(mode="lines+markers+text", text=[what for what, _ in line.customdata], textposition="top left")
    return figure.update_layout(height=380, margin_b=60, showlegend=False)


def training_on(histories: dict[str, list[dict]]) -> go.Figure:
    """Held-out loss while copies of one model are trained on, a line each: what `data.further` returned, by name."""
    figure = go.Figure()
    for (name, rows), colour in zip(histories.items(), plots.COLOURS, strict=False):
        figure.add_scatter(
            x=[row["step"] for row in rows],
            y=[row["bits"] for row in rows],
            name=name,
            mode="lines+markers",
            line={"color": colour},
            hovertemplate="step %{x}: %{y:.3f} bits per byte<extra></extra>",
        )
    figure.update_xaxes(title_text="further steps")
    figure.update_yaxes(title_text="held-out text, bits per byte (lower is better)")
    return plots.styled(figure, "One SiLU model, trained on in several ways")


def picture(points: Sequence[dict], title: str = "Three ways to few neurons, and what each costs") -> go.Figure:
    """Change of the loss over density: a colour a way, filled where measured here, open where recorded."""
    figure, above = go.Figure(), sum(point["change"] > TOP for point in points)
    lines: dict[tuple, list[dict]] = {}
    for point in points:
        lines.setdefault((point["way"], point["model"], point["where"]), []).append(point)
    models = [*dict.fromkeys(point["model"] for point in points)]
    for (way, model, where), mine in lines.items():
        mine = sorted(mine, key=lambda point: point["density"])
        here = where == HERE
        figure.add_scatter(
            x=[100 * point["density"] for point in mine],
            y=[point["change"] for point in mine],
            error_y=_bars(mine) if here else None,
            name=_name(way, model) + ("" if here else ", recorded"),
            mode="lines+markers",
            line={"color": COLOURS[way], "dash": _DASHES[models.index(model) % len(_DASHES)], "width": 1.5},
            marker={"size": 10, "symbol": _SYMBOLS[way] + ("" if here else "-open")},
            customdata=[[point["what"], where] for point in mine],
            hovertemplate="%{customdata[0]}: %{x:.2f}% fire, %{y:+.2f}% loss, %{customdata[1]}<extra></extra>",
        )
    figure.add_hline(y=0, line={"color": plots.GREY, "width": 1})
    figure.update_xaxes(
        title_text="neurons that fire for a token, % (log scale)",
        type="log",
        tickformat="~g",
        dtick="D2",
        autorange="reversed",
    )
    figure.update_yaxes(title_text="change of the loss, %", range=[-1.5, TOP])
    sources = [point["where"] for point in points if point["where"] != HERE]
    said = ["filled: measured here"] * bool(sources) + [f"open: {where}" for where in dict.fromkeys(sources)]
    said += [f"not drawn: {above} above {TOP:g}%"] * (above > 0)
    figure = plots.styled(figure, title + f"<br><sup>{'; '.join(said)}</sup>" * bool(said), height=480)
    return figure.update_layout(
        margin_t=90, margin_b=120, legend={"orientation": "h", "x": 0, "y": -0.2, "yanchor": "top"}
    )


def _name(way: str, model: str) -> str:
    """Return what a line is called. A model that is trained with L1 is another than that without, beside which it is
    drawn."""
    if way != "train":
        return f"{way}: {model}"
    return f"train with L1: {model}" if model.endswith("weights") else f"train with L1: twin of {model}"


def _bars(points: list[dict]) -> dict:
    """Error bars over the intervals of these points."""
    return {
        "type": "data",
        "symmetric": False,
        "array": [point["high"] - point["change"] for point in points],
        "arrayminus": [point["change"] - point["low"] for point in points],
    }
