"""Figures of models beside their layers. Drawn from what `data` returned."""

from __future__ import annotations

import math

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ... import plots
from ..charts import bars, finish, lines, one
from ..drawing import nothing, say
from .data import amdahl

WAYS = {"eager": {"colour": plots.BLUE}, "compiled": {"colour": plots.SKY}, "CUDA graph": {"colour": plots.PURPLE}}
PATHS = {"planned": ("planned", plots.BLUE), "forced twell": ("TwELL, forced", plots.RED)}
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
    spread = {
        "array": [step["high"] - step["x"] for step in found],
        "arrayminus": [step["x"] - step["low"] for step in found],
        "color": plots.INK,
        "thickness": 1,
        "width": 4,
    }
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


def law(found: list[dict], own: list[dict] = ()) -> go.Figure:
    """Amdahl's law: the model's gain over the share of its time that layers take. Curves: layers that become so many
    times as fast. Points: measured, each hanging on what the law predicts."""
    title = "Amdahl's law: what a share of the time allows"
    known = [step for step in (*found, *own) if step["share"]]
    if not known:
        return nothing(title)
    figure, top = go.Figure(), max(2.0, 1.15 * max(max(step["predicted"], step["high"]) for step in known))
    for times in _CURVES:
        points = [{"share": share, "x": amdahl(share / 100, times)} for share in range(86)]
        look = {"dash": "solid" if times == math.inf else "dot", "colour": plots.GREY, "width": 1, "mode": "lines"}
        lines(figure, points, "share", "x", lambda _: None, looks={None: look}, showlegend=False)
        end = next((point for point in points if point["x"] > 0.97 * top), points[-1])  # where it leaves the figure
        name = "no time" if times == math.inf else f"{times:g}x"
        say(figure, end["share"], min(end["x"], 0.97 * top), name, "left", 11, xshift=4, bgcolor="white", borderpad=1)
    for step in known:
        mine, colour = step in own, WAYS[step["how"]]["colour"]
        name = f"{step['step']}, {step['how']}" + ", yours, now" * mine
        marker = {"symbol": [SYMBOLS[step["step"]] + "-open" * mine, "line-ew-open"], "size": [13 if mine else 10, 10]}
        look = {"colour": colour, "width": 1, "marker": marker | {"opacity": 1, "line": {"width": 2, "color": colour}}}
        ends = [{"share": 100 * step["share"], "x": step[key]} for key in ("x", "predicted")]
        said = lambda end, step=step: f"{step['name']}: {end['x']:.2f}x at {end['share']:.0f}%"
        lines(figure, ends, "share", "x", lambda _, name=name: name, hover=said, looks={name: look})
    share = "feed-forward layers' share of the dense model's time, %"
    figure = finish(one(figure), title, known, 330, x=share, y="model: times as fast as dense")
    bottom = min(1.0, *(step["x"] for step in known))
    return figure.update_xaxes(range=[0, 90]).update_yaxes(range=[0.94 * bottom, top])


def pieces(found: list[dict]) -> go.Figure:
    """Where the time of a call goes, in percent of the dense model's: a bar dense, a bar planned. found: what
    data.pieces returned."""
    dense = {piece["what"]: piece["whole"] for piece in found if piece["path"] == "dense eager"}
    shown = [piece for piece in found if piece["what"] in dense]
    percent = lambda piece, key="ms": 100 * piece[key] / dense[piece["what"]]
    name = lambda piece: f"{piece['what']}, {'planned' if piece['path'] == 'planned' else 'dense'}"
    said = lambda piece: f"{piece['of']}: {piece['ms']:.3g} ms, {percent(piece):.0f}%"
    figure, wholes = go.Figure(), {name(piece): piece for piece in shown}
    ordered = [piece for of in PIECES for piece in shown if piece["of"] == of]
    bars(figure, ordered, name, percent, "of", hover=said, looks=PIECES, across=True)
    for place, piece in wholes.items():
        say(figure, percent(piece, "whole"), place, f"{_number(piece['whole'])} ms", "left", 11, xshift=4)
    title, axis = "Where the time of a plain call goes", "% of the dense model's time"
    figure = finish(figure, title, shown, 30 + _ROW * len(wholes), x=axis, across=True).update_layout(barmode="stack")
    most = max((percent(piece, "whole") for piece in wholes.values()), default=0)
    return figure.update_xaxes(range=[0, 1.14 * most]).update_yaxes(categoryorder="array", categoryarray=[*wholes])


