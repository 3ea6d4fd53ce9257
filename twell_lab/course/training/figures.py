"""Figures of the notebook on L1 training, each a function of rows and numbers; in the style of `plots`."""

from __future__ import annotations

import math
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ... import plots
from ...plots import apart
from ..drawing import row_at


def density_against_loss(runs: dict[str, object], again: str | None = None) -> go.Figure:
    """Loss over density, one point a run; the band shows how far another seed alone moves the loss.

    runs: label -> TrainResult, or its summary(); the first is the one to compare with. again: the label of
    the run that differs from the first in its seed alone.
    """
    runs = _summaries(runs)
    names = list(runs)
    shares = [100 * run["mean_nnz"] / _width(run) for run in runs.values()]
    shares = [max(share, 1e-3) for share in shares]  # a log axis has no place for 0
    losses = [run["validation_bits_per_byte"] for run in runs.values()]
    figure = go.Figure(
        go.Scatter(
            x=shares,
            y=losses,
            mode="markers+text",
            text=[f" {name}" for name in names],
            textposition="middle right",
            cliponaxis=False,
            showlegend=False,
            marker={"size": 13, "color": [plots.GREY if name in (names[0], again) else plots.BLUE for name in names]},
            hovertemplate="%{text}: %{x:.2g}% fire, %{y:.3f} bits per byte<extra></extra>",
        )
    )
    spread = 0.0
    if again is not None:
        spread = abs(losses[names.index(again)] - losses[0])
        figure.add_hrect(
            y0=losses[0] - spread,
            y1=losses[0] + spread,
            fillcolor=plots.FAINT,
            line_width=0,
            layer="below",
            annotation_text="within what another seed does",
            annotation_position="top right",
            annotation_font_size=11,
        )
    reach = max(max(losses) - min(losses), spread, 0.01)
    figure.update_xaxes(
        title_text="neurons firing for a token, % (log scale)",
        type="log",
        tickformat="~g",
        range=[math.log10(1.3 * max(shares)), math.log10(min(shares) / 2.5)],
        dtick="D2",
    )
    figure.update_yaxes(
        title_text="held-out text, bits per byte (lower is better)",
        range=[min(losses + [losses[0] - spread]) - 0.15 * reach, max(losses) + 0.3 * reach],
    )
    return plots.styled(figure, "Loss against the share of neurons firing: one short run each")


def picked_run(runs: dict[str, object], index: int = 0) -> go.Figure:
    """One run among several: firing neurons during training, and by layer at the end; the others stay grey.

    runs: label -> TrainResult, or its summary(); index: which of them is picked.
    """
    figure = make_subplots(
        rows=1,
        cols=2,
        horizontal_spacing=0.14,
        column_widths=[0.58, 0.42],
        subplot_titles=["training text, during training", "held-out text, at the end, by layer"],
    )
    each = _summaries(runs)
    for label, run in each.items():
        history = run["history"]
        figure.add_scatter(
            x=[row["step"] for row in history],
            y=[row["nnz"] for row in history],
            mode="lines",
            name=label,
            showlegend=False,
            row=1,
            col=1,
            hovertemplate=f"{label}, step %{{x}}: %{{y:.1f}}",
        )
    figure.add_bar(
        x=[],
        y=[],
        showlegend=False,
        marker_color=plots.BLUE,
        row=1,
        col=2,
        textposition="outside",
        cliponaxis=False,
        hovertemplate="%{x}: %{y:.1f} neurons<extra></extra>",
    )
    most = max(share * _width(run) for run in each.values() for share in run["density"])
    figure.update_xaxes(title_text="step", row=1, col=1)
    top = 1.05 * max(row["nnz"] for run in each.values() for row in run["history"])
    figure.update_yaxes(range=[0, top or 1.0], row=1, col=1)
    figure.update_yaxes(range=[0, 1.15 * most], row=1, col=2)
    figure.update_yaxes(title_text=f"neurons firing for a token, of {_width(run)}", title_font_size=13)
    figure = plots.styled(figure, "", height=390).update_layout(margin_t=90)
    figure.update_annotations(font_size=12)
    ends = [run["history"][-1] for run in each.values()]
    places = apart([row["nnz"] for row in ends], 14 * (top or 1.0) / (390 - 90 - 50))  # 14 of the panel's pixels
    for label, end, place in zip(each, ends, places, strict=True):
        figure.add_annotation(
            x=end["step"], y=place, text=label, showarrow=False, xanchor="left", xshift=4, font_size=11, row=1, col=1
        )
    pick_run(figure, runs, index)
    return figure


def pick_run(figure: go.Figure, runs: dict[str, object], index: int) -> None:
    """Pick another run in a figure that `picked_run` made (a FigureWidget of it too)."""
    label, run = row_at(list(_summaries(runs).items()), index)
    for number in range(len(runs)):
        line = figure.data[number].line
        line.color, line.width = (plots.BLUE, 3) if number == index else ("#C8C8C8", 1)
        figure.layout.annotations[2 + number].font.color = plots.BLUE if number == index else plots.GREY
    density, width = run["density"], _width(run)
    bars = figure.data[len(runs)]
    bars.x = [f"layer {number}" for number in range(len(density))]
    bars.y = [share * width for share in density]
    bars.text = [f"{share * width:.1f}" for share in density]
    figure.layout.title.text = (
        f"{label}: {run['mean_nnz']:.1f} of {width} neurons fire on held-out text, "
        f"{run['validation_bits_per_byte']:.3f} bits per byte"
    )


def _summaries(runs: dict[str, Any]) -> dict[str, dict]:
    return {label: run if isinstance(run, dict) else run.summary() for label, run in runs.items()}


def _width(run: dict) -> int:
    return run["config"]["d_ff"]
