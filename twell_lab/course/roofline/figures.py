"""Figures of what notebook 09 computes of the Hopper kernels' work; in the style of `plots`."""

from __future__ import annotations

import math

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ... import plots
from ...formats.twell import POOL_WORDS
from ..drawing import BESIDE, nothing, squares
from ..recorded import sources

GROUPS = {"the gate, 16,384 tokens": plots.BLUE, "whole layer, 1 token": plots.GREEN}
VERSIONS = {  # of data.versions, as the figure calls them
    "sm80 gate_pack": "for older GPUs (mma.sync)",
    "gate GEMM (torch), then pack": "torch's product, then pack",
    "gate GEMM (torch)": "torch's product, not packed",
    "sm90 gate_pack v1": "version 1: TMA, wgmma",
    "sm90 gate_pack v2": "version 2: clusters",
    "sm90 gate_pack v3": "version 3: packs beside",
}
LOST = "#CCCCCC"  # the excess of a row that found no room
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "star", "x", "cross")


def roofline(points: list[dict], gpu: dict) -> go.Figure:
    """Operations a second over operations a byte of memory, under the peaks of a datasheet.

    points: `data.points`; gpu: an entry of data/gpus.json.
    """
    title = "Roofline: no kernel gets above the slope (memory) or the flat roof (tensor cores)"
    if not points:
        return nothing(title)
    figure, span = go.Figure(), (0.3, 3e4)
    tensor, memory = 1e12 * gpu["tensor_tflops"], 1e9 * gpu["bandwidth_gb_s"]
    figure.add_scatter(
        x=[span[0], tensor / memory, span[1]],
        y=[span[0] * memory / 1e12, tensor / 1e12, tensor / 1e12],
        mode="lines",
        line={"color": plots.INK, "width": 1.5},
        showlegend=False,
        hoverinfo="skip",
    )
    for x, y, text, anchor in (
        (span[1], tensor, f"tensor cores, {tensor / 1e12:.0f} TFLOP/s", "right"),
        (8, 10 * memory, f"memory, {memory / 1e12:.2f} TB/s", "right"),
    ):
        figure.add_annotation(
            x=math.log10(x),
            y=math.log10(y / 1e12),
            text=text,
            showarrow=False,
            xanchor=anchor,
            yanchor="bottom",
            yshift=6,
            font={"size": 11},
        )
    seen: dict[str, int] = {}
    for p in points:
        number = seen[p["group"]] = seen.get(p["group"], -1) + 1
        rate = p["operations"] / p["seconds"] / 1e12
        figure.add_scatter(
            x=[p["operations"] / p["bytes"]],
            y=[rate],
            mode="markers",
            name=VERSIONS.get(p["name"], p["name"]),
            legendgroup=p["group"],
            legendgrouptitle_text=p["group"],
            marker={
                "symbol": SYMBOLS[number % len(SYMBOLS)],
                "size": max(6, 20 - 2 * number),  # versions that lie on one spot are seen, one within another
                "color": GROUPS.get(p["group"], plots.INK),
                "line": {"color": "white", "width": 1},
            },
            customdata=[[1e3 * p["seconds"], p["where"]]],
            hovertemplate="%{x:.3g} operations a byte, %{y:.3g} TFLOP/s (%{customdata[0]:.3g} ms, %{customdata[1]})",
        )
    ours = [(p["operations"] / p["seconds"] / 1e12, p) for p in points if " v" in p["name"]]  # on nearly one spot
    for i, (rate, p) in enumerate(sorted(ours, key=lambda each: -each[0])):
        figure.add_annotation(
            x=math.log10(p["operations"] / p["bytes"]),
            y=math.log10(rate),
            text=VERSIONS.get(p["name"], p["name"]).partition(":")[0],
            ax=32,
            ay=4 + 16 * i,
            xanchor="left",
            arrowhead=0,
            arrowwidth=1,
            arrowcolor=plots.GREY,
            font={"size": 11},
        )
    figure.update_xaxes(
        title_text="operations for each byte of memory (log scale)",
        type="log",
        range=[math.log10(v) for v in span],
        tickvals=[1, 10, 100, 1000, 10000],
        ticktext=["1", "10", "100", "1,000", "10,000"],
    )
    figure.update_yaxes(
        title_text="10<sup>12</sup> operations a second (log scale)",
        type="log",
        tickvals=[1, 10, 100, 1000],
        ticktext=["1", "10", "100", "1,000"],
        range=[-0.6, 3.3],
    )
    figure = plots.styled(figure, f"{title}<br><sub>{sources(points)}</sub>", height=480)
    return figure.update_layout(legend=BESIDE | {"groupclick": "toggleitem"}, margin={"r": 230, "t": 95})


