"""What the figures of several subjects share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import plotly.graph_objects as go

from .. import plots
from ..core.errors import InputError


def row_at(rows: Sequence, index: int, what: str = "runs"):
    """The row at this index, from 0. what: what to call the rows where there is none."""
    if not 0 <= index < len(rows):
        raise InputError(f"index is {index!r}; there are {what} 0 to {len(rows) - 1}")
    return rows[index]


def flat(colours: Iterable[str]) -> list:
    """A colour scale of flat steps: each colour for an equal part of the way from zmin to zmax, without blending."""
    colours = list(colours)
    return [[(i + edge) / len(colours), colour] for i, colour in enumerate(colours) for edge in (0, 1)]


def note(figure: go.Figure, text: str, **looks) -> go.Figure:
    """Write a text into the middle of a figure that has nothing to show."""
    return figure.add_annotation(text=text, x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False, **looks)


def nothing(title: str) -> go.Figure:
    """A figure that says that this checkout has no record for it."""
    figure = note(go.Figure(), "nothing is recorded in this checkout")
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    return plots.styled(figure, title, height=160)
