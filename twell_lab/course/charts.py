"""Charts over rows, which are dicts: a line or bars for each group of them, the legend below, and a title that says
where the numbers are from.

x, y and by are keys of a row, or functions of it; hover and text are functions that return a string. looks: a group's
name -> what differs from the usual look: colour, dash, symbol, size, and options of plotly's trace. Other arguments
are such options for all groups, among them row and col."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from .. import plots

Of = str | Callable[[dict], object]
MARKS = ("circle", "square", "diamond", "cross", "x", "triangle-up", "star")


def groups(rows: Iterable[dict], by: Of) -> dict:
    """Return rows by what `by` says of them, in the order of their first ones."""
    grouped: dict = {}
    for row in rows:
        grouped.setdefault(_of(by, row), []).append(row)
    return grouped


def lines(
    figure: go.Figure,
    rows: Iterable[dict],
    x: Of,
    y: Of,
    by: Of,
    *,
    hover: Callable[[dict], str] | None = None,
    looks: Mapping | None = None,
    **more,
) -> go.Figure:
    """Add a line for each group, with a mark for each row."""
    for i, (name, mine) in enumerate(groups(rows, by).items()):
        look = dict((looks or {}).get(name, {}))
        colour = look.pop("colour", plots.COLOURS[i % len(plots.COLOURS)])
        symbol = look.pop("symbol", MARKS[i % len(MARKS)])
        line = {"color": colour, "dash": look.pop("dash", "solid"), "width": look.pop("width", 2)}
        marker = {"size": look.pop("size", 8), "symbol": symbol, "color": colour} | look.pop("marker", {})
        usual = {"line": line, "marker": marker, "mode": "lines+markers"}
        places = {"x": [_of(x, row) for row in mine], "y": [_of(y, row) for row in mine]}
        figure.add_scatter(**places | _named(figure, name, mine, hover) | usual | more | look)
    return figure


def bars(
    figure: go.Figure,
    rows: Iterable[dict],
    x: Of,
    y: Of,
    by: Of,
    *,
    hover: Callable[[dict], str] | None = None,
    text: Callable[[dict], str] | None = None,
    looks: Mapping | None = None,
    across: bool = False,
    **more,
) -> go.Figure:
    """Add bars for each group: upright ones over x, or, `across`, flat ones beside x, as long as y says."""
    for i, (name, mine) in enumerate(groups(rows, by).items()):
        look = {"colour": plots.COLOURS[i % len(plots.COLOURS)], **(looks or {}).get(name, {})}
        marker = {"color": look.pop("colour"), "pattern": {"fgcolor": "white", "size": 6, **look.pop("pattern", {})}}
        usual = {
            "marker": marker | look.pop("marker", {}),
            "text": [text(row) for row in mine] if text else None,
            "textposition": "outside",
            "cliponaxis": False,
            "textangle": 0,
            "orientation": "h" if across else "v",
        }
        places, values = [_of(x, row) for row in mine], [_of(y, row) for row in mine]
        ends = {"x": values, "y": places} if across else {"x": places, "y": values}
        figure.add_bar(**ends | _named(figure, name, mine, hover) | usual | more | look)
    return figure


def squares(figure: go.Figure, numbers: list, colours: Iterable[str], **looks) -> go.Figure:
    """Add a matrix as squares to a figure: number i takes the i-th of the colours, None leaves a gap. looks: other
    options of plotly's heatmap, such as row and col."""
    colours = list(colours)
    flat = [[(i + edge) / len(colours), colour] for i, colour in enumerate(colours) for edge in (0, 1)]  # no blending
    return figure.add_heatmap(
        z=numbers,
        zmin=-0.5,
        zmax=len(colours) - 0.5,
        colorscale=flat,
        showscale=False,
        hoverongaps=False,
        **looks,
    )


def legend_key(figure: go.Figure, name: str, colour: str) -> go.Figure:
    """Add a square of this colour to the legend, with a name."""
    marker = {"color": colour, "symbol": "square", "size": 11, "line": {"color": plots.GREY, "width": 1}}
    return figure.add_scatter(x=[None], y=[None], mode="markers", marker=marker, name=name)


