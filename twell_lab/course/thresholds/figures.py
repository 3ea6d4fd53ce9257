"""The figure of a sparsity: what is kept, what it saves and what it costs. Drawn from what `data.view` returned."""

from __future__ import annotations

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ... import plots
from .data import MOST, sentence

PATHS = {"dense": plots.GREY, "twell": plots.BLUE, "hot_cold": plots.ORANGE}
_DASH = ("line-ew-open", 14)
_DRAWN_AS = [path.replace("_", "/") for path in PATHS]


def picture(view: dict) -> go.Figure:
    """Density, error, overflow and predicted time by layer; and over the sparsity the change of the loss, and how long
    a step took here."""
    figure = make_subplots(
        rows=3,
        cols=2,
        horizontal_spacing=0.1,
        vertical_spacing=0.13,
        subplot_titles=[
            "density, %",
            "relative error of the layer's output, %",
            "tiles with more values than slots, %",
            f"predicted us of a layer, {view['gpu']}, 1 token",
            "change of the loss, %; points: measured, with 95% intervals",
            "ms of a step here, median and middle half; dashes: as it was",
        ],
    )
    looks = [
        ("kept behind the gate", plots.BLUE, 1, 1),
        ("error", plots.RED, 1, 2),
        ("overflow", plots.PURPLE, 2, 1),
        *((name, colour, 2, 2) for name, colour in zip(_DRAWN_AS, PATHS.values(), strict=True)),
    ]
    for name, colour, row, col in looks:
        times = (row, col) == (2, 2)
        hover = f"%{{x}}: %{{y:.2f}}{' us, predicted' if times else '%'}<extra></extra>"
        look = {"name": name, "marker_color": colour, "showlegend": times, "hovertemplate": hover}
        figure.add_bar(x=view["layers"], row=row, col=col, **look)
    figure.add_scatter(
        x=view["layers"],
        name="the dense layer",
        mode="markers",
        marker={"symbol": _DASH[0], "size": _DASH[1], "color": plots.INK},
        row=2,
        col=2,
        hovertemplate="%{x}, dense: %{y:.1f} us, predicted<extra></extra>",
    )
    dot, dash = ({"symbol": symbol, "size": size, "color": plots.INK} for symbol, size in (("circle", 9), _DASH))
    for name, marker, col, hover in (
        ("measured", dot, 1, "sparsity %{x:.0f}%: %{y:+.2f}%, measured"),
        ("here", dot | {"size": 15, "color": plots.RED}, 1, "sparsity %{x:.0f}%: %{y:+.2f}%"),
        ("with thresholds", dot, 2, "sparsity %{x:.0f}%: %{y:.3g} ms with thresholds, measured here"),
        ("without", dash, 2, "%{y:.3g} ms as it was, measured in turn"),
    ):
        figure.add_scatter(
            mode="lines+markers" if name == "measured" else "markers",
            line={"color": plots.GREY, "dash": "dot"},
            marker=marker,
            error_y={"type": "data", "symmetric": False} if name in ("measured", "with thresholds") else None,
            name=name,
            showlegend=False,
            row=3,
            col=col,
            hovertemplate=hover + "<extra></extra>",
        )
    for row, col in ((1, 1), (2, 1)):
        figure.update_yaxes(range=[0, 105], row=row, col=col)
    for row in (1, 2, 3):
        figure.update_yaxes(rangemode="tozero", row=row, col=2)
    figure.update_xaxes(title_text="sparsity, %", range=[-3, 100 * MOST + 4], row=3)
    figure = plots.styled(figure, "", height=900)
    figure.update_layout(margin_t=180, barmode="overlay", legend={"y": -0.08, "yanchor": "top"}, margin_b=90)
    figure.update_annotations(font_size=12)
    move(figure, view)
    return figure


def move(figure: go.Figure, view: dict) -> None:
    """Show another view of the same model in a figure that `picture` made (a FigureWidget of it too)."""
    percent = [view["density"], view["error"], view["overflow"]]
    bars = [[100 * share for share in values] for values in percent]
    bars += [[us if path == at else None for us, at in zip(view["us"], view["path"])] for path in PATHS]
    *traces, dense, loss, here, step, without = figure.data
    for trace, values in zip(traces, bars, strict=True):
        trace.y = values
        if trace.name in _DRAWN_AS:  # only what some layer takes has a place in the legend
            trace.showlegend = any(value is not None for value in values)
    dense.y = view["dense_us"]
    places, changes, low, high = (list(values) for values in zip(*view["points"]))
    loss.x, loss.y = [100 * at for at in places], changes
    loss.error_y.array = [top - change for top, change in zip(high, changes)]
    loss.error_y.arrayminus = [change - bottom for change, bottom in zip(changes, low)]
    here.x, here.y = ([], []) if view["loss"] is None else ([100 * view["sparsity"]], [view["loss"]])
    here.marker.symbol = "circle" if view["measured"] else "circle-open"
    places, medians, low, high, alone = ([*values] for values in zip(*view["steps"])) if view["steps"] else [[]] * 5
    step.x = without.x = [100 * at for at in places]
    step.y, without.y = medians, alone
    step.error_y.array = [top - median for top, median in zip(high, medians)]
    step.error_y.arrayminus = [median - bottom for median, bottom in zip(medians, low)]
    said = sentence(view).replace("(lossy): ", "(lossy)<br><sup>")
    for part in ("on ", "here "):
        said = said.replace(f"; {part}", f"</sup><br><sup>{part}")
    figure.layout.title.text = f"{said}</sup>"
