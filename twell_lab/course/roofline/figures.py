"""Figures of what notebook 09 computes of the Hopper kernels' work; in the style of `plots`."""

from __future__ import annotations

import math

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ... import plots
from ...formats.twell import POOL_WORDS
from ..charts import MARKS, bars, finish, groups, lines
from ..drawing import BESIDE, nothing, say, squares

GROUPS = {"the gate, 16,384 tokens": plots.BLUE, "whole layer, 1 token": plots.GREEN}
VERSIONS = {  # of data.versions, as the figure calls them
    "sm80 gate_pack": "for older GPUs",
    "gate GEMM (torch), then pack": "torch's product, then pack",
    "gate GEMM (torch)": "torch's product, not packed",
    "sm90 gate_pack v1": "version 1: TMA, wgmma",
    "sm90 gate_pack v2": "version 2: clusters",
    "sm90 gate_pack v3": "version 3: packs beside",
}
LOST = "#CCCCCC"  # the excess of a row that found no room


def roofline(points: list[dict], gpu: dict) -> go.Figure:
    """Operations a second over operations a byte of memory, under the peaks of a datasheet.

    points: `data.points`; gpu: an entry of data/gpus.json."""
    title = "Roofline: no kernel gets above the slope (memory) or the flat roof (tensor cores)"
    if not points:
        return nothing(title)
    figure, (left, right) = go.Figure(), (0.3, 3e4)
    tensor, memory = gpu["tensor_tflops"], gpu["bandwidth_gb_s"] / 1e3
    line, ends = (
        {"color": plots.INK, "width": 1.5},
        {"x": [left, tensor / memory, right], "y": [left * memory, tensor, tensor]},
    )
    figure.add_scatter(**ends, mode="lines", line=line, showlegend=False, hoverinfo="skip")
    for x, y, text in (
        (right, tensor, f"tensor cores, {tensor:.0f} TFLOP/s"),
        (8, 10 * memory, f"memory, {memory:.2f} TB/s"),
    ):
        say(figure, math.log10(x), math.log10(y), text, "right", 11, yanchor="bottom", yshift=6)
    named = [point | {"called": VERSIONS.get(point["name"], point["name"])} for point in points]
    for group, mine in groups(named, "group").items():  # versions that lie on one spot are seen, one within another
        edge = {"line": {"color": "white", "width": 1}}
        looks = {
            point["called"]: {"colour": GROUPS[group], "symbol": MARKS[i], "size": max(6, 20 - 2 * i), "marker": edge}
            for i, point in enumerate(mine)
        }
        rates = lambda point: f"{point['intensity']:.3g} operations a byte, {point['rate']:.3g} TFLOP/s"
        said = lambda point: f"{point['called']}: {rates(point)} ({point['ms']:.3g} ms, {point['where']})"
        more = {"legendgroup": group, "legendgrouptitle_text": group, "mode": "markers"}
        lines(figure, mine, "intensity", "rate", "called", hover=said, looks=looks, **more)
    ours = sorted((point for point in named if " v" in point["name"]), key=lambda point: -point["rate"])
    for i, point in enumerate(ours):  # on nearly one spot
        figure.add_annotation(
            x=math.log10(point["intensity"]),
            y=math.log10(point["rate"]),
            text=point["called"].partition(":")[0],
            ax=32,
            ay=4 + 16 * i,
            xanchor="left",
            arrowhead=0,
            arrowwidth=1,
            arrowcolor=plots.GREY,
            font={"size": 11},
        )
    axes = {"x": "operations for each byte of memory", "y": "10<sup>12</sup> operations a second"}
    ticks = {"log_x": [1, 10, 100, 1000, 10000], "log_y": [1, 10, 100, 1000]}
    figure = finish(figure, title, points, 340, **axes, **ticks)
    figure.update_xaxes(range=[math.log10(left), math.log10(right)]).update_yaxes(range=[-0.6, 3.3])
    beside = BESIDE | {"yref": "paper", "groupclick": "toggleitem", "traceorder": "grouped"}
    return figure.update_layout(legend=beside, margin={"r": 230, "b": 56})


