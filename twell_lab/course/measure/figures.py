"""Figures of the first notebooks, each a function of rows and numbers; in the style of `plots`."""

from __future__ import annotations

import plotly.graph_objects as go

from ... import plots
from ...ops.clock import quartiles
from ..drawing import say, squares
from .data import ms

LINES = {"COO": plots.ORANGE, "CSR": plots.RED, "CSR + conversion": plots.PURPLE, "ELL": plots.BLUE}


def bars(
    samples: dict[str, list[float]],
    title: str,
    base: str | None = None,
    shown: str = "median; whiskers hold the middle half",
) -> go.Figure:
    """The median time of each call as a bar, with whiskers that span the middle half of its samples, if several.

    samples: name -> milliseconds; base: the name that the others are compared with, drawn grey; shown: what the axis
    says of the bars, where single readings stand beside medians.
    """
    names = list(samples)
    middle = {name: quartiles(values)[0] for name, values in samples.items()}
    low, high = {}, {}
    for name in names:
        values = sorted(samples[name])
        low[name] = middle[name] - values[len(values) // 4]
        high[name] = values[(3 * len(values) - 1) // 4] - middle[name]
    # The whisker's end, not the bar's, decides where the figure beside it may stand.
    reach = [middle[name] + high[name] for name in names]
    figure = go.Figure(layout={"barmode": "overlay"})
    for several in (True, False):  # a single reading has no whiskers, not some of length 0
        if mine := [name for name in names if (len(samples[name]) > 1) == several]:
            ends = {"array": [high[name] for name in mine], "arrayminus": [low[name] for name in mine]}
            figure.add_bar(
                y=mine,
                x=[middle[name] for name in mine],
                orientation="h",
                showlegend=False,
                marker_color=[plots.GREY if name == base else plots.BLUE for name in mine],
                error_x=ends | {"color": plots.INK, "thickness": 1, "width": 4} if several else None,
                hovertemplate="%{y}: %{x:.3g} ms<extra></extra>",
            )
    for name, end in zip(names, reach, strict=True):
        times = middle[base] / middle[name] if base else 1.0
        ratio = f"  ({times:{',.0f' if times >= 100 else '.3g'}}x)" if base and name != base else ""
        say(figure, end, name, f"{ms(middle[name])}{ratio}", "left", xshift=8)
    figure.update_xaxes(title_text=f"milliseconds ({shown})", rangemode="tozero", range=[0, 1.28 * max(reach)])
    figure.update_yaxes(autorange="reversed", automargin=True, categoryorder="array", categoryarray=names)
    return plots.styled(figure, title, height=150 + 44 * len(names))


def firing_map(fires: list[bool], across: int = 128) -> go.Figure:
    """One token's neurons as a grid of dots, the firing ones orange. fires: a truth value for each neuron."""
    down = -(-len(fires) // across)
    cells = [[None] * across for _ in range(down)]
    for i, on in enumerate(fires):
        cells[i // across][i % across] = int(on)
    looks = {"xgap": 1, "ygap": 1, "hovertemplate": "neuron %{y} + %{x}<extra></extra>"}
    y = [line * across for line in range(down)]
    figure = squares(go.Figure(), cells, ("#EDEDED", plots.RED), y=y, **looks)
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False, autorange="reversed")
    title = f"One token: {sum(map(bool, fires))} of {len(fires):,} neurons fire (orange)"
    return plots.styled(figure, title, height=80 + 6 * down).update_layout(margin={"t": 46, "b": 14, "l": 14})


def against_density(table: list[dict], title: str, recorded: list[dict] | None = None) -> go.Figure:
    """Return how many times as fast as dense each format is, over the density of the matrix.

    table: rows of `data.against_density`; recorded: rows of `data.recorded`, drawn dotted and named by device
    and day.
    """
    figure = go.Figure()
    for own, part in ((True, table), (False, recorded or [])):
        for where, path in dict.fromkeys((row.get("device"), row["path"]) for row in part):
            rows = [row for row in part if (row.get("device"), row["path"]) == (where, path)]
            rows.sort(key=lambda row: row["density"])
            if path == "dense":
                continue
            name = f"{path}, yours, now" if own else f"{path}, recorded on {where}, {rows[0]['date'][:10]}"
            figure.add_scatter(
                x=[100 * row["density"] for row in rows],
                y=[row["x_dense"] for row in rows],
                name=name,
                mode="lines+markers",
                marker={"size": 8, "symbol": "circle" if own else "diamond-open"},
                line={"color": LINES.get(path, plots.GREEN), "dash": "solid" if own else "dot"},
                customdata=[[row["ms"], row["dense_ms"]] for row in rows],
                hovertemplate="%{x:.2g}% stored: %{y:.2f}x (%{customdata[0]:.3g} ms, dense %{customdata[1]:.3g} ms)",
            )
    figure.add_hline(y=1, line={"color": plots.INK, "width": 1})
    # On a log axis an annotation's place is the exponent: 0 is the line at 1x.
    say(figure, 1, 0, "dense", "left", 11, xref="paper")  # beside the line's end: elsewhere there may be points
    shares = sorted({100 * row["density"] for row in [*table, *(recorded or [])]})
    ticks = [share for i, share in enumerate(shares) if not i or share / shares[i - 1] > 1.3]
    figure.update_xaxes(
        title_text="density: values that are not zero, % (log scale)",
        type="log",
        tickvals=ticks,
        ticktext=[f"{float(f'{share:.1g}'):g}" for share in ticks],
    )
    marks = [0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300]
    figure.update_yaxes(
        title_text="times as fast as dense (log scale)",
        type="log",
        tickvals=marks,
        ticktext=[f"{mark:g}x" for mark in marks],
    )
    lines = -(-len(figure.data) // 2)
    figure = plots.styled(figure, title, height=400 + 20 * lines)
    return figure.update_layout(legend={"yanchor": "top", "y": -0.18, "x": 0}, margin={"b": 70 + 20 * lines, "r": 60})
