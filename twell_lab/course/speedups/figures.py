"""Figures of models beside their layers. Drawn from what `data` returned."""

from __future__ import annotations

import math
from collections.abc import Iterable

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ... import plots
from ..drawing import nothing
from ..recorded import sources
from .data import Step, amdahl

WAYS = {"eager": plots.BLUE, "compiled": plots.SKY, "CUDA graph": plots.PURPLE}
PATHS = {"planned": ("planned", plots.BLUE), "forced twell": ("TwELL, forced", plots.RED)}
LAYERS = plots.GREEN
PIECES = {
    "layers": ("feed-forward layers", LAYERS),
    "head": ("LM head", plots.ORANGE),
    "rest": ("attention, norms and the rest", plots.GREY),
    "wait": ("waiting for the host", plots.FAINT),
}
_CURVES = (1.5, 2, 3, math.inf)  # times as fast, for which Amdahl's law is drawn
_ROW = 26  # pixels of a line of a horizontal figure


def beside_layers(
    found: list[Step], title: str = "Times as fast with planned layers: the layers, and the model"
) -> go.Figure:
    """For each step a bar of the model, with the middle half of its turns, a diamond of its layers alone, and a line
    where Amdahl's law puts the model."""
    if not found:
        return nothing(title)
    names = [step.name for step in found]
    figure = go.Figure()
    ends = [step.span for step in found]
    figure.add_bar(
        y=names,
        x=[step.x for step in found],
        orientation="h",
        name="the model, measured",
        marker_color=plots.BLUE,
        error_x={
            "array": [high - step.x for step, (_, high) in zip(found, ends)],
            "arrayminus": [step.x - low for step, (low, _) in zip(found, ends)],
            "color": plots.INK,
            "thickness": 1,
            "width": 4,
        },
        hovertemplate="%{y}: %{x:.2f}x<extra></extra>",
    )
    known = [step for step in found if step.share]
    for name, values, marker in (
        (
            "its layers by themselves" + ", where they were timed" * (len(known) < len(found)),
            [step.layer_x for step in known],
            {"color": LAYERS, "symbol": "diamond", "size": 11},
        ),
        (
            "the model, by Amdahl's law",
            [step.predicted for step in known],
            {"color": plots.RED, "symbol": "line-ns-open", "size": 18, "line": {"width": 3}},
        ),
    ):
        figure.add_scatter(
            y=[step.name for step in known],
            x=values,
            mode="markers",
            name=name,
            marker=marker,
            hovertemplate="%{y}: %{x:.2f}x",
        )
    _one(figure, "x")
    figure.update_xaxes(title_text="times as fast as dense", rangemode="tozero")
    figure.update_yaxes(autorange="reversed", automargin=True, ticksuffix="  ")
    return _sourced(figure, title, _where(found), 30 + _ROW * len(names))


def law(found: list[Step], own: list[Step] = ()) -> go.Figure:
    """Amdahl's law: the model's gain over the share of its time that layers take. Curves: layers that become so many
    times as fast. Points: measured, each hanging on what the law predicts."""
    title = "Amdahl's law: what a share of the time allows"
    found, own = ([step for step in each if step.share] for each in (found, own))
    if not found and not own:
        return nothing(title)
    figure = go.Figure()
    shares = [i / 100 for i in range(0, 86)]
    for times in _CURVES:
        figure.add_scatter(
            x=[100 * share for share in shares],
            y=[amdahl(share, times) for share in shares],
            mode="lines",
            line={"color": plots.GREY, "width": 1, "dash": "solid" if times == math.inf else "dot"},
            showlegend=False,
            hoverinfo="skip",
        )
    top = 1.15 * max(
        [amdahl(step.share, step.layer_x) for step in (*found, *own)] + [step.span[1] for step in (*found, *own)]
    )
    top = max(top, 2.0)
    for times in _CURVES:  # where a curve leaves the figure, to the right or above, stands what it is for
        share = next((share for share in shares if amdahl(share, times) > 0.97 * top), shares[-1])
        name = "no time" if times == math.inf else f"{times:g}x"
        _beside(figure, name, 100 * share, min(amdahl(share, times), 0.97 * top), bgcolor="white", borderpad=1)
    symbols = {"forward": "circle", "decode": "diamond", "training": "square"}
    for steps, mine in ((found, False), (own, True)):
        seen: set[tuple] = set()
        for step in steps:
            of = step.dense["step"]
            name = f"{of}, {step.how}" + ", yours, now" * mine
            figure.add_scatter(
                x=[100 * step.share] * 2,
                y=[step.x, step.predicted],
                mode="lines+markers",
                line={"color": WAYS[step.how], "width": 1},
                marker={
                    "symbol": [symbols[of] + "-open" * mine, "line-ew-open"],
                    "size": [13 if mine else 10, 10],
                    "opacity": 1,
                    "color": WAYS[step.how],
                    "line": {"width": 2, "color": WAYS[step.how]},
                },
                name=name,
                legendgroup=name,
                showlegend=name not in seen,
                hovertemplate=f"{step.name}: %{{y:.2f}}x at %{{x:.0f}}%<extra></extra>",
            )
            seen.add(name)
    bottom = min([step.x for step in (*found, *own)] + [1.0])
    _one(figure, "y")
    figure.update_xaxes(title_text="feed-forward layers' share of the dense model's time, %", range=[0, 90])
    figure.update_yaxes(title_text="model: times as fast as dense", range=[0.94 * bottom, top])
    return _sourced(figure, title, _where([*found, *own]), 330)