def grids(
    matrices: Mapping[str, list],
    kinds: Mapping[str, str] | Sequence[str],
    title: str,
    height: int,
    *,
    across: int = 3,
    widths: list[int] | None = None,
    **looks,
) -> go.Figure:
    """Draw matrices of numbers as squares, a panel for each name. Number i has the i-th colour; where kinds are named
    (name -> colour), the legend says them. looks: options of plotly's heatmap, such as xgap."""
    cuts = {"rows": -(-len(matrices) // across), "cols": across, "subplot_titles": [*matrices]}
    figure = make_subplots(**cuts, column_widths=widths, horizontal_spacing=0.04, vertical_spacing=0.14)
    named = kinds if isinstance(kinds, Mapping) else dict(enumerate(kinds))
    for i, matrix in enumerate(matrices.values()):
        place = {"row": 1 + i // across, "col": 1 + i % across}
        squares(figure, matrix, named.values(), **{"hoverinfo": "skip", "showlegend": False} | place | looks)
    for name, colour in kinds.items() if isinstance(kinds, Mapping) else ():
        legend_key(figure, name, colour)
    figure.update_xaxes(showticklabels=False, showgrid=False, zeroline=False)
    figure.update_yaxes(showticklabels=False, showgrid=False, zeroline=False, autorange="reversed")
    return finish(figure, title, height=height).update_annotations(font_size=12)


def finish(
    figure: go.Figure,
    title: str,
    rows: Iterable[dict] = (),
    height: int = 300,
    *,
    x: str = "",
    y: str = "",
    log_x: Iterable[float] = (),
    log_y: Iterable[float] = (),
    across: bool = False,
    also: Sequence[str] = (),
) -> go.Figure:
    """Return the figure in the style of `plots`, or one that says that nothing is recorded, where nothing was added.

    rows: each different `where` of them becomes a line below the title, then come those of `also`. height: of all but
    title and legend. x, y: titles of the axes; log_x, log_y: numbers marked on an axis, which becomes logarithmic.
    across: the bars are flat, the first one is the uppermost."""
    if not figure.data:
        say(figure, 0.5, 0.5, "nothing is recorded in this checkout", xref="paper", yref="paper")
        figure.update_xaxes(visible=False).update_yaxes(visible=False)
        return plots.styled(figure, title, height=160)
    for update, name, ticks in ((figure.update_xaxes, x, log_x), (figure.update_yaxes, y, log_y)):
        ticks = sorted({*ticks})
        if name:
            update(title_text=name + " (log scale)" * bool(ticks))
        if ticks:
            named = [f"{tick:,.0f}" if tick >= 10 else f"{tick:.3g}" for tick in ticks]
            update(type="log", tickvals=ticks, ticktext=named)
    if across:
        figure.update_yaxes(autorange="reversed", automargin=True, ticksuffix="  ")
    elif not log_y:
        figure.update_yaxes(rangemode="tozero")
    sources = [*dict.fromkeys(row["where"] for row in rows), *also]
    named = [trace.name or "" for trace in figure.data if trace.showlegend is not False]
    columns = max(1, int(780 // (6.2 * max(map(len, named), default=0) + 45)))
    panels = any(note.yref == "paper" and note.yanchor == "bottom" for note in figure.layout.annotations)
    above = 44 + 21 * max(1, len(sources)) + 22 * panels
    below = 56 + 20 * -(-len(named) // columns) * (len(named) > 1)
    full = height + above + below
    figure = plots.styled(figure, title + f"<br><sub>{'<br>'.join(sources)}</sub>" * bool(sources), full)
    return figure.update_layout(
        margin={"t": above, "b": below},
        title={"y": 1 - 30 / full, "yref": "container", "yanchor": "middle"},
        legend={"yanchor": "bottom", "yref": "container", "y": 0.005, "x": 0, "traceorder": "normal"},
        showlegend=len(named) > 1,
    )


def say(
    figure: go.Figure,
    x: float,
    y: float,
    text: str,
    anchor: str = "center",
    size: int = 12,
    colour: str = plots.INK,
    **looks,
) -> go.Figure:
    """Write a text around a point; anchor "left": to the right of it. looks: other options of plotly's annotation."""
    font = {"size": size, "color": colour}
    return figure.add_annotation(x=x, y=y, text=text, showarrow=False, xanchor=anchor, align=anchor, font=font, **looks)


def one(figure: go.Figure, axis: str = "y") -> go.Figure:
    """Add a line at 1: as fast as dense."""
    line = {"color": plots.INK, "width": 1}
    return figure.add_vline(x=1, line=line) if axis == "x" else figure.add_hline(y=1, line=line)


def _of(what: Of, row: dict):
    return what(row) if callable(what) else row[what]


def _named(figure: go.Figure, name: str, rows: list[dict], hover: Callable[[dict], str] | None) -> dict:
    """Return a trace's name and hover texts. Of the traces of one name in several panels the first is in the legend."""
    shown = {"name": name, "legendgroup": name, "showlegend": all(trace.name != name for trace in figure.data)}
    return shown | (
        {"hovertext": [hover(row) for row in rows], "hoverinfo": "text"} if hover else {"hoverinfo": "skip"}
    )
