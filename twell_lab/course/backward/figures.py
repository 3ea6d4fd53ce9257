"""Figures of the notebook on the backward pass, each a function of rows and numbers; in the style of `plots`."""

from __future__ import annotations

import math

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ... import plots
from ...analysis.costs import Rates
from ..charts import bars, finish, grids, groups, lines, one, say
from .data import D_FF, D_MODEL, SPARSE, TOKENS

NOTHING, KEPT = "#F4F4F4", plots.BLUE
KINDS = {"zero": NOTHING, "not zero, gate silent": "#F3C98B", "not zero, gate fired": KEPT}
PICKED = (plots.RED, plots.GREEN, plots.PURPLE, plots.ORANGE, plots.SKY)
PATHS = {
    "planned": "planned, beside eager torch",
    "planned compiled": "planned, compiled, beside compiled torch",
    SPARSE: "sparse, beside eager torch",
}


def quantities(values: dict, fired) -> go.Figure:
    """Matrices [tokens, d_ff] by name, in three colours: not zero where the gate fired (bool), not zero elsewhere,
    zero."""
    kinds = {name: ((value != 0) * (1 + fired.int())).tolist() for name, value in values.items()}
    title = "Which values are not zero, and which of them the gate lets through"
    return grids(kinds, KINDS, f"{title}<br><sub>tokens down, neurons across</sub>", 400, xgap=0.5, ygap=0.5)


def product(fired, d_model: int, row: int, of: str) -> go.Figure:
    """One of two products of the backward pass; in colour, a row of the result and the rows that it reads: of "token"
    dh = dy Wd where the gate fired, of "neuron" dWd^T = h^T dy. fired: bool [tokens, d_ff]."""
    grid = (fired if of == "token" else fired.T).tolist()
    uses = [j for j, one in enumerate(grid[row]) if one]
    colour = {j: 2 + i % len(PICKED) for i, j in enumerate(uses)}
    plain = [[int(i == row)] * d_model for i in range(len(grid))]
    read = [[colour.get(j, 0)] * d_model for j in range(len(grid[0]))]
    sparse = [[one and (colour[j] if i == row else 1) for j, one in enumerate(line)] for i, line in enumerate(grid)]
    sparse = [[int(one) for one in line] for line in sparse]
    if of == "token":
        panels = {"dy  [tokens, d_model]": plain, "Wdᵀ  [neurons, d_model]": read, "dh  [tokens, neurons]": sparse}
        title = f"dh, token {row}: {len(uses)} products of its dy with one row of Wdᵀ each"
    else:
        panels = {"hᵀ  [neurons, tokens]": sparse, "dy  [tokens, d_model]": read, "dWdᵀ  [neurons, d_model]": plain}
        title = f"dWdᵀ, neuron {row}: the sum of {len(uses)} rows of dy, each times one h"
    widths = [len(matrix[0]) + 6 for matrix in panels.values()]
    return grids(panels, (NOTHING, "#8FBBDA", *PICKED), title, 290, widths=widths, xgap=0.5, ygap=0.5)


def budget(floors: dict[int, dict[str, float]], reached: Rates, recorded: list[dict] = ()) -> go.Figure:
    """The least time of a sparse step by part, at the rates `reached` (floors: nnz -> part -> ms), beside that of a
    dense one; recorded rows of data.layers as marks."""
    name = {nnz: f"nnz {nnz}: {sum(parts.values()):.2f} ms" for nnz, parts in floors.items()}
    rows = [{"name": name[nnz], "part": part, "ms": ms} for nnz, parts in floors.items() for part, ms in parts.items()]
    said = lambda row: f"{row['part']}: {row['ms']:.3g} ms"
    figure = bars(go.Figure(), rows, "name", "ms", "part", hover=said, looks={"gate, packed": {"colour": plots.GREY}})
    marks = {SPARSE: "diamond", "dense eager": "x", "dense compiled": "cross"}
    timed = [row | {"name": name.get(round(row["nnz"])), "part": f"{row['path']}, recorded"} for row in recorded]
    timed = [row for row in timed if row["name"] and row["path"] in marks]
    edge = {"size": 12, "marker": {"line": {"color": "white", "width": 1}}}
    looks = {f"{path}, recorded": edge | {"colour": plots.INK, "symbol": symbol} for path, symbol in marks.items()}
    lines(figure, timed, "name", "ms", "part", hover=said, looks=looks, mode="markers")
    dense = 1e3 * 9 * 2 * TOKENS * D_MODEL * D_FF / reached.matmul
    figure.add_hline(y=dense, line={"color": plots.INK, "width": 1, "dash": "dash"})
    text = f"nine dense products on the tensor cores: {dense:.2f} ms"
    say(figure, 0, dense, text, "left", 11, xref="paper", yanchor="top")
    rates = "{:.0f} TFLOP/s, {:.1f} TB/s from memory, {:.1f} from the L2"
    told = "at rates that an H100 reached: " + rates.format(
        *(rate / 1e12 for rate in (reached.matmul, reached.bandwidth, reached.l2))
    )
    title = "The parts of a sparse step, if every row came from the L2 cache"
    axes = {"x": "neurons firing for a token on average, and the sum of the parts", "y": "ms, 16,384 tokens"}
    return finish(figure, title, timed, 330, also=[told], **axes).update_layout(barmode="stack")


