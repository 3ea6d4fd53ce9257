"""Figures of what notebook 09 computes of the Hopper kernels' work; in the style of `plots`."""

from __future__ import annotations

import math

import plotly.graph_objects as go

from ... import plots
from ..charts import bars, finish, lines
from ..drawing import nothing, say

VERSIONS = {  # of data.versions, as the figure calls them
    "sm80 gate_pack": "for older GPUs",
    "gate GEMM (torch), then pack": "torch's product, then pack",
    "gate GEMM (torch)": "torch's product, not packed",
    "sm90 gate_pack v1": "version 1: TMA, wgmma",
    "sm90 gate_pack v2": "version 2: clusters",
    "sm90 gate_pack v3": "version 3: packs beside",
}


def roofline(points: list[dict], gpu: dict) -> go.Figure:
    """Operations a second over operations a byte of memory, under the peaks of a datasheet.

    points: `data.points`; gpu: an entry of data/gpus.json."""
    title = "Roofline: no kernel gets above the slope (memory) or the flat roof (tensor cores)"
    if not points:
        return nothing(title)
    figure, (left, right) = go.Figure(), (0.3, 3e4)
    tensor, memory = gpu["tensor_tflops"], gpu["bandwidth_gb_s"] / 1e3
    ends = {"x": [left, tensor / memory, right], "y": [left * memory, tensor, tensor]}
    line = {"color": plots.INK, "width": 1.5}
    figure.add_scatter(**ends, mode="lines", line=line, showlegend=False, hoverinfo="skip")
    for x, y, text in (
        (right, tensor, f"tensor cores, {tensor:.0f} TFLOP/s"),
        (8, 10 * memory, f"memory, {memory:.2f} TB/s"),
    ):
        say(figure, math.log10(x), math.log10(y), text, "right", 11, yanchor="bottom", yshift=6)
    named = [point | {"called": VERSIONS.get(point["name"], point["name"])} for point in points]
    edge = {"line": {"color": "white", "width": 1}}  # versions that lie on one spot are seen, one within another
    looks = {point["called"]: {"size": max(7, 22 - 3 * i), "marker": edge} for i, point in enumerate(named)}
    rates = lambda point: f"{point['intensity']:.3g} operations a byte, {point['rate']:.3g} TFLOP/s"
    said = lambda point: f"{point['called']}: {rates(point)} ({point['ms']:.3g} ms, {point['where']})"
    lines(figure, named, "intensity", "rate", "called", hover=said, looks=looks, mode="markers")
    axes = {"x": "operations for each byte of memory", "y": "10<sup>12</sup> operations a second"}
    ticks = {"log_x": [1, 10, 100, 1000, 10000], "log_y": [1, 10, 100, 1000]}
    figure = finish(figure, title, points, 340, **axes, **ticks)
    return figure.update_xaxes(range=[math.log10(left), math.log10(right)]).update_yaxes(range=[-0.6, 3.3])


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