def versions(found: list[dict], floor_ms: float) -> go.Figure:
    """The gate, packed, by each version, beside the least time that the tensor cores allow. found: `data.versions`.

    floor_ms: drawn as a line."""
    title = "The gate of 16,384 tokens, nnz 29: each version, and the floor"
    if not found:
        return nothing(title)
    colour = {"gate GEMM (torch)": plots.GREY, "sm90 gate_pack v3": plots.BLUE}
    figure = go.Figure(
        go.Bar(
            y=[VERSIONS.get(row["path"], row["path"]) for row in found],
            x=[row["ms"] for row in found],
            orientation="h",
            marker_color=[colour.get(row["path"], plots.SKY) for row in found],
            text=[f"{row['ms']:.3f} ms, {floor_ms / row['ms']:.0%} of the peak" for row in found],
            textposition="outside",
            hovertemplate="%{y}: %{x:.4g} ms<extra></extra>",
        )
    )
    figure.add_vline(x=floor_ms, line={"color": plots.INK, "width": 1.5, "dash": "dot"})
    figure.add_annotation(
        x=floor_ms, y=1, yref="paper", yanchor="bottom", text=f"floor {floor_ms:.3f} ms", showarrow=False
    )
    figure.update_xaxes(title_text="ms", range=[0, 1.4 * found[0]["ms"]])
    where = f"{title}<br><sub>{sources(found)}</sub>"
    return plots.styled(figure, where, height=360).update_layout(margin={"l": 190, "t": 95})


def pool_segment(rows: list[dict]) -> go.Figure:
    """Return how many values each row of a group has in one tile, and which row's values lie in the words that they
    share.

    rows: `data.pool_table`.
    """
    figure = make_subplots(
        rows=2,
        cols=1,
        row_heights=[0.72, 0.28],
        vertical_spacing=0.2,
        subplot_titles=[
            "each row's values in this tile: in its own words, and in excess",
            f"the {POOL_WORDS} words that the rows share",
        ],
    )
    over = [row for row in rows if row["excess"]]
    colour = {
        row["row"]: plots.COLOURS[i % len(plots.COLOURS)] if not row["lost"] else LOST for i, row in enumerate(over)
    }
    x = [row["row"] for row in rows]
    figure.add_bar(
        x=x,
        y=[row["words"] for row in rows],
        marker_color=plots.FAINT,
        marker_line={"color": plots.GREY, "width": 1},
        name="own words",
        row=1,
        col=1,
        hovertemplate="row %{x}: %{y} in its words<extra></extra>",
    )
    figure.add_bar(
        x=x,
        y=[row["excess"] for row in rows],
        marker_color=[colour.get(row["row"], plots.FAINT) for row in rows],
        name="in excess",
        row=1,
        col=1,
        hovertemplate="row %{x}: %{y} in excess<extra></extra>",
        text=["lost" if row["lost"] else "" for row in rows],
        textposition="outside",
    )
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
            figure.add_annotation(
                x=(first + last - 1) / 2,
                y=0,
                text=text,
                showarrow=False,
                font={"color": plots.INK if row["lost"] else "white"},
                bgcolor=colour[row["row"]],
                row=2,
                col=1,
            )
    figure.update_xaxes(title_text="row of the group", dtick=1, row=1, col=1)
    figure.update_xaxes(title_text="word", range=[-0.5, POOL_WORDS - 0.5], showgrid=False, row=2, col=1)
    figure.update_yaxes(visible=False, row=2, col=1)
    figure.update_yaxes(title_text="values", row=1, col=1)
    title = f"{len(rows)} rows, one tile: who finds room in the pool"
    figure = plots.styled(figure, title, height=480).update_layout(barmode="stack", showlegend=False, margin_t=80)
    figure.update_annotations(font_size=12)
    return figure
