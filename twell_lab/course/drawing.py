"""What the figures of several subjects share."""

from __future__ import annotations

import plotly.graph_objects as go

from .. import plots


def nothing(title: str) -> go.Figure:
    """A figure that says that this checkout has no record for it."""
    figure = go.Figure()
    figure.add_annotation(text="nothing is recorded in this checkout", x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False)
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    return plots.styled(figure, title, height=160)
