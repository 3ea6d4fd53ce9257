"""The figure of what swapped layers should be worth on GPUs. Drawn from what `data` returned."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from ... import plots
from . import data


def gains(rows: Sequence[dict]) -> go.Figure:
    """Return how many times as fast the layers of a model should be on each GPU, a bar a number of tokens, and which
    percent of the dense layers' time launches take. rows: what `data.gains` returned."""
    figure = go.Figure()
    for count, colour in zip(dict.fromkeys(row["tokens"] for row in rows), plots.COLOURS, strict=False):
        mine = [row for row in rows if row["tokens"] == count]
        figure.add_bar(
            x=[row["gpu"] for row in mine],
            y=[row["x_dense"] for row in mine],
            text=[f"{row['x_dense']:.2f}<br>launches<br>{row['launches']:.0f}%" for row in mine],
            textposition="outside",
            cliponaxis=False,
            name=f"{count:,} token{'s' * (count > 1)}",
            marker_color=colour,
            customdata=[[row["dense_us"], row["us"], row["paths"]] for row in mine],
            hovertemplate="%{y:.2f} times as fast: %{customdata[1]:,.0f} us instead of %{customdata[0]:,.0f}; "
            "layers: %{customdata[2]}<extra></extra>",
        )
    figure.add_hline(y=1, line={"color": plots.INK, "width": 1, "dash": "dash"})
    most = max((row["x_dense"] for row in rows), default=1)
    figure.update_yaxes(title_text="times as fast as dense", range=[0, 1.35 * most])
    figure = plots.styled(figure, f"All feed-forward layers, predicted<br><sup>{data.off()}</sup>")
    return figure.update_layout(margin_t=90)
