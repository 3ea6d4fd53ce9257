"""Figures of the notebook on the backward pass, each a function of rows and numbers; in the style of `plots`."""

from __future__ import annotations

import math

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ... import plots
from ...core import InputError
from ..drawing import legend_key, note, row_at, squares
from ..recorded import sources
from ..roofline.data import Rates
from .data import dense_floor

NOTHING, UNUSED, KEPT = "#F4F4F4", "#F3C98B", plots.BLUE
# A legend of many entries, below the figure, in as many lines as it takes.
BELOW = {"orientation": "h", "x": 0, "y": -0.17, "yanchor": "top"}
PICKED = (plots.RED, plots.GREEN, plots.PURPLE, plots.ORANGE, plots.SKY)


def quantities(values: dict[str, list[list[float]]], fired: list[list[bool]]) -> go.Figure:
    """Matrices [tokens, d_ff] cell by cell, in three colours: not zero where the gate fired, not zero elsewhere, zero.

    values: name -> matrix, 1 to 6 of them, three on a line.
    """
    if not 1 <= len(values) <= 6:
        raise InputError(f"there are {len(values)} matrices; 1 to 6 are accepted")
    across = min(3, len(values))
    lines = -(-len(values) // across)
    figure = make_subplots(
        rows=lines, cols=across, subplot_titles=list(values), horizontal_spacing=0.04, vertical_spacing=0.14
    )
    for at, (name, matrix) in enumerate(values.items()):
        kind = [
            [0 if not value else 2 if here else 1 for value, here in zip(row, mask, strict=True)]
            for row, mask in zip(matrix, fired, strict=True)
        ]
        squares(
            figure,
            kind,
            (NOTHING, UNUSED, KEPT),
            xgap=0.5,
            ygap=0.5,
            row=at // across + 1,
            col=at % across + 1,
            customdata=[[round(value, 4) for value in row] for row in matrix],
            hovertemplate=f"{name}: token %{{y}}, neuron %{{x}}: %{{customdata:.3g}}<extra></extra>",
        )
    for colour, name in ((KEPT, "not zero, gate fired"), (UNUSED, "not zero, gate silent"), (NOTHING, "zero")):
        legend_key(figure, name, colour)
    figure.update_xaxes(showticklabels=False)
    figure.update_yaxes(showticklabels=False, autorange="reversed")
    figure.update_xaxes(title_text="neuron", row=lines)
    figure.update_yaxes(title_text="token", col=1)
    figure = plots.styled(
        figure, "Which values are not zero, and which of them the gate lets through", 160 + 190 * lines
    )
    figure.update_annotations(font_size=13)
    return figure.update_layout(legend={"y": -0.12, "yanchor": "top"}, margin={"t": 75, "b": 70})


def product(fired: list[list[bool]], d_model: int, *, token: int | None = None, neuron: int | None = None) -> go.Figure:
    """One of two products of the backward pass; in colour, one row of the result and the rows that it reads.

    With token: dh = dy Wd where the gate fired, and the row of this token. With neuron: dWd^T = h^T dy, and the row of
    this neuron.
    """
    tokens, d_ff = len(fired), len(fired[0])
    row, most = (token, tokens) if neuron is None else (neuron, d_ff)
    if (token is None) == (neuron is None) or not 0 <= row < most:
        raise InputError(
            f"token is {token!r} and neuron {neuron!r}; one of them, below {tokens} or {d_ff}, is accepted"
        )
    wide = range(d_model)
    if neuron is None:
        uses = [n for n in range(d_ff) if fired[token][n]]
        colour = {n: 2 + i % len(PICKED) for i, n in enumerate(uses)}
        left = [[1 if t == token else 0 for _ in wide] for t in range(tokens)]
        middle = [[colour.get(n, 0) for _ in wide] for n in range(d_ff)]
        right = [[(colour[n] if t == token else 1) if fired[t][n] else 0 for n in range(d_ff)] for t in range(tokens)]
        names = ("dy  [tokens, d_model]", "Wdᵀ  [neurons, d_model]", "dh  [tokens, neurons]")
        title = f"dh, token {token}: {len(uses)} products of its dy with one row of Wdᵀ each"
        axes = ("token", "neuron", "token")
    else:
        uses = [t for t in range(tokens) if fired[t][neuron]]
        colour = {t: 2 + i % len(PICKED) for i, t in enumerate(uses)}
        left = [[(colour[t] if n == neuron else 1) if fired[t][n] else 0 for t in range(tokens)] for n in range(d_ff)]
        middle = [[colour.get(t, 0) for _ in wide] for t in range(tokens)]
        right = [[1 if n == neuron else 0 for _ in wide] for n in range(d_ff)]
        names = ("hᵀ  [neurons, tokens]", "dy  [tokens, d_model]", "dWdᵀ  [neurons, d_model]")
        title = f"dWdᵀ, neuron {neuron}: the sum of {len(uses)} rows of dy, each times one h"
        axes = ("neuron", "token", "neuron")
    figure = make_subplots(
        rows=1,
        cols=3,
        subplot_titles=names,
        horizontal_spacing=0.09,
        column_widths=[len(matrix[0]) + 6 for matrix in (left, middle, right)],
    )
    colours = (NOTHING, "#8FBBDA", *PICKED)
    for at, (matrix, axis) in enumerate(zip((left, middle, right), axes, strict=True), 1):
        squares(
            figure,
            matrix,
            colours,
            xgap=0.5,
            ygap=0.5,
            row=1,
            col=at,
            hovertemplate=f"{axis} %{{y}}<extra></extra>",
        )
        figure.update_yaxes(title_text=axis, title_standoff=4, row=1, col=at)
    figure.update_xaxes(showticklabels=False)
    figure.update_yaxes(autorange="reversed", showticklabels=False)
    figure = plots.styled(figure, title, height=400)
    figure.update_annotations(font_size=12)
    return figure.update_layout(margin={"t": 80, "b": 20})


def lists(rows: list[list[int]], columns: list[list[int]], picked: tuple[int, ...] = ()) -> go.Figure:
    """The same kept values twice: for each token the list of its neurons, for each neuron the list of its tokens.

    rows: neurons of each token; columns: tokens of each neuron; picked: neurons to show in colour, at most five.
    """
    if sorted((t, n) for t, row in enumerate(rows) for n in row) != sorted(
        (t, n) for n, column in enumerate(columns) for t in column
    ):
        raise InputError("rows and columns do not hold the same pairs; one must be the other, transposed")
    if len(picked) > len(PICKED):
        raise InputError(f"picked has {len(picked)} neurons; at most {len(PICKED)} are accepted")
    colour = {neuron: 2 + i for i, neuron in enumerate(picked)}
    colours = (NOTHING, plots.FAINT, *PICKED)
    figure = make_subplots(
        rows=1, cols=2, horizontal_spacing=0.12, subplot_titles=["by token: its neurons", "by neuron: its tokens"]
    )
    sides = (
        (rows, lambda at, item: colour.get(item, 1), "token"),
        (columns, lambda at, item: colour.get(at, 1), "neuron"),
    )
    for col, (each, shade, axis) in enumerate(sides, 1):
        longest = max((len(one) for one in each), default=0) or 1
        shades = [[shade(at, one[k]) if k < len(one) else None for k in range(longest)] for at, one in enumerate(each)]
        text = [[str(one[k]) if k < len(one) else "" for k in range(longest)] for one in each]
        squares(
            figure,
            shades,
            colours,
            text=text,
            texttemplate="%{text}",
            textfont={"color": plots.INK},
            xgap=1,
            ygap=1,
            row=1,
            col=col,
            hovertemplate=f"{axis} %{{y}}, place %{{x}}: %{{text}}<extra></extra>",
        )
        figure.update_yaxes(
            title_text=axis,
            autorange="reversed",
            dtick=1,
            tickfont={"size": 9},
            showgrid=False,
            zeroline=False,
            row=1,
            col=col,
        )
    figure.update_xaxes(title_text="place in the list", dtick=1, showgrid=False, zeroline=False)
    title = f"The same {sum(map(len, rows))} entries, by token and by neuron"
    figure = plots.styled(figure, title, height=max(330, 110 + 17 * max(len(rows), len(columns))))
    figure.update_annotations(font_size=13)
    return figure.update_layout(margin={"t": 75, "b": 50})


TENSORS = {
    "x": plots.GREY,
    "relu(gate)": plots.BLUE,
    "up": plots.SKY,
    "h": plots.GREEN,
    "down_t": "#BDBDBD",
    "words": plots.RED,
    "ups": plots.ORANGE,
    "lists of rows": plots.PURPLE,
}
OF_ROWS = ("spans", "kept", "lost")  # where rows lie, how many of each are kept, which did not fit: thin, so one part

SAID = {
    "down_t": "down_t: Wd transposed",
    "words": "words: g and its neuron",
    "ups": "ups: u",
    "lists of rows": "lists of rows: " + ", ".join(OF_ROWS),
}


def memory(sizes: dict[str, dict[str, int]], title: str) -> go.Figure:
    """Return what is kept from forward to backward: a bar for each way, divided by tensor. sizes: way -> tensor ->
    bytes.

    The lists of rows are drawn as one."""
    figure = go.Figure()
    sizes = {way: _rows_as_one(each) for way, each in sizes.items()}
    most = max(sum(each.values()) for each in sizes.values()) / 2**20
    for name in dict.fromkeys(name for each in sizes.values() for name in each):
        x = [each.get(name, 0) / 2**20 for each in sizes.values()]
        figure.add_bar(
            y=list(sizes),
            x=x,
            orientation="h",
            name=SAID.get(name, name) + f", {max(x):.2g} MiB" * (max(x) < 0.002 * most),  # too thin to be seen
            marker_color=TENSORS.get(name, plots.GREY),
            text=[name if value > 0.05 * most else "" for value in x],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            hovertemplate=f"{name}: %{{x:.4g}} MiB<extra></extra>",
        )
    for way, each in sizes.items():
        total = sum(each.values()) / 2**20
        figure.add_annotation(
            x=total, y=way, text=f" {total:.0f} MiB", xanchor="left", showarrow=False, font={"size": 12}
        )
    figure.update_xaxes(title_text="MiB", range=[0, 1.14 * most])
    figure.update_yaxes(autorange="reversed")
    figure = plots.styled(figure, title, height=230 + 70 * len(sizes)).update_layout(barmode="stack")
    return figure.update_layout(
        margin={"t": 45, "b": 140}, legend={"traceorder": "normal", "y": -0.32, "yanchor": "top"}
    )


def _rows_as_one(sizes: dict[str, int]) -> dict[str, int]:
    merged = {name: size for name, size in sizes.items() if name not in OF_ROWS}
    lists = [sizes[name] for name in OF_ROWS if name in sizes]
    return merged | ({"lists of rows": sum(lists)} if lists else {})


PARTS = {
    "gate, packed": plots.GREY,
    "u": plots.SKY,
    "y": plots.BLUE,
    "dh": plots.ORANGE,
    "dx": plots.RED,
    "weight gradients": plots.PURPLE,
}


def budget(floors: dict[str, list[dict]], reached: Rates, recorded: list[dict] = ()) -> go.Figure:
    """The least time of a sparse step by part, for each nnz, beside that of a dense one; recorded steps as marks.

    floors: nnz as text -> data.floors at the rates `reached`; recorded: rows of measured.steps.
    """
    dense_ms = dense_floor(reached)
    figure = go.Figure()
    place = {nnz: f"nnz {nnz}: {sum(part['ms'] for part in each):.2f} ms" for nnz, each in floors.items()}
    for name, colour in PARTS.items():
        figure.add_bar(
            x=list(place.values()),
            y=[next(part["ms"] for part in each if part["part"] == name) for each in floors.values()],
            name=name,
            marker_color=colour,
            hovertemplate=f"{name}: %{{y:.3g}} ms<extra></extra>",
        )
    figure.add_hline(y=dense_ms, line={"color": plots.INK, "width": 1, "dash": "dash"})
    figure.add_annotation(
        x=0,
        xref="paper",
        y=dense_ms,
        xanchor="left",
        yanchor="top",
        showarrow=False,
        font={"size": 11},
        text=f"nine dense products on the tensor cores: {dense_ms:.2f} ms",
    )
    marks = {
        "forced twell": ("sparse", "diamond"),
        "dense eager": ("dense", "x-thin"),
        "dense compiled": ("dense compiled", "cross-thin"),
    }
    for path, (name, symbol) in marks.items():
        rows = [row for row in recorded if row["path"] == path and row["column"] in floors]
        if rows:
            x, y = [place[row["column"]] for row in rows], [row["ms"] for row in rows]
            line = {"color": "white" if symbol == "diamond" else plots.INK, "width": 2}
            figure.add_scatter(
                x=x,
                y=y,
                mode="markers",
                name=f"{name}, recorded",
                marker={"symbol": symbol, "size": 11, "color": plots.INK, "line": line},
                hovertemplate=f"{name}, %{{x}}: %{{y:.3g}} ms<extra></extra>",
            )
    figure.update_xaxes(title_text="neurons firing for a token on average, and the sum of the parts", type="category")
    figure.update_yaxes(title_text="ms, 16,384 tokens", rangemode="tozero")
    where = sources([row for row in recorded if row["column"] in floors])
    tensor, memory, l2 = (each / 1e12 for each in (reached.tensor, reached.memory, reached.l2))
    rates = f"{tensor:.0f} TFLOP/s, {memory:.1f} TB/s from memory, {l2:.1f} from the L2"
    title = "The parts of a sparse step, if every row came from the L2 cache"
    title += f"<br><sup>at rates that an H100 reached: {rates}" + f"<br>marks: {where}" * bool(where) + "</sup>"
    return plots.styled(figure, title, height=520).update_layout(
        barmode="stack", margin={"t": 90, "b": 150}, legend=BELOW | {"traceorder": "normal"}
    )


NAMES = {
    "planned": "planned, beside eager torch",
    "planned compiled": "planned, compiled, beside compiled torch",
    "forced twell": "sparse, beside eager torch",
}


def steps(recorded: list[dict], own: list[dict] = (), command: str = "") -> go.Figure:
    """Training steps: times as fast as dense, over nnz; eager against eager, compiled against compiled.

    recorded, own: rows of measured.steps. Without any, the figure says so, and that `command` makes them.
    """
    figure = go.Figure()
    shown = [
        {**row, "x": row.get("x_compiled" if row["path"] == "planned compiled" else "x_dense")}
        for row in (*recorded, *own)
        if row["path"] in NAMES
    ]
    for path, where in dict.fromkeys((row["path"], row["where"]) for row in shown):
        rows = sorted(
            (row for row in shown if (row["path"], row["where"]) == (path, where)), key=lambda row: row["nnz"]
        )
        mine = not where.startswith("recorded")
        figure.add_scatter(
            x=[row["nnz"] for row in rows],
            y=[row["x"] for row in rows],
            mode="lines+markers",
            name=NAMES[path] + f", {where}" * mine,
            line={"color": plots.COLOURS[[*NAMES].index(path)], "dash": "solid" if mine else "dot"},
            marker={"size": 15 if path == "planned" else 8, "symbol": "circle-open" if path == "planned" else "circle"},
            customdata=[[row["ms"]] for row in rows],
            hovertemplate="nnz %{x:.3g}: %{y:.2f}x, %{customdata[0]:.3g} ms",
        )
    figure.add_hline(y=1, line={"color": plots.INK, "width": 1, "dash": "dash"})
    if not shown:
        note(
            figure,
            "no training step is recorded yet" + f"; {command} makes the record" * bool(command),
            font={"size": 13},
        )
    figure.update_xaxes(title_text="neurons firing for a token, mean (of 5,632)", rangemode="tozero")
    figure.update_yaxes(title_text="times as fast as the dense step, GPU time", rangemode="tozero")
    title = "A training step of one layer, 16,384 tokens"
    title += f"<br><sup>dotted: {sources(recorded)}</sup>" * bool(recorded)
    figure = plots.styled(figure, title, height=450)
    return figure.update_layout(margin={"t": 70, "b": 120}, legend={"y": -0.18, "yanchor": "top"})


def capacity(sweep: list[dict], index: int = 0) -> go.Figure:
    """The rows that are lost at one capacity, and the rows that must be read at each.

    sweep: data.capacity_sweep, capacities ascending; index: which of them is shown.
    """
    counts = sweep[0]["counts"]
    silent = f"; {none} tokens have none" if (none := counts.count(0)) else ""
    figure = make_subplots(
        rows=1,
        cols=2,
        column_widths=[0.6, 0.4],
        horizontal_spacing=0.14,
        subplot_titles=[f"kept values of each token{silent}", "rows read, by capacity"],
    )
    figure.add_bar(
        x=list(range(len(counts))),
        y=counts,
        showlegend=False,
        row=1,
        col=1,
        hovertemplate="token %{x}: %{y} values<extra></extra>",
    )
    at = [row["capacity"] for row in sweep]
    for key, name, colour in (
        ("stored_rows", "for stored tokens", KEPT),
        ("lost_rows", "for lost tokens", plots.ORANGE),
    ):
        figure.add_scatter(
            x=at,
            y=[row[key] for row in sweep],
            mode="lines",
            stackgroup="all",
            name=name,
            line={"color": colour},
            row=1,
            col=2,
            hovertemplate=f"{name}: %{{y:,}} rows",
        )
    figure.add_scatter(
        mode="markers", marker={"color": plots.INK, "size": 11}, showlegend=False, row=1, col=2, hoverinfo="skip"
    )
    figure.update_xaxes(title_text="token", row=1, col=1)
    figure.update_xaxes(title_text="room for kept values", row=1, col=2)
    figure.update_yaxes(title_text="neurons that fired", row=1, col=1)
    figure.update_yaxes(title_text="rows of weights, x and dy", rangemode="tozero", row=1, col=2)
    figure = plots.styled(figure, "", height=380).update_layout(margin_t=100, legend={"y": 1.09, "x": 0.62})
    figure.update_annotations(font_size=12)
    move_capacity(figure, sweep, index)
    return figure


def move_capacity(figure: go.Figure, sweep: list[dict], index: int) -> None:
    """Move the capacity in a figure that `capacity` made (a FigureWidget of it too)."""
    row = row_at(sweep, index, "capacities")
    lost = set(row["lost"])
    figure.data[0].marker.color = [plots.ORANGE if token in lost else KEPT for token in range(len(row["counts"]))]
    figure.data[3].x, figure.data[3].y = [row["capacity"]], [row["stored_rows"] + row["lost_rows"]]
    error = "within rounding of autograd's" if row["error"] < 1e-12 else f"off by {row['error']:.1e}"
    figure.layout.title.text = (
        f"room for {row['capacity']} values, {row['bytes']:,} bytes: {len(lost)} of {len(row['counts'])} tokens lost; "
        f"gradients {error}"
    )


def paths(kinds: dict[str, list[dict]]) -> go.Figure:
    """Milliseconds of the sparse step over nnz, for each kind of workload, beside torch's dense step.

    Circles are the steps that a layer plans. kinds: measured.series. Both axes are logarithmic.
    """
    figure = go.Figure()
    every = [row for each in kinds.values() for row in each]
    planned = sorted((row for row in every if row["path"] == "planned"), key=lambda row: row["nnz"])
    figure.add_scatter(
        x=[row["nnz"] for row in planned],
        y=[row["ms"] for row in planned],
        mode="markers",
        name="planned",
        marker={"symbol": "circle-open", "size": 17, "color": plots.INK, "line": {"width": 1.5}},
        customdata=[[row["workload"], row.get("choice")] for row in planned],
        hovertemplate="%{customdata[0]}, nnz %{x}: planned %{customdata[1]}, %{y:.3g} ms<extra></extra>",
    )
    for colour, (name, each) in zip(plots.COLOURS, kinds.items(), strict=False):
        rows = [row for row in each if row["path"] == "forced twell"]
        drawn = rows and rows[0]["workload"].startswith("independent")
        figure.add_scatter(
            x=[row["nnz"] for row in rows],
            y=[row["ms"] for row in rows],
            mode="lines+markers" if drawn else "markers",
            name=f"sparse: {name}",
            line={"color": colour},
            marker={"size": 9, "color": colour, "symbol": "circle" if drawn else "diamond"},
            customdata=[[row["workload"]] for row in rows],
            hovertemplate="%{customdata[0]}, nnz %{x}: sparse %{y:.3g} ms<extra></extra>",
        )
    for path, dash in (("dense eager", "dash"), ("dense compiled", "dot")):
        rows = sorted((row for row in every if row["path"] == path), key=lambda row: row["nnz"])
        figure.add_scatter(
            x=[row["nnz"] for row in rows],
            y=[row["ms"] for row in rows],
            mode="lines",
            name=f"torch, {path}",
            line={"color": plots.GREY, "dash": dash},
            hovertemplate=f"{path}, nnz %{{x}}: %{{y:.3g}} ms<extra></extra>",
        )
    if not every:
        note(figure, "no training step is recorded in this checkout")
    figure.update_xaxes(
        title_text="neurons firing for a token on average (log scale)", type="log", tickvals=[5, 10, 20, 50, 100, 200]
    )
    figure.update_yaxes(title_text="ms, forward and backward (log scale)", type="log", tickvals=[1, 2, 5, 10, 20, 50])
    title = f"A training step of one layer, 16,384 tokens<br><sup>{sources(every)}</sup>"
    return plots.styled(figure, title, height=560).update_layout(margin_b=170, legend=BELOW)


def models(found: list[dict]) -> go.Figure:
    """Return how many times as fast the training step of whole models is, eager and compiled. found: of
    measured.wholes."""
    figure = go.Figure()
    names = [f"{each['model']}, nnz {each['nnz']:.0f}<br>{each['choice']}" for each in found]
    for key, name, colour in (
        ("eager", "planned, beside eager torch", plots.BLUE),
        ("compiled", "planned, compiled, beside compiled torch", plots.ORANGE),
    ):
        figure.add_bar(
            x=names,
            y=[each[key] for each in found],
            name=name,
            marker_color=colour,
            text=[f"{each[key]:.2f}" for each in found],
            textposition="inside",  # above a bar it would lie on the line of 1
            customdata=[[each["mib"], each["dense_mib"]] for each in found],
            hovertemplate="%{y:.2f} times; eager %{customdata[0]:,.0f} MiB at most, torch %{customdata[1]:,.0f}",
        )
    figure.add_hline(y=1, line={"color": plots.INK, "width": 1, "dash": "dash"})
    if not found:
        note(figure, "no whole model is recorded in this checkout")
    figure.update_yaxes(title_text="times as fast as torch's dense model, GPU time", rangemode="tozero")
    told = [*dict.fromkeys(each["where"] for each in found)]
    title, more = f"A training step of whole models<br><sup>{'<br>'.join(told)}</sup>", 20 * len(told)
    figure = plots.styled(figure, title, height=390 + more)
    return figure.update_layout(
        barmode="group",
        margin={"t": 60 + more, "b": 100},
        title={"y": 1, "yref": "container", "yanchor": "top", "pad": {"t": 20}},
        legend={"y": -0.2, "yanchor": "top"},
    )


def switching(history: list[dict], d_ff: int, limit: float) -> go.Figure:
    """A run in which layers change their path: neurons firing by layer, and the bytes kept for the backward pass.

    history: rows {step, nnz: by layer, paths: by layer, "dense" or "twell", bytes}; limit: the nnz below which a layer
    becomes sparse. A line is dotted while its layer is dense, and a diamond marks a change of path. A change is made
    after its step, so the bytes of a row are drawn from the step of the row before on.
    """
    if not history:
        raise InputError("history is empty; at least one {step, nnz, paths, bytes} is accepted")
    figure = make_subplots(
        rows=1,
        cols=2,
        column_widths=[0.64, 0.36],
        horizontal_spacing=0.13,
        subplot_titles=["dotted: dense; solid: sparse; diamond: a change", "kept from forward to backward"],
    )
    steps = [row["step"] for row in history]
    for number, colour in zip(range(len(history[0]["nnz"])), plots.COLOURS, strict=False):
        name, values = f"layer {number}", [row["nnz"][number] for row in history]
        paths = [row["paths"][number] for row in history]
        cuts = [0, *(i for i in range(1, len(history)) if paths[i] != paths[i - 1]), len(history) - 1]
        for at, (first, last) in enumerate(zip(cuts, cuts[1:], strict=False)):
            sparse = paths[first] == "twell"
            figure.add_scatter(
                x=steps[first : last + 1],
                y=values[first : last + 1],
                mode="lines",
                name=name,
                legendgroup=name,
                showlegend=at == 0,
                line={"color": colour, "dash": "solid" if sparse else "dot", "width": 3 if sparse else 2},
                row=1,
                col=1,
                hovertemplate=f"{name}, {'sparse' if sparse else 'dense'}, step %{{x}}: %{{y:.1f}}<extra></extra>",
            )
        changes = cuts[1:-1]
        if changes:
            figure.add_scatter(
                x=[steps[i] for i in changes],
                y=[values[i] for i in changes],
                mode="markers",
                showlegend=False,
                legendgroup=name,
                marker={"color": colour, "size": 12, "symbol": "diamond", "line": {"color": "white", "width": 1}},
                row=1,
                col=1,
                hovertemplate=f"{name} changes its path in step %{{x}}<extra></extra>",
            )
    low = 0.7 * min(min(min(row["nnz"]) for row in history), limit)
    figure.add_hline(y=limit, line={"color": plots.INK, "width": 1, "dash": "dash"}, row=1, col=1)
    figure.add_annotation(
        x=steps[-1],
        y=math.log10(limit) if low > 0 else limit,
        text="break-even",
        showarrow=False,
        xanchor="right",
        yanchor="bottom",
        row=1,
        col=1,
    )
    figure.add_scatter(
        x=steps,
        y=[row["bytes"] / 2**20 for row in history],
        mode="lines",
        line={"color": plots.INK, "shape": "vh"},
        showlegend=False,
        row=1,
        col=2,
        hovertemplate="step %{x}: %{y:.1f} MiB<extra></extra>",
    )
    figure.update_xaxes(title_text="step")
    ticks = [1, 2, 5, 10, 20, 50, 100, 200, 500]
    if low > 0:
        figure.update_yaxes(type="log", tickvals=ticks, row=1, col=1)
    name = f"neurons firing for a token, of {d_ff}" + " (log scale)" * (low > 0)
    figure.update_yaxes(title_text=name, row=1, col=1)
    figure.update_yaxes(title_text="MiB", rangemode="tozero", row=1, col=2)
    figure = plots.styled(
        figure,
        "A run whose layers change over",
        height=420,
    )
    figure.update_annotations(font_size=12)
    return figure.update_layout(margin_t=110, legend={"y": 1.09})
