"""Figures of the capstone, each a function of plain rows; in the style of `plots`."""

from __future__ import annotations

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ... import plots
from ..charts import bars, finish
from .data import SILVER


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
