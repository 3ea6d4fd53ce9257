"""Figures of what notebook 09 computes of the Hopper kernels' work; in the style of `plots`."""

from __future__ import annotations

import math

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ... import plots
from ...core.errors import InputError
from ...formats.twell import POOL_WORDS
from ..drawing import BESIDE, legend_key, nothing, row_at, squares

GROUPS = {"gate GEMM": plots.BLUE, "fused up and down": plots.RED, "whole layer, 1 token": plots.GREEN}
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "star", "x", "cross")
LANES = (plots.BLUE, plots.ORANGE, plots.GREEN, plots.PURPLE)  # the four lanes that share a row


def roofline(points: list[dict], gpu: dict, reached=None) -> go.Figure:
    """Operations a second over operations a byte of memory, under the peaks of a datasheet.

    points: `data.points`; gpu: an entry of data/gpus.json; reached: `data.Rates`, drawn as dotted roofs.
    """
    title = "Roofline of the kernels (solid roofs: datasheet; dotted: rates that were reached)"
    if not points:
        return nothing(title)
    figure, span = go.Figure(), (0.3, 3e4)
    peaks = [(1e12 * gpu["tensor_tflops"], 1e9 * gpu["bandwidth_gb_s"], "solid")]
    if reached is not None:
        peaks.append((reached.tensor, reached.memory, "dot"))
    for tensor, memory, dash in peaks:
        ridge = tensor / memory
        figure.add_scatter(
            x=[span[0], ridge, span[1]],
            y=[span[0] * memory / 1e12, tensor / 1e12, tensor / 1e12],
            mode="lines",
            line={"color": plots.INK, "width": 1.5, "dash": dash},
            showlegend=False,
            hoverinfo="skip",
        )
    tensor, memory, _ = peaks[0]
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
            name=p["name"],
            legendgroup=p["group"],
            legendgrouptitle_text=p["group"],
            marker={
                "symbol": SYMBOLS[number % len(SYMBOLS)],
                "size": 12,
                "color": GROUPS.get(p["group"], plots.INK),
                "opacity": 0.85,
            },
            customdata=[[1e3 * p["seconds"], p["where"]]],
            hovertemplate="%{x:.3g} operations a byte, %{y:.3g} TFLOP/s (%{customdata[0]:.3g} ms, %{customdata[1]})",
        )
    figure.update_xaxes(
        title_text="operations for each byte of memory",
        type="log",
        range=[math.log10(v) for v in span],
        tickvals=[1, 10, 100, 1000, 10000],
        ticktext=["1", "10", "100", "1,000", "10,000"],
    )
    figure.update_yaxes(
        title_text="10^12 operations a second", type="log", tickvals=[1, 10, 100, 1000], range=[-0.6, 3.3]
    )
    figure = plots.styled(figure, title, height=520)
    return figure.update_layout(legend=BESIDE | {"groupclick": "toggleitem"}, margin_r=250)


def lanes(holders: dict[str, list[int]]) -> go.Figure:
    """Which lane of a quad holds each of the 256 columns of a tile, 64 columns a line.

    holders: caption -> the lane (0 to 3) of every column.
    """
    for caption, each in holders.items():
        if len(each) != 256 or not set(each) <= {0, 1, 2, 3}:
            raise InputError(f"{caption!r} has {len(each)} lanes; 256 of 0 to 3 are accepted")
    figure = make_subplots(rows=len(holders), cols=1, subplot_titles=list(holders), vertical_spacing=0.22)
    for at, each in enumerate(holders.values(), 1):
        squares(
            figure,
            [each[64 * line : 64 * line + 64] for line in range(4)],
            LANES,
            row=at,
            col=1,
            xgap=1,
            ygap=2,
            y=["0", "64", "128", "192"],
            hovertemplate="column %{y} + %{x}: lane %{z}<extra></extra>",
        )
    for lane, colour in enumerate(LANES):
        legend_key(figure, f"lane {lane}", colour)
    figure.update_yaxes(autorange="reversed", title_text="column from")
    figure.update_xaxes(visible=False)
    figure = plots.styled(figure, "", height=150 + 150 * len(holders))
    figure.update_annotations(font_size=12)
    return figure.update_layout(legend={"y": 1.1, "yanchor": "bottom"}, margin={"t": 80, "b": 20})


