"""Figures of the capstone, each a function of plain rows; in the style of `plots`."""

from __future__ import annotations

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ... import plots
from .data import SILVER

_TILE = {0: (1, 4), 1: (2,)}  # of the drawing: which columns fire in each tile of six


def row_of_blocks() -> go.Figure:
    """One row, drawn: the words of its two tiles, the rows of down_t that they name, and the row of y that they add up
    to. Tiles are six columns wide and have four words, so that they fit."""
    figure = go.Figure()
    words = [
        text
        for count, columns in ((len(columns), columns) for columns in _TILE.values())
        for text in (f"count {count}", *(f"h | {column}" for column in columns), *["unused"] * (3 - count))
    ]
    for at, text in enumerate(words):
        t, place = divmod(at, 4)
        fill = plots.ORANGE if place == 0 else plots.SKY if place <= len(_TILE[t]) else plots.FAINT
        _box(figure, 0.4 + 5.2 * t + 1.2 * place, 8.2, 1.1, 0.9, fill, text)
    for t in _TILE:
        _say(figure, 2.8 + 5.2 * t, 9.7, f"tile {t}: columns {6 * t} to {6 * t + 5}")
    for column in range(12):
        fires = column % 6 in _TILE[column // 6]
        _box(figure, 0.4 + 0.83 * column, 3.4, 0.7, 2.3, plots.SKY if fires else plots.FAINT, f"{column}")
        if fires:
            t, place = column // 6, _TILE[column // 6].index(column % 6)
            figure.add_annotation(
                x=0.75 + 0.83 * column,
                y=5.75,
                ax=0.95 + 5.2 * t + 1.2 * (place + 1),
                ay=8.15,
                axref="x",
                ayref="y",
                xref="x",
                yref="y",
                showarrow=True,
                arrowhead=2,
                arrowcolor=plots.BLUE,
            )
    _say(figure, 5.3, 2.9, "rows of down_t, by column of the matrix, 4 KB each: only those that words name are read")
    _box(figure, 3.3, 0.9, 4.0, 0.9, plots.GREEN, "y: one row, summed in float")
    figure.add_annotation(
        x=5.3, y=1.85, ax=5.3, ay=2.6, axref="x", ayref="y", showarrow=True, arrowhead=2, arrowcolor=plots.INK
    )
    figure.update_xaxes(visible=False, range=[0, 10.7])
    figure.update_yaxes(visible=False, range=[0.4, 10.3])
    return plots.styled(figure, "One row: its words (value h | column) name the rows of down_t", height=420)


def _box(figure: go.Figure, x: float, y: float, wide: float, high: float, fill: str, text: str) -> None:
    figure.add_shape(type="rect", x0=x, x1=x + wide, y0=y, y1=y + high, fillcolor=fill, line_color="white")
    _say(figure, x + wide / 2, y + high / 2, text)


def _say(figure: go.Figure, x: float, y: float, text: str) -> None:
    figure.add_annotation(x=x, y=y, text=text, showarrow=False, font={"size": 12, "color": plots.INK})


def beside(rows: list[dict]) -> go.Figure:
    """Left: sectors read, in times the floor, with the budget of silver. Right: predicted and measured time. rows: of
    `data.compared`."""
    names = [row["version"] for row in rows]
    figure = make_subplots(
        rows=1,
        cols=2,
        horizontal_spacing=0.12,
        subplot_titles=[f"sectors read (dotted: floor, and {SILVER} times it: silver)", "at 16,384 rows, microseconds"],
    )
    times = [row["sectors"] / row["floor"] for row in rows]
    bars = {"textposition": "outside", "cliponaxis": False}
    figure.add_bar(
        x=names,
        y=times,
        text=[f"{each:.2f}" for each in times],
        marker_color=plots.SKY,
        name="sectors",
        showlegend=False,
        row=1,
        col=1,
        **bars,
    )
    for level in (1, SILVER):
        figure.add_hline(y=level, line={"color": plots.INK, "width": 1, "dash": "dot"}, row=1, col=1)
    figure.add_bar(
        x=names,
        y=[row["predicted_us"] for row in rows],
        text=[f"{row['predicted_us']:,.0f}" for row in rows],
        name=f"predicted for {rows[0]['gpu']}",
        marker_color=plots.FAINT,
        marker_line={"color": plots.GREY, "width": 1},
        row=1,
        col=2,
        **bars,
    )
    measured = [row for row in rows if row["measured_us"] is not None]
    if measured:
        figure.add_bar(
            x=[row["version"] for row in measured],
            y=[row["measured_us"] for row in measured],
            text=[f"{row['measured_us']:,.0f}" for row in measured],
            name=f"measured: {measured[0]['where'].partition(';')[0]}",
            marker_color=plots.BLUE,
            row=1,
            col=2,
            **bars,
        )
    most = max([row["predicted_us"] for row in rows] + [row["measured_us"] for row in measured])
    figure.update_yaxes(range=[0, 1.15 * max(2.0, *times)], title_text="times the floor", row=1, col=1)
    figure.update_yaxes(range=[0, 1.15 * most], title_text="microseconds", row=1, col=2)
    figure = plots.styled(figure, "What is read, and what it takes", height=420).update_annotations(font_size=12)
    return figure.update_layout(barmode="group", margin={"t": 90, "b": 80}, legend={"y": -0.12, "yanchor": "top"})
