"""Figures of models beside their layers. Drawn from what `data` returned."""

from __future__ import annotations

import math

import plotly.graph_objects as go

from ... import plots
from ..charts import bars, finish, lines, one, say
from .data import amdahl

WAYS = {"eager": {"colour": plots.BLUE}, "compiled": {"colour": plots.SKY}, "CUDA graph": {"colour": plots.PURPLE}}
PIECES = {
    "feed-forward layers": {"colour": plots.GREEN},
    "LM head": {"colour": plots.ORANGE},
    "attention, norms and the rest": {"colour": plots.GREY, "pattern": {"shape": "/"}},  # not colour alone
    "attention, LM head and the rest": {"colour": plots.GREY, "pattern": {"shape": "x"}},
    "waiting for the host": {"colour": plots.FAINT, "marker": {"line": {"color": plots.GREY, "width": 1}}},
}
SYMBOLS = {"forward": "circle", "decode": "diamond", "training": "square"}
_CURVES = (1.5, 2, 3, math.inf)  # times as fast, for which Amdahl's law is drawn
_ROW = 26  # pixels of a line of a horizontal figure


def beside_layers(
    found: list[dict], title: str = "Times as fast with planned layers: the layers, and the model"
) -> go.Figure:
    """For each step a bar of the model, with the middle half of its turns, a diamond of its layers alone, and a line
    where Amdahl's law puts the model."""
    figure, known = go.Figure(), [step for step in found if step["share"]]
    spread = {"array": [step["high"] - step["x"] for step in found], "color": plots.INK, "thickness": 1, "width": 4}
    spread |= {"arrayminus": [step["x"] - step["low"] for step in found]}
    said = lambda step: f"{step['name']}: {step['x']:.2f}x"
    bars(figure, found, "name", "x", lambda step: "the model, measured", hover=said, across=True, error_x=spread)
    alone = "its layers by themselves" + ", where they were timed" * (len(known) < len(found))
    for key, name, look in (
        ("layer_x", alone, {"colour": plots.GREEN, "symbol": "diamond", "size": 11}),
        ("predicted", "the model, by Amdahl's law", {"colour": plots.RED, "symbol": "line-ns-open", "size": 18}),
    ):
        looks = {name: look | ({"marker": {"line": {"width": 3}}} if key == "predicted" else {})}
        said = lambda step, key=key: f"{step['name']}: {step[key]:.2f}x"
        lines(figure, known, key, "name", lambda step, name=name: name, hover=said, looks=looks, mode="markers")
    one(figure, "x").update_xaxes(rangemode="tozero")
    return finish(figure, title, found, 30 + _ROW * len(found), x="times as fast as dense", across=True)


def law(found: list[dict]) -> go.Figure:
    """Amdahl's law: the model's gain over the share of its time that layers take. Curves: layers that become so many
    times as fast. Points: measured, each hanging on what the law predicts."""
    title = "Amdahl's law: what a share of the time allows"
    known = [step for step in found if step["share"]]
    if not known:
        return finish(go.Figure(), title)
    figure, top = go.Figure(), max(2.0, 1.15 * max(max(step["predicted"], step["high"]) for step in known))
    for times in _CURVES:
        points = [{"share": share, "x": amdahl(share / 100, times)} for share in range(86)]
        look = {"dash": "solid" if times == math.inf else "dot", "colour": plots.GREY, "width": 1, "mode": "lines"}
        lines(figure, points, "share", "x", lambda _: None, looks={None: look}, showlegend=False)
        end = next((point for point in points if point["x"] > 0.97 * top), points[-1])  # where it leaves the figure
        name = "no time" if times == math.inf else f"{times:g}x"
        say(figure, end["share"], min(end["x"], 0.97 * top), name, "left", 11, xshift=4, bgcolor="white", borderpad=1)
    for step in known:
        name, colour = f"{step['step']}, {step['how']}", WAYS[step["how"]]["colour"]
        marker = {"symbol": [SYMBOLS[step["step"]], "line-ew-open"], "size": 10}
        look = {"colour": colour, "width": 1, "marker": marker | {"opacity": 1, "line": {"width": 2, "color": colour}}}
        ends = [{"share": 100 * step["share"], "x": step[key]} for key in ("x", "predicted")]
        said = lambda end, step=step: f"{step['name']}: {end['x']:.2f}x at {end['share']:.0f}%"
        lines(figure, ends, "share", "x", lambda _, name=name: name, hover=said, looks={name: look})
    share = "feed-forward layers' share of the dense model's time, %"
    figure = finish(one(figure), title, known, 330, x=share, y="model: times as fast as dense")
    bottom = min(1.0, *(step["x"] for step in known))
    return figure.update_xaxes(range=[0, 90]).update_yaxes(range=[0.94 * bottom, top])


def pieces(found: list[dict]) -> go.Figure:
    """Where the time of a call goes, in percent of the dense model's: bars of data.pieces, dense and planned."""
    dense = {piece["what"]: piece["whole"] for piece in found if piece["path"] == "dense eager"}
    shown = [piece for piece in found if piece["what"] in dense]
    percent = lambda piece, key="ms": 100 * piece[key] / dense[piece["what"]]
    name = lambda piece: f"{piece['what']}, {'planned' if piece['path'] == 'planned' else 'dense'}"
    said = lambda piece: f"{piece['of']}: {piece['ms']:.3g} ms, {percent(piece):.0f}%"
    figure, wholes = go.Figure(), {name(piece): piece for piece in shown}
    ordered = [piece for of in PIECES for piece in shown if piece["of"] == of]
    bars(figure, ordered, name, percent, "of", hover=said, looks=PIECES, across=True)
    for place, piece in wholes.items():
        ms = piece["whole"]
        text = f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.3g} ms"
        say(figure, percent(piece, "whole"), place, text, "left", 11, xshift=4)
    title, axis = "Where the time of a plain call goes", "% of the dense model's time"
    figure = finish(figure, title, shown, 30 + _ROW * len(wholes), x=axis, across=True).update_layout(barmode="stack")
    most = max((percent(piece, "whole") for piece in wholes.values()), default=0)
    return figure.update_xaxes(range=[0, 1.14 * most]).update_yaxes(categoryorder="array", categoryarray=[*wholes])
