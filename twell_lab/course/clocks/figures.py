"""Figures of the notebook on clocks, each a function of rows and numbers; in the style of `plots`."""

from __future__ import annotations

import math

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ... import plots
from ..charts import bars, finish, lines, one, say
from ..measure.data import ms
from .data import quiet, ratio


def timeline(asked: float, done: float, queue: str) -> go.Figure:
    """Return what the program and the queue do while one call runs. asked: milliseconds until the call returned; done:
    until its work was; queue: its name."""
    parts = (
        ("your program", 0.0, asked, "launches the call", plots.ORANGE),
        ("your program", asked, done, "is free, or waits", plots.FAINT),
        (queue, asked, done, "does the work", plots.BLUE),
    )
    rows = [dict(zip(("who", "start", "end", "does"), part)) for part in parts]
    looks = {part[3]: {"colour": part[4], "base": [part[1]]} for part in parts}
    said, takes = lambda row: f"{row['does']}: {ms(row['end'] - row['start'])}", lambda row: row["end"] - row["start"]
    figure = bars(go.Figure(), rows, "who", takes, "does", hover=said, looks=looks, across=True)
    for at, text, colour in ((asked, f"a clock stopped here says {ms(asked)}", plots.RED), (done, ms(done), plots.INK)):
        figure.add_vline(x=at, line={"color": colour, "width": 2, "dash": "dot"})
        say(figure, at, 1, text, "left", yref="paper", yanchor="bottom")
    title = "One call, and when a clock may stop"
    figure = finish(figure, title, height=130, x="milliseconds since the call", across=True)
    return figure.update_xaxes(range=[-0.02 * done, 1.12 * done]).update_layout(barmode="overlay")


def ladder(steps: dict[str, float], title: str = "The same benchmark, after each repair") -> go.Figure:
    """Draw how many times as fast as dense the sparse layer is said to be, by the step, the first on top."""
    rows = [{"step": name, "x": value} for name, value in steps.items()]
    colours = [plots.RED, *[plots.ORANGE] * (len(rows) - 2), plots.BLUE]
    look = {"line": {"color": plots.GREY, "dash": "dot"}, "marker": {"size": 14, "color": colours}}
    said = lambda row: f"{row['step']}: {row['x']:.3g} times as fast"
    figure = lines(go.Figure(), rows, "x", "step", lambda _: None, hover=said, **look)
    for name, value in steps.items():
        text = f"{value:,.3g}x" if value < 100 else f"{value:,.0f}x"
        say(figure, math.log10(value), name, text, yshift=18, bgcolor="white")
    axis, ticks = "times as fast as the dense layer (1: no gain)", [10.0**i for i in range(-6, 10)]
    figure = finish(one(figure, "x"), title, height=44 * len(rows), x=axis, log_x=ticks, across=True)
    ends = [0.0, *map(math.log10, steps.values())]
    return figure.update_xaxes(range=[min(ends) - 0.3, max(ends) + 0.6])


def orders(found: dict[str, dict[str, list[float]]]) -> go.Figure:
    """The samples of `same_call_twice` in the order they were taken, and the ratio of their medians."""
    titles = [f"{order}: second / first = {ratio(samples, 'second', 'first'):.2f}" for order, samples in found.items()]
    figure = make_subplots(rows=1, cols=len(found), shared_yaxes=True, subplot_titles=titles)
    for column, (order, samples) in enumerate(found.items(), 1):
        rows = []
        for i, (name, values) in enumerate(samples.items()):
            for k, value in enumerate(values):
                call = 2 * k + i + 1 if order == "in turns" else i * len(values) + k + 1
                rows.append({"name": f"{name} name", "call": call, "ms": value})
        said = lambda row: f"call {row['call']}, {row['name']}: {row['ms']:.3g} ms"
        lines(figure, rows, "call", "ms", "name", hover=said, mode="markers", row=1, col=column)
        rounds = min(map(len, samples.values()))
        figure.add_vline(x=quiet(rounds) + 0.5, line={"color": plots.GREY, "dash": "dot"}, row=1, col=column)
    figure.update_xaxes(title_text="call (busy right of the line)")
    figure.update_yaxes(title_text="milliseconds", col=1)
    figure = finish(figure, "One call timed under two names, while the machine gets busy", height=250)
    return figure.update_annotations(font_size=12)


def calls(rows: list[dict]) -> go.Figure:
    """The GPU's own time and that of a plain call, dense and SparseFFN, over tokens. rows: `measure.recorded_calls`;
    those without wall times are left out."""
    rows = [row for row in rows if row.get("wall_ms") and row.get("dense_wall_ms")]
    figure = go.Figure()
    for key, name, colour, dash in (
        ("dense_wall_ms", "dense, a call, caches warm", plots.GREY, "solid"),
        ("dense_ms", "dense, the GPU alone, caches emptied", plots.GREY, "dot"),
        ("wall_ms", "SparseFFN, a call, caches warm", plots.BLUE, "solid"),
        ("ms", "SparseFFN, the GPU alone, caches emptied", plots.BLUE, "dot"),
    ):
        said = lambda row, key=key, name=name: f"{row['tokens']:,} tokens, {name}: {row[key]:.3g} ms"
        look = {"colour": colour, "dash": dash, "symbol": "circle" if dash == "solid" else "diamond-open"}
        lines(figure, rows, "tokens", key, lambda _, name=name: name, hover=said, looks={name: look})
    ticks = {"log_x": {row["tokens"] for row in rows}, "log_y": [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5]}
    return finish(figure, "A call, and the GPU's own time", rows, 310, x="tokens", y="milliseconds", **ticks)
