"""The figure of a cut beside a training: density against loss. Drawn from what `data` returned."""

from __future__ import annotations

import plotly.graph_objects as go

from ... import plots


def cut_or_train(rows: list[dict], instead: dict | None, what: str) -> go.Figure:
    """The change of the loss over the share of neurons that is left: by thresholds, and by training with L1.

    rows, instead: what `data.cut` and `data.trained` returned. what: the model that was cut."""
    figure = go.Figure()
    shown = [(f"{what}, cut", rows, plots.RED, "circle")]
    if instead:
        shown.append(("trained with L1, beside its twin without", [instead], plots.BLUE, "diamond"))
    for name, points, colour, symbol in shown:
        points = sorted(points, key=lambda point: point["density"])
        figure.add_scatter(
            x=[100 * point["density"] for point in points],
            y=[point["change"] for point in points],
            error_y={
                "type": "data",
                "symmetric": False,
                "array": [point["high"] - point["change"] for point in points],
                "arrayminus": [point["change"] - point["low"] for point in points],
            },
            name=name,
            mode="lines+markers",
            line={"color": colour, "dash": "dot"},
            marker={"size": 11, "symbol": symbol},
            hovertemplate="%{x:.2f}% left: %{y:+.2f}% loss<extra></extra>",
        )
    figure.add_hline(y=0, line={"color": plots.GREY, "width": 1})
    figure.update_xaxes(title_text="neurons left for a token, % (log scale)", type="log")
    figure.update_yaxes(title_text="change of the loss, %")
    return plots.styled(figure, "What fewer neurons cost on held-out text (95% intervals)")