def pieces(found: list[dict]) -> go.Figure:
    """Where the time of a call goes, in percent of the dense model's: a bar dense, a bar planned. found: what
    data.pieces returned."""
    title = "Where the time of a plain call goes"
    if not found:
        return nothing(title)
    dense = {piece["what"]: _whole(piece) for piece in found if piece["path"] == "dense eager"}
    figure = go.Figure()
    shown = [piece for piece in found if piece["what"] in dense]
    names = [f"{piece['what']}, {'planned' if piece['path'] == 'planned' else 'dense'}" for piece in shown]
    for key, (name, colour) in PIECES.items():
        if key == "rest" and not any(piece["head"] for piece in shown):  # nothing says how long it takes
            name = "attention, LM head and the rest"
        if any(piece[key] for piece in shown):
            figure.add_bar(
                y=names,
                x=[100 * piece[key] / dense[piece["what"]] for piece in shown],
                customdata=[piece[key] for piece in shown],
                orientation="h",
                name=name,
                marker={
                    "color": colour,
                    "line": {"color": plots.GREY, "width": 1 if key == "wait" else 0},
                    "pattern": {
                        "shape": "/" if key == "rest" else "",
                        "fgcolor": "white",
                        "size": 6,
                    },  # not colour alone
                },
                hovertemplate=f"{name}: %{{customdata:.3g}} ms, %{{x:.0f}}%<extra></extra>",
            )
    for name, piece in zip(names, shown):
        percent = 100 * _whole(piece) / dense[piece["what"]]
        _beside(figure, f"{_number(_whole(piece))} ms", percent, name)
    most = max(100 * _whole(piece) / dense[piece["what"]] for piece in shown)
    figure.update_xaxes(title_text="% of the dense model's time", range=[0, 1.14 * most])
    figure.update_yaxes(autorange="reversed", automargin=True, ticksuffix="  ")
    figure.update_layout(barmode="stack")
    return _sourced(figure, title, sources(shown), 30 + _ROW * len(names))


def times(found: list[Step]) -> go.Figure:
    """Milliseconds of each step, dense and planned, in each way."""
    title = "Milliseconds: dense (grey), and with planned layers"
    if not found:
        return nothing(title)
    figure = go.Figure()
    for how, colour in WAYS.items():
        here = [step for step in found if step.how == how]
        for step in here:
            values = [step.ours[step.clock], step.dense[step.clock]]
            figure.add_scatter(
                x=values,
                y=[step.name] * 2,
                mode="lines+markers",
                line={"color": plots.GREY, "width": 1},
                marker={
                    "color": [colour, plots.GREY],
                    "size": 11,
                    "symbol": ["circle", "circle-open"],
                    "line": {"width": 2, "color": [colour, plots.GREY]},
                },
                name=how,
                legendgroup=how,
                showlegend=step is here[0],
                hovertemplate="%{y}: %{x:.3g} ms<extra></extra>",
            )
            said = f"{_number(values[1])} to {_number(values[0])}"
            _beside(figure, said, math.log10(max(values)), step.name, xshift=10)
    ends = [step.dense[step.clock] for step in found] + [step.ours[step.clock] for step in found]
    low, high = math.log10(0.7 * min(ends)), math.log10(max(ends))
    figure.update_xaxes(
        title_text="ms a step (log scale)", type="log", range=[low, high + 0.35 * (high - low)], dtick=1, tickformat=","
    )
    figure.update_yaxes(
        autorange="reversed",
        automargin=True,
        ticksuffix="  ",
        categoryorder="array",
        categoryarray=[step.name for step in found],
    )
    return _sourced(figure, title, _where(found), 30 + _ROW * len(found))


def by_tokens(found: list[dict]) -> go.Figure:
    """Times as fast as dense over the number of tokens, a line for each way. found: data.by_tokens."""
    title = "One planned layer, by the number of tokens"
    if not found:
        return nothing(title)
    figure = go.Figure()
    for how, colour in WAYS.items():
        here = [row for row in found if row["how"] == how]
        if here:
            figure.add_scatter(
                x=[row["tokens"] for row in here],
                y=[row["x"] for row in here],
                mode="lines+markers",
                line={"color": colour, "dash": "dot"},
                marker={"size": 9},
                name=how,
                hovertemplate="%{x:,} tokens: %{y:.2f}x",
            )
    _one(figure, "y")
    counts = sorted({row["tokens"] for row in found})
    figure.update_xaxes(
        title_text="tokens at once (log scale)",
        type="log",
        tickvals=counts,
        ticktext=[f"{count:,}" for count in counts],
    )
    figure.update_yaxes(title_text="times as fast as dense", rangemode="tozero")
    return _sourced(figure, title, sources(found), 270)