def steps(rows: list[dict]) -> go.Figure:
    """Training steps, recorded (dotted) and yours: times as fast as dense, over nnz; eager against eager, compiled
    against compiled."""
    times = lambda row: row.get("x_compiled" if row["path"] == "planned compiled" else "x_dense")
    mine = lambda row: not row["where"].startswith("recorded")
    name = lambda row: PATHS[row["path"]] + f", {row['where']}" * mine(row)
    said = lambda row: f"{name(row)}, nnz {row['nnz']:.3g}: {times(row):.2f}x, {row['ms']:.3g} ms"
    shown = [row for row in rows if row["path"] in PATHS]
    looks = {}
    for row in shown:
        open_circle = {"symbol": "circle-open", "size": 15} if row["path"] == "planned" else {"symbol": "circle"}
        colour = plots.COLOURS[[*PATHS].index(row["path"])]
        looks[name(row)] = open_circle | {"colour": colour, "dash": "solid" if mine(row) else "dot"}
    figure = one(lines(go.Figure(), shown, "nnz", times, name, hover=said, looks=looks))
    axes = {"x": "neurons firing for a token, mean (of 5,632)", "y": "times as fast as the dense step, GPU time"}
    title = "A training step of one layer, 16,384 tokens"
    return finish(figure, title, shown, 290, **axes).update_xaxes(rangemode="tozero")


def switching(history: list[dict], d_ff: int, limit: float) -> go.Figure:
    """A run whose layers change their path where nnz falls below `limit`: neurons firing, and bytes kept for the
    backward pass. history: rows {step, nnz: by layer, paths: by layer, "dense" or "twell", bytes}. A change is made
    after its step, so the bytes of a row are drawn from the step of the row before on."""
    titles = ["open circle: dense; diamond: sparse", "kept from forward to backward"]
    cuts = {"rows": 1, "cols": 2, "column_widths": [0.64, 0.36], "horizontal_spacing": 0.13}
    figure = make_subplots(**cuts, subplot_titles=titles)
    rows = [
        {"step": row["step"], "layer": f"layer {number}", "nnz": nnz, "path": path}
        for row in history
        for number, (nnz, path) in enumerate(zip(row["nnz"], row["paths"]))
    ]
    said = lambda row: f"{row['layer']}, step {row['step']}: {row['nnz']:.1f}, {row['path']}"
    sign = {"dense": "circle-open", "twell": "diamond"}
    looks = {layer: {"symbol": [sign[row["path"]] for row in mine]} for layer, mine in groups(rows, "layer").items()}
    lines(figure, rows, "step", "nnz", "layer", hover=said, looks=looks, row=1, col=1)
    figure.add_hline(y=limit, line={"color": plots.INK, "width": 1, "dash": "dash"}, row=1, col=1)
    end = history[-1]["step"]
    say(figure, end, math.log10(limit), "break-even", "right", yanchor="bottom", row=1, col=1)
    mib, look = lambda row: row["bytes"] / 2**20, {"line": {"color": plots.INK, "shape": "vh"}, "mode": "lines"}
    lines(figure, history, "step", mib, lambda row: "bytes", showlegend=False, row=1, col=2, **look)
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text="MiB", rangemode="tozero", row=1, col=2)
    figure = finish(figure, "A run whose layers change over", height=270).update_annotations(font_size=12)
    ticks = {"tickvals": [1, 2, 5, 10, 20, 50, 100, 200, 500]}
    name = f"neurons firing for a token, of {d_ff} (log scale)"
    return figure.update_yaxes(type="log", title_text=name, row=1, col=1, **ticks)
