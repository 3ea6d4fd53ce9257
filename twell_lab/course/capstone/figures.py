"""Figures of the capstone, each a function of plain rows; in the style of `plots`."""

from __future__ import annotations

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ... import plots
from ..charts import bars, finish
from ..drawing import arrow, box, say, sheet
from .data import SILVER

_TILE = {0: (1, 4), 1: (2,)}  # of the drawing: which columns fire in each tile of six


def row_of_blocks() -> go.Figure:
    """One row, drawn: the words of its two tiles, the rows of down_t that they name, and the row of y that they add up
    to. Tiles are six columns wide and have four words, so that they fit."""
    figure = go.Figure()
    for t, columns in _TILE.items():
        words = [f"count {len(columns)}", *(f"h | {column}" for column in columns), *["unused"] * (3 - len(columns))]
        for place, text in enumerate(words):
            fill = plots.ORANGE if place == 0 else plots.SKY if place <= len(columns) else plots.FAINT
            box(figure, 0.4 + 5.2 * t + 1.2 * place, 8.2, 1.1, 0.9, fill, text)
        say(figure, 2.8 + 5.2 * t, 9.7, f"tile {t}: columns {6 * t} to {6 * t + 5}")
        for column in range(6):
            x = 0.4 + 0.83 * (6 * t + column)
            box(figure, x, 3.4, 0.7, 2.3, plots.SKY if column in columns else plots.FAINT, f"{6 * t + column}")
            if column in columns:
                start = 0.95 + 5.2 * t + 1.2 * (columns.index(column) + 1), 8.15
                arrow(figure, start, (x + 0.35, 5.75), plots.BLUE)
    say(figure, 5.3, 2.9, "rows of down_t, by column of the matrix, 4 KB each: only those that words name are read")
    box(figure, 3.3, 0.9, 4.0, 0.9, plots.GREEN, "y: one row, summed in float")
    arrow(figure, (5.3, 2.6), (5.3, 1.85))
    return sheet(figure, "One row: its words (value h | column) name the rows of down_t", 10.7, 10.3, 420)


def beside(rows: list[dict]) -> go.Figure:
    """Left: sectors read, in times the floor, with the budget of silver. Right: predicted and measured time. rows: of
    `data.compared`."""
    titles = [f"sectors read (dotted: floor, and {SILVER} times it: silver)", "at 16,384 rows, microseconds"]
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.12, subplot_titles=titles)
    measured = [row for row in rows if row["measured_us"] is not None]
    where = f"measured: {measured[0]['where'].partition(';')[0]}" if measured else ""
    times = lambda row: row["sectors"] / row["floor"]
    for some, height, form, name, colour, col in (
        (rows, times, ".2f", "sectors read", plots.SKY, 1),
        (rows, lambda row: row["predicted_us"], ",.0f", f"predicted for {rows[0]['gpu']}", plots.GREY, 2),
        (measured, lambda row: row["measured_us"], ",.0f", where, plots.BLUE, 2),
    ):
        text = lambda row, height=height, form=form: f"{height(row):{form}}"
        place = {"looks": {name: {"colour": colour}}, "row": 1, "col": col}
        bars(figure, some, "version", height, lambda _, name=name: name, text=text, **place)
    for level in (1, SILVER):
        figure.add_hline(y=level, line={"color": plots.INK, "width": 1, "dash": "dot"}, row=1, col=1)
    figure.update_yaxes(range=[0, 1.15 * max(2.0, *map(times, rows))], title_text="times the floor", row=1, col=1)
    figure.update_yaxes(title_text="microseconds", row=1, col=2)
    return finish(figure, "What is read, and what it takes", height=290).update_annotations(font_size=12)
