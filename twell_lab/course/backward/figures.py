"""Figures of the notebook on the backward pass, each a function of rows and numbers; in the style of `plots`."""

from __future__ import annotations

import math

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ... import plots
from ..charts import bars, finish, grids, lines, one
from ..drawing import say, squares
from ..recorded import LOGNORMAL
from ..roofline.data import Rates
from .data import dense_floor
from .measured import SPARSE

NOTHING, KEPT = "#F4F4F4", plots.BLUE
KINDS = {"zero": NOTHING, "not zero, gate silent": "#F3C98B", "not zero, gate fired": KEPT}
PICKED = (plots.RED, plots.GREEN, plots.PURPLE, plots.ORANGE, plots.SKY)
LISTS = ("lists of rows: spans, kept, lost", plots.PURPLE)
TENSORS = {  # what is kept -> what the legend calls it, and its colour
    "x": ("x", plots.GREY),
    "relu(gate)": ("relu(gate)", plots.BLUE),
    "up": ("up", plots.SKY),
    "h": ("h", plots.GREEN),
    "down_t": ("down_t: Wd transposed", "#BDBDBD"),
    "words": ("words: g and its neuron", plots.RED),
    "ups": ("ups: u", plots.ORANGE),
    **dict.fromkeys(("spans", "kept", "lost"), LISTS),
}
PARTS = dict(
    zip(
        ("gate, packed", "u", "y", "dh", "dx", "weight gradients"),
        (plots.GREY, plots.SKY, plots.BLUE, plots.ORANGE, plots.RED, plots.PURPLE),
    )
)
PATHS = {
    "planned": "planned, beside eager torch",
    "planned compiled": "planned, compiled, beside compiled torch",
    SPARSE: "sparse, beside eager torch",
}
STEP = "A training step of one layer, 16,384 tokens"


def quantities(values: dict, fired) -> go.Figure:
    """Matrices [tokens, d_ff] cell by cell, in three colours: not zero where the gate fired, not zero elsewhere, zero.

    values: name -> tensor. fired: bool, of their shape."""
    kinds = {name: ((value != 0) * (1 + fired.int())).tolist() for name, value in values.items()}
    title = "Which values are not zero, and which of them the gate lets through"
    return grids(kinds, KINDS, f"{title}<br><sub>tokens down, neurons across</sub>", 400, xgap=0.5, ygap=0.5)


def product(fired, d_model: int, row: int, of: str) -> go.Figure:
    """One of two products of the backward pass; in colour, one row of the result and the rows that it reads.

    of "token": dh = dy Wd where the gate fired, and the row of this token. of "neuron": dWd^T = h^T dy, and the row of
    this neuron. fired: bool [tokens, d_ff]."""
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


def lists(fired, picked: tuple[int, ...] = ()) -> go.Figure:
    """The same kept values twice: for each token the list of its neurons, for each neuron the list of its tokens.

    fired: bool [tokens, neurons]; picked: neurons to show in colour, at most five."""
    titles = ["by token: its neurons", "by neuron: its tokens"]
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.12, subplot_titles=titles)
    colour = {neuron: 2 + i for i, neuron in enumerate(picked)}
    for col, (mask, axis) in enumerate(((fired, "token"), (fired.T, "neuron")), 1):
        each = [line.nonzero()[:, 0].tolist() for line in mask]
        gaps = [[None] * (max(map(len, each)) - len(line)) for line in each]
        shades = [[colour.get(item if col == 1 else at, 1) for item in line] for at, line in enumerate(each)]
        squares(
            figure,
            [line + gap for line, gap in zip(shades, gaps)],
            (NOTHING, plots.FAINT, *PICKED),
            text=[[*map(str, line), *[""] * len(gap)] for line, gap in zip(each, gaps)],
            texttemplate="%{text}",
            textfont={"color": plots.INK},
            xgap=1,
            ygap=1,
            row=1,
            col=col,
            hovertemplate=f"{axis} %{{y}}, place %{{x}}: %{{text}}<extra></extra>",
        )
        figure.update_yaxes(title_text=axis, autorange="reversed", tickfont={"size": 9}, row=1, col=col)
    figure.update_xaxes(title_text="place in the list", dtick=1, showgrid=False, zeroline=False)
    figure.update_yaxes(dtick=1, showgrid=False, zeroline=False)
    title = f"The same {int(fired.sum())} entries, by token and by neuron"
    return finish(figure, title, height=17 * max(fired.shape)).update_annotations(font_size=13)