def filled(lines: dict[str, list[tuple[int, float]]]) -> go.Figure:
    """How much of the GPU holds a tile, over the number of tokens. lines: name -> (tokens, share), as `data.waves`."""
    figure = go.Figure()
    for colour, (name, values) in zip(plots.COLOURS, lines.items(), strict=False):
        figure.add_scatter(
            x=[tokens for tokens, _ in values],
            y=[100 * share for _, share in values],
            mode="lines",
            name=name,
            line={"color": colour, "shape": "hv"},
            hovertemplate="%{x:,} tokens: %{y:.0f}%",
        )
    ticks = [256 * 2**i for i in range(10)]
    figure.update_xaxes(title_text="tokens", type="log", tickvals=ticks, ticktext=[f"{tick:,}" for tick in ticks])
    figure.update_yaxes(title_text="places that hold a tile, % of all turns", range=[0, 104])
    return plots.styled(figure, "How much of the GPU the tiles fill")


def pool_segment(rows: list[dict]) -> go.Figure:
    """How many values each row of a group has in one tile, and which row's values lie in the words that they share.

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
        row["row"]: plots.COLOURS[i % len(plots.COLOURS)] if not row["lost"] else plots.GREY
        for i, row in enumerate(over)
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
    figure.update_xaxes(title_text="row of the group", dtick=1, row=1, col=1)
    figure.update_xaxes(title_text="word", range=[-0.5, POOL_WORDS - 0.5], showgrid=False, row=2, col=1)
    figure.update_yaxes(visible=False, row=2, col=1)
    figure.update_yaxes(title_text="values", row=1, col=1)
    figure = plots.styled(figure, "", height=450).update_layout(barmode="stack", showlegend=False, margin_t=50)
    figure.update_annotations(font_size=12)
    return figure


def frequencies(each: dict[str, list[float]], threshold: float) -> go.Figure:
    """How often each neuron fires, most used first, and the share of tokens above which a neuron is cheaper dense.

    each: name -> shares of tokens, one a neuron (0 to 1).
    """
    figure = go.Figure()
    for colour, (name, shares) in zip(plots.COLOURS, each.items(), strict=False):
        ordered = sorted((share for share in shares if share > 0), reverse=True)
        at = sorted(
            {min(round(10 ** (i / 60)), len(ordered)) for i in range(int(60 * math.log10(len(ordered))) + 1)}
            | {len(ordered)}
        )
        figure.add_scatter(
            x=at,
            y=[100 * ordered[i - 1] for i in at],
            mode="lines",
            line={"color": colour},
            name=name,
            hovertemplate="neuron %{x:,}: %{y:.2g}% of tokens",
        )
    figure.add_hline(y=100 * threshold, line={"color": plots.INK, "width": 1, "dash": "dash"})
    figure.add_annotation(
        x=0,
        xref="paper",
        y=math.log10(100 * threshold),
        xanchor="left",
        yanchor="bottom",
        showarrow=False,
        text=f"above {threshold:.1%}: cheaper dense",
        font={"size": 11},
    )
    figure.update_xaxes(
        title_text="neuron, most used first",
        type="log",
        tickvals=[1, 10, 100, 1000, 5632],
        ticktext=["1", "10", "100", "1,000", "5,632"],
    )
    figure.update_yaxes(
        title_text="fires on this share of tokens, %",
        type="log",
        range=[-2, 2.1],
        tickvals=[0.01, 0.1, 1, 10, 100],
        ticktext=["0.01", "0.1", "1", "10", "100"],
    )
    return plots.styled(figure, "How often each neuron fires")


def splits(each: dict[str, list[dict]]) -> go.Figure:
    """Predicted time over the number of hot neurons; a dot marks the fastest. each: name -> rows of data.split."""
    figure = go.Figure()
    for colour, (name, rows) in zip(plots.COLOURS, each.items(), strict=False):
        best = min(rows, key=lambda row: row["ms"])
        figure.add_scatter(
            x=[row["hot"] for row in rows],
            y=[row["ms"] for row in rows],
            mode="lines",
            line={"color": colour},
            name=name,
            customdata=[[row["cold_nnz"]] for row in rows],
            hovertemplate="%{x:,} hot: %{y:.2f} ms, %{customdata[0]:.0f} firing ones left",
        )
        figure.add_scatter(
            x=[best["hot"]],
            y=[best["ms"]],
            mode="markers",
            marker={"color": colour, "size": 11},
            showlegend=False,
            hoverinfo="skip",
        )
    figure.update_xaxes(title_text="hot neurons, which are computed densely (left end: TwELL, right end: dense)")
    figure.update_yaxes(title_text="predicted ms", rangemode="tozero")
    return plots.styled(figure, "How many neurons should be hot? Predicted for 16,384 tokens")


PARTS = {
    "gate": ("the gate", plots.GREY),
    "dense": ("hot neurons, dense", plots.ORANGE),
    "sparse": ("cold neurons, sparse", plots.BLUE),
    "start": ("sums of the hot, written and read", plots.PURPLE),
}


def cut(shares: list[float], rows: list[dict], index: int = 0) -> go.Figure:
    """One cut between hot and cold neurons: how often the neurons on both sides fire, and the parts of the predicted
    time.

    shares: of tokens, one for each neuron; rows: data.split of the same shares, the first TwELL and the last dense;
    index: which of them is shown.
    """
    ordered = sorted((100 * share for share in shares), reverse=True)
    figure = make_subplots(rows=1, cols=2, column_widths=[0.45, 0.55], horizontal_spacing=0.16)
    for colour, name in ((plots.ORANGE, "hot"), (plots.BLUE, "cold")):
        figure.add_scatter(
            mode="lines",
            fill="tozeroy",
            line={"color": colour},
            showlegend=False,
            row=1,
            col=1,
            hovertemplate=f"{name}, neuron %{{x:,}}: %{{y:.2g}}% of tokens<extra></extra>",
        )
    for key, (name, colour) in PARTS.items():
        figure.add_bar(
            y=["dense", "TwELL", "this cut"],
            x=[rows[-1][key], rows[0][key], 0],
            orientation="h",
            marker_color=colour,
            name=name,
            row=1,
            col=2,
            hovertemplate=f"{name}: %{{x:.2f}} ms<extra></extra>",
        )
    figure.update_xaxes(title_text="neuron, most used first", row=1, col=1)
    figure.update_yaxes(
        title_text="fires on this share of tokens, %", range=[0, 1.05 * ordered[len(ordered) // 50]], row=1, col=1
    )
    figure.update_xaxes(title_text="predicted ms", range=[0, 1.08 * max(row["ms"] for row in rows)], row=1, col=2)
    figure = plots.styled(figure, "", height=360).update_layout(
        barmode="stack", legend={"x": 0.45, "traceorder": "normal"}, margin_t=90
    )
    figure.update_layout(meta=ordered)
    move_cut(figure, rows, index)
    return figure


def move_cut(figure: go.Figure, rows: list[dict], index: int) -> None:
    """Move the cut in a figure that `cut` made."""
    row, ordered = row_at(rows, index, "cuts"), figure.layout.meta
    every = max(1, len(ordered) // 700)  # points enough for a line
    hot = range(0, row["hot"], every)
    cold = range(row["hot"], len(ordered), every)
    for trace, part in zip(figure.data[:2], (hot, cold), strict=True):
        trace.x, trace.y = [i + 1 for i in part], [ordered[i] for i in part]
    for trace, key in zip(figure.data[2:], PARTS, strict=True):
        trace.x = [*trace.x[:2], row[key]]
    figure.layout.title.text = (
        f"{row['hot']:,} hot, {row['cold_nnz']:.1f} firing ones left among the others: {row['ms']:.2f} ms"
    )