def versions(found: list[dict], floor_ms: float) -> go.Figure:
    """The gate, packed, by each version, beside the least time that the tensor cores allow. found: `data.versions`.

    floor_ms: drawn as a line."""
    name = lambda row: VERSIONS.get(row["path"], row["path"])
    colour = {"gate GEMM (torch)": plots.GREY, "sm90 gate_pack v3": plots.BLUE}
    looks = {None: {"marker": {"color": [colour.get(row["path"], plots.SKY) for row in found]}}}
    said = lambda row: f"{row['ms']:.3f} ms, {floor_ms / row['ms']:.0%} of the peak"
    figure = bars(go.Figure(), found, name, "ms", lambda _: None, hover=said, text=said, looks=looks, across=True)
    figure.add_vline(x=floor_ms, line={"color": plots.INK, "width": 1.5, "dash": "dot"})
    say(figure, floor_ms, 1, f"floor {floor_ms:.3f} ms", yref="paper", yanchor="bottom")
    title = "The gate of 16,384 tokens, nnz 29: each version, and the floor"
    figure = finish(figure, title, found, 210, x="ms", across=True)
    return figure.update_xaxes(range=[0, 1.4 * found[0]["ms"] if found else 1])


def pool_segment(rows: list[dict]) -> go.Figure:
    """Return how many values each row of a group has in one tile, and which row's values lie in the words that they
    share.

    rows: `data.pool_table`.
    """
    titles = [
        "each row's values in this tile: in its own words, and in excess",
        f"the {POOL_WORDS} words that the rows share",
    ]
    cuts = {"rows": 2, "cols": 1, "row_heights": [0.72, 0.28], "vertical_spacing": 0.2}
    figure = make_subplots(**cuts, subplot_titles=titles)
    over = [row for row in rows if row["excess"]]
    colour = {row["row"]: LOST if row["lost"] else plots.COLOURS[i % len(plots.COLOURS)] for i, row in enumerate(over)}
    edge = {"line": {"color": plots.GREY, "width": 1}}
    looks = {
        "own words": {"colour": plots.FAINT, "marker": edge},
        "in excess": {"colour": [colour.get(row["row"], plots.FAINT) for row in rows]},
    }
    for key, name in (("words", "own words"), ("excess", "in excess")):
        said = lambda row, key=key, name=name: f"row {row['row']}: {row[key]} {name}"
        text = (lambda row: "lost" * row["lost"]) if key == "excess" else None
        more = {"hover": said, "text": text, "looks": looks, "row": 1, "col": 1}
        bars(figure, rows, "row", key, lambda row, name=name: name, **more)
    owner, hover = [None] * POOL_WORDS, ["unused"] * POOL_WORDS
    for row in over:
        for at in range(row["start"], min(row["end"], POOL_WORDS)):
            owner[at], hover[at] = row["row"], f"row {row['row']}" + ", lost: never read" * bool(row["lost"])
    order = list(colour)
    squares(
        figure,
        [[None if who is None else order.index(who) for who in owner]],
        colour.values() or [plots.FAINT],
        x=list(range(POOL_WORDS)),
        xgap=1,
        customdata=[hover],
        row=2,
        col=1,
        hovertemplate="word %{x}: %{customdata}<extra></extra>",
    )
    for row in over:
        first, last = row["start"], min(row["end"], POOL_WORDS)
        text = f"row {row['row']}" + ", lost:<br>never read" * bool(row["lost"])
        if 4 <= last - first and (not row["lost"] or 8 <= last - first):  # words: only where it has room
            place = {"bgcolor": colour[row["row"]], "row": 2, "col": 1}
            ink = "" if row["lost"] else "color:white"
            say(figure, (first + last - 1) / 2, 0, f"<span style='{ink}'>{text}</span>", **place)
    figure.update_xaxes(title_text="row of the group", dtick=1, row=1, col=1)
    figure.update_xaxes(title_text="word", range=[-0.5, POOL_WORDS - 0.5], showgrid=False, row=2, col=1)
    figure.update_yaxes(visible=False, row=2, col=1)
    figure.update_yaxes(title_text="values", row=1, col=1)
    title = f"{len(rows)} rows, one tile: who finds room in the pool"
    figure = finish(figure, title, height=350).update_annotations(font_size=12)
    return figure.update_layout(barmode="stack", showlegend=False)