def by_nnz(panels: dict[str, dict[str, list[tuple[float, float]]]], tokens: int | None, where: str) -> go.Figure:
    """Times as fast as dense over nnz, for so many tokens, a panel for each of `panels` (name -> what data.by_nnz
    returned)."""
    title = f"One layer, {tokens or 0:,} tokens, by the number of neurons that fire"
    panels = {name: paths for name, paths in panels.items() if paths}
    if not panels:
        return nothing(title)
    figure = make_subplots(rows=1, cols=len(panels), horizontal_spacing=0.12)
    named: set[str] = set()
    for column, paths in enumerate(panels.values(), 1):
        for path, points in paths.items():
            name, colour = PATHS[path]
            figure.add_scatter(
                x=[nnz for nnz, _ in points],
                y=[x for _, x in points],
                mode="lines+markers",
                line={"color": colour, "dash": "dot"},
                marker={"size": 9},
                name=name,
                legendgroup=name,
                showlegend=name not in named,
                hovertemplate="nnz %{x:.0f}: %{y:.2f}x",
                row=1,
                col=column,
            )
            named.add(name)
    figure.add_hline(y=1, line={"color": plots.INK, "width": 1})
    ticks = sorted({round(nnz) for paths in panels.values() for points in paths.values() for nnz, _ in points})
    ticks = [tick for i, tick in enumerate(ticks) if not i or tick > 1.2 * ticks[i - 1]]
    figure.update_xaxes(title_text="neurons firing for a token, mean (log scale)", type="log", tickvals=ticks)
    figure.update_xaxes(ticktext=[str(tick) for tick in ticks])
    for column, name in enumerate(panels, 1):
        figure.update_yaxes(rangemode="tozero", title_text=f"{name}: times as fast as dense", col=column)
    return _sourced(figure, title, where, 290)


def costs(found: list[dict]) -> go.Figure:
    """Return what planned models take, in percent of the dense ones. found: data.costs."""
    title = "Planned models, in % of the dense ones"
    if not found:
        return nothing(title)
    colours = {"time": plots.BLUE, "weights": plots.ORANGE, "peak memory": plots.GREEN, "energy": plots.RED}
    symbols = {"time": "circle", "weights": "square", "peak memory": "diamond", "energy": "cross"}
    figure = go.Figure()
    for of, colour in colours.items():
        here = [cost for cost in found if cost["of"] == of]
        if here:
            figure.add_scatter(
                x=[cost["percent"] for cost in here],
                y=[cost["what"] for cost in here],
                mode="markers",
                marker={"color": colour, "size": 11, "symbol": symbols[of]},
                name=of,
                customdata=[f"{_number(cost['dense'])} to {_number(cost['ours'])} {cost['unit']}" for cost in here],
                hovertemplate=f"%{{y}}: {of} %{{x:.3g}}%, %{{customdata}}<extra></extra>",
            )
    figure.add_vline(x=100, line={"color": plots.INK, "width": 1})
    figure.update_xaxes(title_text="% of the dense model's (100: the same)")
    figure.update_yaxes(autorange="reversed", automargin=True, ticksuffix="  ")
    return _sourced(figure, title, sources(found), 30 + _ROW * len({cost["what"] for cost in found}))


# ---- parts ----


def _one(figure: go.Figure, axis: str) -> None:
    """A line at 1: as fast as dense."""
    line = {"color": plots.INK, "width": 1}
    figure.add_vline(x=1, line=line) if axis == "x" else figure.add_hline(y=1, line=line)


def _beside(figure: go.Figure, text: str, x: float, y: float | str, **looks) -> None:
    """A small text to the right of a point."""
    looks = {"xshift": 4, "font": {"size": 11, "color": plots.INK}} | looks
    figure.add_annotation(x=x, y=y, text=text, showarrow=False, xanchor="left", **looks)


def _where(found: Iterable[Step]) -> str:
    return sources([step.dense for step in found])


def _sourced(figure: go.Figure, title: str, where: str, height: int) -> go.Figure:
    """The usual style, with the legend below and, under the title, lines that say where the numbers are from. height:
    of all but these lines and the legend."""
    lines = where.replace("; recorded", "<br>recorded").replace("; yours", "<br>yours")
    above = 44 + 21 * (lines.count("<br>") + 1)
    below = 56 + 22 * -(-sum(trace.showlegend is not False for trace in figure.data) // 3)
    full = height + above + below
    figure = plots.styled(figure, f"{title}<br><sub>{lines}</sub>", full)
    return figure.update_layout(
        margin={"t": above, "b": below},
        title={"y": 1 - 30 / full, "yref": "container", "yanchor": "middle"},
        legend={"yanchor": "bottom", "yref": "container", "y": 0.005, "x": 0, "traceorder": "normal"},
    )


def _whole(piece: dict) -> float:
    return sum(piece[key] for key in PIECES)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
