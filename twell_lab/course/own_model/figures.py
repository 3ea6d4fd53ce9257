"""The figure of what swapped layers should be worth on GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from ...analysis import predict
from ..charts import bars, finish, one


def gains(rows: Sequence[dict]) -> go.Figure:
    """Return how many times as fast the layers of a model should be on each GPU, a bar a number of tokens, and which
    percent of the dense layers' time launches take. rows: what `data.gains` returned."""
    name = lambda row: f"{row['tokens']:,} token{'s' * (row['tokens'] > 1)}"
    text = lambda row: f"{row['x_dense']:.2f}<br>launches<br>{row['launches']:.0f}%"
    said = lambda row: f"{row['x_dense']:.2f} times as fast: {row['us']:,.0f} us instead of {row['dense_us']:,.0f}"
    off = [
        f"{row['gpu']}, {row['layers']} recorded layers: predicted over measured time {row['least']:.2f} to "
        f"{row['most']:.2f}, median {row['median']:.2f}"
        for row in predict.errors()
    ]
    figure = one(bars(go.Figure(), rows, "gpu", "x_dense", name, hover=said, text=text))
    axis, most = "times as fast as dense", max((row["x_dense"] for row in rows), default=1)
    figure = finish(figure, "All feed-forward layers, predicted", also=off, height=300, y=axis)
    return figure.update_yaxes(range=[0, 1.35 * most])
