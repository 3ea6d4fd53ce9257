"""Figures of notebook 09, functions of rows and numbers; in the style of `plots`. Colour is never the only sign."""

from __future__ import annotations

import math

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ... import plots
from ..charts import bars, finish, groups, lines, say, squares
from . import tile
from .data import FEW, FUSED, PLANNED, TORCH, TWELL, by_nnz, estimate

NAMES = {
    PLANNED: "planned",
    "planned compiled": "planned, compiled",
    TWELL: "TwELL",
    "forced hot_cold": "hot/cold",
    TORCH: "torch's dense layer",
    FUSED: "fused dense layer",
}
LOOKS = {
    NAMES[TORCH]: {"colour": plots.INK, "symbol": "square", "size": 10},
    NAMES[FUSED]: {"colour": plots.GREEN, "symbol": "diamond", "size": 10},
    NAMES[TWELL]: {"colour": plots.RED, "symbol": "circle", "size": 10},
    NAMES[PLANNED]: {"colour": plots.BLUE, "symbol": "star", "size": 10},
}
VERSIONS = {  # of data.versions, as the figure calls them
    "sm80 gate_pack": "for older GPUs",
    "gate GEMM (torch), then pack": "torch's product, then pack",
    "gate GEMM (torch)": "torch's product, not packed",
    "sm90 gate_pack v1": "version 1: TMA, wgmma",
    "sm90 gate_pack v2": "version 2: clusters",
    "sm90 gate_pack v3": "version 3: packs beside",
}
NNZ = "neurons that fire for a token, mean (of 5,632)"


def parts(found: list[dict], own: list[dict] = ()) -> go.Figure:
    """Milliseconds of torch's dense layer, of the fused one and of the planned one, by mean nnz, with each step's
    factor. found: `data.parts` of the record; own: of `data.yours`, drawn as circles."""
    figure, places = go.Figure(), [f"{row['nnz']:.0f}" for row in found]
    for key, before, path, gives in (
        ("torch", "torch", TORCH, ""),
        ("fused", "torch", FUSED, ", and what fusing gives"),
        ("planned", "fused", PLANNED, ", and what sparsity adds"),
    ):
        look, name = {"colour": LOOKS[NAMES[path]]["colour"], "offsetgroup": key}, NAMES[path]
        said = lambda row, key=key: (
            f"nnz {row['nnz']:.0f}: {row[key]:.3g} ms" + f" {row['choice']}" * (key == "planned")
        )
        gain = lambda row, key=key, before=before: f"{row[before] / row[key]:.2f}x" if key != before else ""
        more = {"hover": said, "text": gain, "looks": {name + gives: look}, "constraintext": "none"}
        bars(figure, found, lambda row: f"{row['nnz']:.0f}", key, lambda row, name=name + gives: name, **more)
        mine = f"{name}: yours, now"
        near = lambda row: min(places, key=lambda place: abs(float(place) - row["nnz"]))
        more = {"hover": said, "looks": {mine: look | {"symbol": "circle", "size": 11}}, "mode": "markers"}
        lines(figure, own, near, key, lambda row, mine=mine: mine, **more)
    title = "16,384 tokens: what the fused dense layer gives, and what sparsity adds"
    figure = finish(figure, title, [*found, *own], 280, x=NNZ, y="ms").update_xaxes(type="category")
    return figure.update_layout(barmode="group", scattermode="group")


def against_nnz(rows: list[dict], tokens: int = 16384) -> go.Figure:
    """Recorded milliseconds (`data.recorded`) over nnz, with the floor of the dense layer and the estimate of TwELL."""
    figure, found = go.Figure(), by_nnz(rows, tokens)
    ends = [row["nnz"] for row in found]
    span = [min(ends) * (max(ends) / min(ends)) ** (i / 60) for i in range(61)] if found else []
    for name, colour, which in (("floor of a dense layer", plots.GREY, 0), ("estimate for TwELL", plots.RED, 1)):
        points = [{"nnz": nnz, "ms": estimate(nnz, tokens)[which]} for nnz in span]
        more = {"looks": {name: {"colour": colour, "dash": "dot"}}, "mode": "lines"}
        lines(figure, points, "nnz", "ms", lambda row, name=name: name, **more)
    name = lambda row: NAMES[row["path"]]
    said = lambda row: f"{name(row)}, nnz {row['nnz']:.0f}: {row['ms']:.3g} ms"
    found.sort(key=lambda row: [*LOOKS].index(name(row)))
    lines(figure, found, "nnz", "ms", name, hover=said, looks=LOOKS)
    title, ticks = f"{tokens:,} tokens: a layer's time, by neurons that fire", {round(row["nnz"]) for row in found}
    figure = finish(figure, title, found, 280, x=NNZ, y="ms", log_x=ticks)
    return figure.update_yaxes(range=[0, 1.25 * max((row["ms"] for row in found), default=1)])