def memory(sizes: dict[str, dict[str, int]], title: str) -> go.Figure:
    """Return what is kept from forward to backward: a bar for each way, divided by tensor. sizes: way -> tensor ->
    bytes."""
    totals = {way: sum(tensors.values()) / 2**20 for way, tensors in sizes.items()}
    most = max(totals.values())
    kept: dict[tuple[str, str], float] = {}
    for way, tensors in sizes.items():
        for tensor, size in tensors.items():
            at = way, TENSORS[tensor][0]
            kept[at] = kept.get(at, 0.0) + size / 2**20
    thin = lambda mib: f", {mib:.2g} MiB" * (mib < 0.002 * most)  # too thin to be seen
    rows = [{"way": way, "name": name, "tensor": name + thin(mib), "mib": mib} for (way, name), mib in kept.items()]
    colours = dict(TENSORS.values())
    looks = {row["tensor"]: {"colour": colours[row["name"]]} for row in rows}
    short = lambda row: row["tensor"].split(":")[0] if row["mib"] > 0.05 * most else ""
    said = lambda row: f"{row['tensor']}: {row['mib']:.4g} MiB"
    inside = {"textposition": "inside", "insidetextanchor": "middle", "across": True}
    figure = bars(go.Figure(), rows, "way", "mib", "tensor", hover=said, text=short, looks=looks, **inside)
    for way, total in totals.items():
        say(figure, total, way, f"{total:.0f} MiB", "left", xshift=4)
    figure = finish(figure, title, height=70 + 70 * len(sizes), x="MiB", across=True)
    return figure.update_layout(barmode="stack").update_xaxes(range=[0, 1.14 * most])


def budget(floors: dict[int, list[dict]], reached: Rates, recorded: list[dict] = ()) -> go.Figure:
    """The least time of a sparse step by part, for each nnz, beside that of a dense one; recorded steps as marks.

    floors: nnz -> data.floors at the rates `reached`; recorded: rows of measured.layers."""
    name = {nnz: f"nnz {nnz}: {sum(part['ms'] for part in parts):.2f} ms" for nnz, parts in floors.items()}
    rows = [part | {"name": name[nnz]} for nnz, parts in floors.items() for part in parts]
    said = lambda row: f"{row['part']}: {row['ms']:.3g} ms"
    looks = {part: {"colour": colour} for part, colour in PARTS.items()}
    figure = bars(go.Figure(), rows, "name", "ms", "part", hover=said, looks=looks)
    marks = {SPARSE: "sparse, recorded", "dense eager": "dense, recorded", "dense compiled": "dense compiled, recorded"}
    timed = [row for row in recorded if row["workload"] == LOGNORMAL and row["path"] in marks]
    timed = [row | {"name": name[round(row["nnz"])]} for row in timed if round(row["nnz"]) in name]
    timed.sort(key=lambda row: [*marks].index(row["path"]))
    looks = {}
    for mark, symbol in zip(marks.values(), ("diamond", "x-thin", "cross-thin")):
        line = {"color": "white" if symbol == "diamond" else plots.INK, "width": 2}
        looks[mark] = {"colour": plots.INK, "symbol": symbol, "size": 11, "marker": {"line": line}}
    said = lambda row: f"{marks[row['path']]}: {row['ms']:.3g} ms"
    lines(figure, timed, "name", "ms", lambda row: marks[row["path"]], hover=said, looks=looks, mode="markers")
    dense = dense_floor(reached)
    figure.add_hline(y=dense, line={"color": plots.INK, "width": 1, "dash": "dash"})
    text = f"nine dense products on the tensor cores: {dense:.2f} ms"
    say(figure, 0, dense, text, "left", 11, xref="paper", yanchor="top")
    rates = "{:.0f} TFLOP/s, {:.1f} TB/s from memory, {:.1f} from the L2"
    told = "at rates that an H100 reached: " + rates.format(*(rate / 1e12 for rate in reached[:3]))
    title = "The parts of a sparse step, if every row came from the L2 cache"
    axes = {"x": "neurons firing for a token on average, and the sum of the parts", "y": "ms, 16,384 tokens"}
    return finish(figure, title, timed, 330, also=[told], **axes).update_layout(barmode="stack")


