"""What the figures of several subjects share."""

from __future__ import annotations

from collections.abc import Iterable

import plotly.graph_objects as go
from plotly.colors import hex_to_rgb, unlabel_rgb

from .. import plots

# A legend to the right of the figure, one entry a line.
BESIDE = {"orientation": "v", "x": 1.02, "y": 1, "xanchor": "left", "yanchor": "top"}


def flat(colours: Iterable[str]) -> list:
    """A colour scale of flat steps: each colour for an equal part of the way from zmin to zmax, without blending."""
    colours = list(colours)
    return [[(i + edge) / len(colours), colour] for i, colour in enumerate(colours) for edge in (0, 1)]


def contrast(one: str, other: str) -> float:
    """How well two colours ("#rrggbb" or "rgb(r, g, b)") can be told apart, from 1 to 21, as WCAG 2 defines it."""
    low, high = sorted(map(_luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    parts = hex_to_rgb(colour) if colour.startswith("#") else unlabel_rgb(colour)
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in (c / 255 for c in parts)]
    return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def text_on(colour: str) -> str:
    """White or the ink of texts: whichever can be read better on this colour."""
    return max(("#FFFFFF", plots.INK), key=lambda text: contrast(text, colour))


def squares(figure: go.Figure, numbers: list, colours: Iterable[str], **looks) -> go.Figure:
    """Add a matrix as squares to a figure: number i takes the i-th of the colours, None leaves a gap.

    looks: other options of plotly's heatmap, such as row and col.
    """
    colours = list(colours)
    return figure.add_heatmap(
        z=numbers,
        zmin=-0.5,
        zmax=len(colours) - 0.5,
        colorscale=flat(colours),
        showscale=False,
        hoverongaps=False,
        **looks,
    )


def frames(figure: go.Figure, framed: list, row: int) -> go.Figure:
    """Add what lies behind a panel of squares and shows as their frames: 1 where one is framed, None elsewhere."""
    return figure.add_heatmap(
        z=framed,
        colorscale=[[0, plots.INK], [1, plots.INK]],
        showscale=False,
        hoverinfo="skip",
        hoverongaps=False,
        xgap=1,
        ygap=1,
        row=row,
        col=1,
    )


def legend_key(figure: go.Figure, name: str, colour: str) -> go.Figure:
    """Add a square of this colour to the legend, with a name."""
    marker = {"color": colour, "symbol": "square", "size": 11, "line": {"color": plots.GREY, "width": 1}}
    return figure.add_scatter(x=[None], y=[None], mode="markers", marker=marker, name=name)


def nothing(title: str) -> go.Figure:
    """A figure that says that this checkout has no record for it."""
    figure, place = go.Figure(), {"x": 0.5, "y": 0.5, "xref": "paper", "yref": "paper", "showarrow": False}
    figure.add_annotation(text="nothing is recorded in this checkout", **place)
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    return plots.styled(figure, title, height=160)


def box(
    figure: go.Figure, x: float, y: float, wide: float, high: float, fill: str, text: str = "", framed=False, **looks
) -> None:
    """Draw a rectangle from its lower left corner, with a text in its middle. looks: other options of `say`."""
    line = {"color": plots.INK, "width": 2.5} if framed else {"color": "white", "width": 1}
    figure.add_shape(type="rect", x0=x, x1=x + wide, y0=y, y1=y + high, fillcolor=fill, line=line)
    if text:
        say(figure, x + wide / 2, y + high / 2, text, **looks)


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


def arrow(figure: go.Figure, start: tuple[float, float], end: tuple[float, float], colour: str = plots.INK) -> None:
    """Draw an arrow between two points (x, y)."""
    (ax, ay), (x, y) = start, end
    refs = {"xref": "x", "yref": "y", "axref": "x", "ayref": "y"}
    figure.add_annotation(
        x=x, y=y, ax=ax, ay=ay, showarrow=True, arrowhead=2, arrowwidth=1.5, arrowcolor=colour, **refs
    )


def sheet(figure: go.Figure, title: str, wide: float, high: float, height: int) -> go.Figure:
    """The figure as a drawing: no axes, from (0, 0) to (wide, high), `height` pixels."""
    figure.update_xaxes(visible=False, range=[0, wide])
    figure.update_yaxes(visible=False, range=[0, high])
    figure = plots.styled(figure, title, height=height)
    return figure.update_layout(template="none", plot_bgcolor="white", margin={"l": 10, "r": 10, "t": 50, "b": 10})