def loss_map(cells: list[dict]) -> go.Figure:
    """Times as fast as dense (`data.cells`) for each path and workload, a column, grouped by tokens: blue wins, orange
    loses."""
    figure = go.Figure()
    order = [path for path in reversed(NAMES) if any(cell["path"] == path for cell in cells)]
    places, labels, first = [], [], 0.0  # of the columns, from left to right, with a gap after each number of tokens
    for count, here in groups(sorted(cells, key=lambda cell: cell["tokens"]), "tokens").items():
        nnzs: list[float] = []  # of each workload: a drawn one only comes near the mean asked for
        for nnz in sorted(cell["nnz"] for cell in here):
            if not nnzs or nnz > 1.15 * nnzs[-1]:
                nnzs.append(nnz)
        z, text, hover = ([[empty] * len(nnzs) for _ in order] for empty in (None, "", ""))
        for cell in here:
            line, nearest = order.index(cell["path"]), min(nnzs, key=lambda nnz: abs(nnz - cell["nnz"]))
            place = nnzs.index(nearest)
            z[line][place], text[line][place] = max(-1.0, min(1.0, math.log2(cell["x"]))), f"{cell['x']:.2f}"
            takes = f", takes {cell['choice']}" if cell["choice"] else ""
            hover[line][place] = f"{NAMES[cell['path']]}, nnz {cell['nnz']:.0f}: {cell['x']:.2f}x{takes}"
        figure.add_heatmap(x0=first, dx=1, y=[NAMES[path] for path in order], z=z, text=text, hovertext=hover)
        say(figure, first + (len(nnzs) - 1) / 2, 1, f"{count:,}", yref="paper", yanchor="bottom")
        places += [first + place for place in range(len(nnzs))]
        labels += [f"{nnz:.0f}" for nnz in nnzs]
        first += len(nnzs) + 0.4
    colours = [[0, "#EE9A66"], [0.45, "#F9E2D2"], [0.5, "#FFFFFF"], [0.55, "#D5E6F2"], [1, "#5FA8D3"]]
    figure.update_traces(zmin=-1, zmax=1, colorscale=colours, showscale=False, showlegend=False, hoverongaps=False)
    figure.update_traces(texttemplate="%{text}", textfont={"size": 10, "color": plots.INK}, hoverinfo="text")
    figure.update_traces(xgap=2, ygap=2)
    say(figure, 0, 1, "tokens", "right", xref="paper", xshift=-6, yref="paper", yanchor="bottom")
    title = "Times as fast as torch's dense layer, by the GPU's clock: blue wins, orange loses"
    told = f"up to {FEW} tokens replayed from a CUDA graph; the README counts plain calls"
    figure = finish(figure, title, cells, 32 * len(order), x=NNZ, also=[told])
    look = {"tickvals": places, "ticktext": labels, "showgrid": False, "zeroline": False, "range": [-0.7, first - 0.7]}
    figure.update_xaxes(**look).update_yaxes(showgrid=False, type="category")
    return figure.update_layout(margin_l=120).update_annotations(font_size=11)


# ---- the gate kernel beside its floor ----


def roofline(points: list[dict], gpu: dict) -> go.Figure:
    """Operations a second over operations a byte (`data.points`) under the peaks of a GPU of data/gpus.json."""
    title = "Roofline: no kernel gets above the slope (memory) or the flat roof (tensor cores)"
    if not points:
        return finish(go.Figure(), title)
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
    """The gate, packed, by each version (`data.versions`), beside the least time that the tensor cores allow, a
    line."""
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


# ---- drawings ----


def pipeline() -> go.Figure:
    """Who works when in a model of the pipeline (`tile.schedule`): tiles packed at their end, and beside the next."""
    titles = ["v1, v2: a tile is packed when it is done", "v3: it is packed in pieces beside the next tile's products"]
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.2, subplot_titles=titles)
    stages = (plots.SKY, "#F3D58F", "#9BD8C4", "#E9C3D6")
    for row, beside in enumerate((False, True), 1):
        parts = [part | {"takes": part["end"] - part["start"]} for part in tile.schedule(beside)]
        colours = [plots.RED if part["stage"] is None else stages[part["stage"]] for part in parts]
        more = {"base": [part["start"] for part in parts], "textposition": "inside", "insidetextanchor": "middle"}
        looks = {None: {"marker": {"color": colours, "line": {"color": "white", "width": 1}}}}
        more |= {"text": lambda part: part["what"], "looks": looks, "across": True, "row": row, "col": 1}
        bars(figure, parts, "who", "takes", lambda _: None, **more)
    figure.update_xaxes(title_text="time, in steps of a product", row=2, col=1).update_xaxes(showgrid=False)
    order = {"categoryorder": "array", "categoryarray": [tile.PACKING, tile.TENSOR, tile.PRODUCER]}
    figure.update_yaxes(showgrid=False, **order).update_annotations(font_size=12, x=0, xanchor="left")
    title = "Three tiles of 8 steps (really 32); colour: the stage, number: the step"
    figure = plots.styled(figure, title, height=380)
    return figure.update_layout(showlegend=False, margin={"l": 125, "t": 85}, barmode="overlay")


def sums() -> go.Figure:
    """Return which lane and register hold which sum: the first warp's 16 rows of a wgmma tile, its first 16 columns."""
    _, lane, register = (each[:16, :16].tolist() for each in tile.sums())
    texts = [[f"{a}·d{b}" for a, b in zip(*pair)] for pair in zip(lane, register)]
    look = {"texttemplate": "%{text}", "textfont": {"size": 10, "color": plots.INK}, "xgap": 2, "ygap": 2}
    hover = "row %{y}, column %{x}: lane and register %{text}<extra></extra>"
    colours = ("#7FB8D8", "#F2CF7F", "#7FCEB9", "#E5BBD2")  # of the four lanes that share a row
    numbers = [[each % tile.QUAD for each in line] for line in lane]
    figure = squares(go.Figure(), numbers, colours, text=texts, hovertemplate=hover, **look)
    figure.update_xaxes(title_text="column (the first 16 of 256)", dtick=1, showgrid=False)
    figure.update_yaxes(title_text="row (of warp 0: the first 16 of 64)", dtick=1, showgrid=False)
    figure.update_yaxes(autorange="reversed", zeroline=False)
    title = "Who holds the sums of a 64 x 256 tile: lane·register, in warp 0; four lanes share a row"
    return plots.styled(figure, title, height=470).update_layout(margin={"t": 60, "b": 45, "l": 55})