def steps(rows: list[dict]) -> go.Figure:
    """Training steps: times as fast as dense, over nnz; eager against eager, compiled against compiled.

    rows: of measured.layers, recorded (dotted) and yours."""
    times = lambda row: row.get("x_compiled" if row["path"] == "planned compiled" else "x_dense")
    mine = lambda row: not row["where"].startswith("recorded")
    name = lambda row: PATHS[row["path"]] + f", {row['where']}" * mine(row)
    said = lambda row: f"{name(row)}, nnz {row['nnz']:.3g}: {times(row):.2f}x, {row['ms']:.3g} ms"
    shown = [row for row in rows if row["path"] in PATHS and row["workload"] == LOGNORMAL]
    looks = {}
    for row in shown:
        open_circle = {"symbol": "circle-open", "size": 15} if row["path"] == "planned" else {"symbol": "circle"}
        colour = plots.COLOURS[[*PATHS].index(row["path"])]
        looks[name(row)] = open_circle | {"colour": colour, "dash": "solid" if mine(row) else "dot"}
    figure = one(lines(go.Figure(), shown, "nnz", times, name, hover=said, looks=looks))
    axes = {"x": "neurons firing for a token, mean (of 5,632)", "y": "times as fast as the dense step, GPU time"}
    return finish(figure, STEP, shown, 290, **axes).update_xaxes(rangemode="tozero")


def paths(rows: list[dict]) -> go.Figure:
    """Milliseconds of the sparse step over nnz, for each kind of workload, beside torch's dense step. Circles are the
    steps that a layer plans. rows: of measured.layers."""
    figure = go.Figure()
    said = lambda row: f"{row['workload']}, nnz {row['nnz']:.3g}: {row['path']}, {row['ms']:.3g} ms"
    of = lambda path: [row for row in rows if row["path"] == path]
    marker = {"line": {"width": 1.5}}
    looks = {"planned": {"symbol": "circle-open", "size": 17, "colour": plots.INK, "marker": marker, "mode": "markers"}}
    lines(figure, of("planned"), "nnz", "ms", "path", hover=said, looks=looks)
    looks = {}
    for row in of(SPARSE):
        drawn = row["workload"].startswith("independent")
        look = {"symbol": "circle" if drawn else "diamond", "mode": "lines+markers" if drawn else "markers"}
        looks[f"sparse: {row['of']}"] = look | {"size": 9}
    lines(figure, of(SPARSE), "nnz", "ms", lambda row: f"sparse: {row['of']}", hover=said, looks=looks)
    for path, dash in (("dense eager", "dash"), ("dense compiled", "dot")):
        name = f"torch, {path}"
        looks = {name: {"colour": plots.GREY, "dash": dash, "mode": "lines"}}
        lines(figure, of(path), "nnz", "ms", lambda row, name=name: name, hover=said, looks=looks)
    axes = {"x": "neurons firing for a token on average", "y": "ms, forward and backward"}
    ticks = {"log_x": [5, 10, 20, 50, 100, 200], "log_y": [1, 2, 5, 10, 20, 50]}
    return finish(figure, STEP, rows, 350, **axes, **ticks)


