"""Figures of the notebook on clocks, each a function of rows and numbers; in the style of `plots`."""

from __future__ import annotations

import math

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ... import plots
from ..measure.data import ms
from .data import quiet, ratio


def timeline(asked: float, done: float, queue: str) -> go.Figure:
    """Return what the program and the queue do while one call runs. asked: milliseconds until the call returned; done:
    until its work was; queue: its name."""
    program, figure = "your program", go.Figure()
    for lane, start, end, name, colour in (
        (program, 0.0, asked, "launches the call", plots.ORANGE),
        (program, asked, done, "is free, or waits", plots.FAINT),
        (queue, asked, done, "does the work", plots.BLUE),
    ):
        figure.add_bar(
            y=[lane],
            x=[end - start],
            base=[start],
            orientation="h",
            name=name,
            marker_color=colour,
            hovertemplate=f"{name}: {ms(max(end - start, 1e-9))}<extra></extra>",
        )
    for at, text, colour in ((asked, f"a clock stopped here says {ms(asked)}", plots.RED), (done, ms(done), plots.INK)):
        figure.add_vline(x=at, line={"color": colour, "width": 2, "dash": "dot"})
        figure.add_annotation(x=at, y=1.14, yref="paper", text=text, showarrow=False, xanchor="left")
    figure.update_xaxes(title_text="milliseconds since the call", range=[-0.02 * done, 1.12 * done])
    figure.update_yaxes(autorange="reversed", automargin=True)
    figure = plots.styled(figure, "One call, and when a clock may stop", height=290)
    legend = {"y": -0.62, "yanchor": "top", "traceorder": "normal"}
    return figure.update_layout(barmode="overlay", margin_t=90, margin_b=100, legend=legend)


def ladder(steps: dict[str, float], title: str = "The same benchmark, after each repair") -> go.Figure:
    """Return how many times as fast as dense the sparse layer is said to be, after each step, the first step on top.

    steps: these ratios, by the step's name.
    """
    names, values = list(steps), list(steps.values())
    figure = go.Figure().add_scatter(
        y=names,
        x=values,
        mode="markers+lines",
        line={"color": plots.GREY, "dash": "dot"},
        marker={"size": 14, "color": [plots.RED, *[plots.ORANGE] * (len(names) - 2), plots.BLUE][: len(names)]},
        showlegend=False,
        hovertemplate="%{y}: %{x:.3g} times as fast<extra></extra>",
    )
    for name, value in steps.items():
        figure.add_annotation(
            x=math.log10(value),
            y=name,
            text=f"{value:,.3g}x" if value < 100 else f"{value:,.0f}x",
            showarrow=False,
            yshift=18,
            bgcolor="white",
        )
    figure.add_vline(x=1, line={"color": plots.INK, "width": 1})
    low, high = min(0.0, *map(math.log10, values)), max(0.0, *map(math.log10, values))
    figure.update_xaxes(
        title_text="times as fast as the dense layer (1: no gain; log scale)",
        type="log",
        range=[low - 0.3, high + 0.6],
        tickvals=[10.0**i for i in range(-6, 10)],
        ticktext=[f"{10.0**i:,g}" for i in range(-6, 10)],
    )
    figure.update_yaxes(autorange="reversed", automargin=True)
    return plots.styled(figure, title, height=150 + 44 * len(names))


def orders(found: dict[str, dict[str, list[float]]]) -> go.Figure:
    """The samples of one call under two names, in the order they were taken, and the ratio of their medians.

    found: of `same_call_twice`."""
    titles = [f"{order}: second / first = {ratio(samples, 'second', 'first'):.2f}" for order, samples in found.items()]
    figure = make_subplots(rows=1, cols=len(found), shared_yaxes=True, subplot_titles=titles)
    for column, (order, samples) in enumerate(found.items(), 1):
        for i, (name, values) in enumerate(samples.items()):
            count, turns = len(values), order == "in turns"
            at = [2 * k + i + 1 if turns else i * count + k + 1 for k in range(count)]
            figure.add_scatter(
                x=at,
                y=values,
                mode="markers",
                name=f"{name} name",
                legendgroup=name,
                showlegend=column == 1,
                marker={"color": (plots.BLUE, plots.ORANGE)[i], "symbol": ("circle", "diamond")[i], "size": 8},
                hovertemplate=f"call %{{x}}, {name} name: %{{y:.3g}} ms<extra></extra>",
                row=1,
                col=column,
            )
        rounds = min(map(len, samples.values()))
        figure.add_vline(x=quiet(rounds) + 0.5, line={"color": plots.GREY, "dash": "dot"}, row=1, col=column)
        figure.update_xaxes(title_text="call (busy right of the line)", row=1, col=column)
    figure.update_yaxes(title_text="milliseconds", rangemode="tozero", row=1, col=1)
    figure = plots.styled(figure, "One call timed under two names, while the machine gets busy", height=380)
    figure.update_annotations(font_size=12)
    return figure.update_layout(margin_t=90, legend={"y": -0.2, "yanchor": "top"}, margin_b=90)


def calls(rows: list[dict]) -> go.Figure:
    """The GPU's own time and that of a plain call, over tokens, for the dense layer and SparseFFN.

    rows: `measure.recorded_calls`; those without wall times are left out."""
    rows = [row for row in rows if row.get("wall_ms") and row.get("dense_wall_ms")]
    figure = go.Figure()
    for key, name, colour, dash in (
        ("dense_wall_ms", "dense, a call, caches warm", plots.GREY, "solid"),
        ("dense_ms", "dense, the GPU alone, caches emptied", plots.GREY, "dot"),
        ("wall_ms", "SparseFFN, a call, caches warm", plots.BLUE, "solid"),
        ("ms", "SparseFFN, the GPU alone, caches emptied", plots.BLUE, "dot"),
    ):
        figure.add_scatter(
            x=[row["tokens"] for row in rows],
            y=[row[key] for row in rows],
            name=name,
            mode="lines+markers",
            line={"color": colour, "dash": dash},
            marker={"symbol": "circle" if dash == "solid" else "diamond-open", "size": 8},
            hovertemplate=f"%{{x:,}} tokens, {name}: %{{y:.3g}} ms<extra></extra>",
        )
    tokens = sorted({row["tokens"] for row in rows})
    figure.update_xaxes(
        title_text="tokens (log scale)", type="log", tickvals=tokens, ticktext=[f"{count:,}" for count in tokens]
    )
    marks = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5]
    figure.update_yaxes(
        title_text="milliseconds (log scale)", type="log", tickvals=marks, ticktext=[f"{m:g}" for m in marks]
    )
    where = ", ".join(dict.fromkeys(row["where"] for row in rows)) or "no run is recorded in this checkout"
    return plots.styled(figure, f"A call, and the GPU's own time: {where}", height=420).update_layout(
        title_font_size=13, margin_t=110
    )