def times(found: list[dict]) -> go.Figure:
    """Milliseconds of each step, dense and planned, in each way."""
    figure = go.Figure()
    for step in sorted(found, key=lambda step: [*WAYS].index(step["how"])):
        colour, values = WAYS[step["how"]]["colour"], [step["ours_ms"], step["dense_ms"]]
        marker = {"color": [colour, plots.GREY], "size": 11, "symbol": ["circle", "circle-open"]}
        marker |= {"line": {"width": 2, "color": [colour, plots.GREY]}}
        looks = {step["how"]: {"colour": plots.GREY, "width": 1, "marker": marker}}
        dots = [{"ms": ms, "name": step["name"], "how": step["how"]} for ms in values]
        lines(figure, dots, "ms", "name", "how", hover=lambda end: f"{end['name']}: {end['ms']:.3g} ms", looks=looks)
        said = f"{_number(values[1])} to {_number(values[0])}"
        say(figure, math.log10(max(values)), step["name"], said, "left", 11, xshift=10)
    title = "Milliseconds: dense (grey), and with planned layers"
    figure = finish(figure, title, found, 30 + _ROW * len(found), x="ms a step (log scale)", across=True)
    ends = [math.log10(step[key]) for step in found for key in ("dense_ms", "ours_ms")] or [0]
    low, high = min(ends) - 0.15, max(ends)
    figure.update_yaxes(categoryorder="array", categoryarray=[step["name"] for step in found])
    return figure.update_xaxes(type="log", range=[low, high + 0.35 * (high - low)], dtick=1, tickformat=",")


def by_tokens(found: list[dict]) -> go.Figure:
    """Times as fast as dense over the number of tokens, a line for each way. found: data.by_tokens."""
    said = lambda row: f"{row['how']}, {row['tokens']:,} tokens: {row['x']:.2f}x"
    looks = {how: look | {"dash": "dot", "symbol": "circle"} for how, look in WAYS.items()}
    figure = one(lines(go.Figure(), found, "tokens", "x", "how", hover=said, looks=looks))
    title, ticks = "One planned layer, by the number of tokens", {row["tokens"] for row in found}
    return finish(figure, title, found, 270, x="tokens at once", y="times as fast as dense", log_x=ticks)


def by_nnz(found: list[dict]) -> go.Figure:
    """Times as fast as dense over nnz, a panel for each `of`. found: data.by_nnz."""
    panels = [*dict.fromkeys(row["of"] for row in found)]
    title = (
        f"One layer, {max((row['tokens'] for row in found), default=0):,} tokens, by the number of neurons that fire"
    )
    if not panels:
        return nothing(title)
    figure = make_subplots(rows=1, cols=len(panels), horizontal_spacing=0.12)
    looks = {name: {"colour": colour, "dash": "dot", "symbol": "circle"} for name, colour in PATHS.values()}
    for column, of in enumerate(panels, 1):
        here, path = [row for row in found if row["of"] == of], lambda row: PATHS[row["path"]][0]
        said = lambda row: f"{PATHS[row['path']][0]}, nnz {row['nnz']:.0f}: {row['x']:.2f}x"
        lines(figure, here, "nnz", "x", path, hover=said, looks=looks, row=1, col=column)
        figure.update_yaxes(title_text=f"{of}: times as fast as dense", row=1, col=column)
    ticks = sorted({round(row["nnz"]) for row in found})
    ticks = [tick for i, tick in enumerate(ticks) if not i or tick > 1.2 * ticks[i - 1]]
    return finish(one(figure), title, found, 290, x="neurons firing for a token, mean", log_x=ticks)


def costs(found: list[dict]) -> go.Figure:
    """Return what planned models take, in percent of the dense ones. found: data.costs."""
    colours = {"time": plots.BLUE, "weights": plots.ORANGE, "peak memory": plots.GREEN, "energy": plots.RED}
    looks = {of: {"colour": colour, "size": 11} for of, colour in colours.items()}
    values = lambda cost: f"{_number(cost['dense'])} to {_number(cost['ours'])} {cost['unit']}"
    said = lambda cost: f"{cost['what']}: {cost['of']} {cost['percent']:.3g}%, {values(cost)}"
    figure = lines(go.Figure(), found, "percent", "what", "of", hover=said, looks=looks, mode="markers")
    figure.add_vline(x=100, line={"color": plots.INK, "width": 1})
    height, axis = 30 + _ROW * len({cost["what"] for cost in found}), "% of the dense model's (100: the same)"
    return finish(figure, "Planned models, in % of the dense ones", found, height, x=axis, across=True)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