def models(rows: list[dict]) -> go.Figure:
    """Return how many times as fast the training step of whole models is, eager and compiled. rows: measured.wholes."""
    names = {"eager": PATHS["planned"], "compiled": PATHS["planned compiled"]}
    looks = dict(zip(names.values(), ({"colour": plots.BLUE}, {"colour": plots.ORANGE})))
    said = lambda row: f"{row['x']:.2f} times; eager {row['mib']:,.0f} MiB at most, torch {row['dense_mib']:,.0f}"
    named, text = lambda row: names[row["beside"]], lambda row: f"{row['x']:.2f}"
    inside = {"textposition": "inside"}  # above a bar it would lie on the line of 1
    figure = bars(go.Figure(), rows, "name", "x", named, hover=said, text=text, looks=looks, **inside)
    title, axis = "A training step of whole models", "times as fast as torch's dense model"
    return finish(one(figure), title, rows, 260, y=axis).update_layout(barmode="group")


def switching(history: list[dict], d_ff: int, limit: float) -> go.Figure:
    """A run in which layers change their path: neurons firing by layer, and the bytes kept for the backward pass.

    history: rows {step, nnz: by layer, paths: by layer, "dense" or "twell", bytes}; limit: the nnz below which a layer
    becomes sparse. A line is dotted while its layer is dense, and a diamond marks a change of path. A change is made
    after its step, so the bytes of a row are drawn from the step of the row before on."""
    titles = ["dotted: dense; solid: sparse; diamond: a change", "kept from forward to backward"]
    cuts = {"rows": 1, "cols": 2, "column_widths": [0.64, 0.36], "horizontal_spacing": 0.13}
    figure = make_subplots(**cuts, subplot_titles=titles)
    for number, colour in zip(range(len(history[0]["nnz"])), plots.COLOURS, strict=False):
        name, paths = f"layer {number}", [row["paths"][number] for row in history]
        nnz = lambda row, number=number: row["nnz"][number]
        said = lambda row, nnz=nnz, name=name: f"{name}, step {row['step']}: {nnz(row):.1f}"
        changes = [i for i in range(1, len(history)) if paths[i] != paths[i - 1]]
        for first, last in zip([0, *changes], [*changes, len(history) - 1]):
            sparse = paths[first] == "twell"
            look = {
                "colour": colour,
                "dash": "solid" if sparse else "dot",
                "width": 3 if sparse else 2,
                "mode": "lines",
            }
            part, more = history[first : last + 1], {"hover": said, "looks": {name: look}, "row": 1, "col": 1}
            lines(figure, part, "step", nnz, lambda row, name=name: name, **more)
        look = {"colour": colour, "size": 12, "symbol": "diamond", "mode": "markers"}
        more = {"hover": said, "looks": {name: look}, "row": 1, "col": 1}
        lines(figure, [history[i] for i in changes], "step", nnz, lambda row, name=name: name, **more)
    figure.add_hline(y=limit, line={"color": plots.INK, "width": 1, "dash": "dash"}, row=1, col=1)
    end = history[-1]["step"]
    say(figure, end, math.log10(limit), "break-even", "right", yanchor="bottom", row=1, col=1)
    mib, look = lambda row: row["bytes"] / 2**20, {"line": {"color": plots.INK, "shape": "vh"}, "mode": "lines"}
    said = lambda row: f"step {row['step']}: {mib(row):.1f} MiB"
    lines(figure, history, "step", mib, lambda row: "bytes", hover=said, showlegend=False, row=1, col=2, **look)
    figure.update_xaxes(title_text="step")
    ticks = [1, 2, 5, 10, 20, 50, 100, 200, 500]
    figure.update_yaxes(title_text="MiB", rangemode="tozero", row=1, col=2)
    figure = finish(figure, "A run whose layers change over", height=270).update_annotations(font_size=12)
    name = f"neurons firing for a token, of {d_ff} (log scale)"
    return figure.update_yaxes(type="log", tickvals=ticks, title_text=name, row=1, col=1)
