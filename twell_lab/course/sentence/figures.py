"""The figure of a sentence: the neurons of a token, how many fire along the sentence, what is read, how long that takes
and what it costs. Drawn from what `data.view` returned."""

from __future__ import annotations

import html
import textwrap

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ... import plots
from ..charts import say, squares
from .data import ACROSS, SIZE, ms, of, percent, said, size

STATES = ((2, "fire"), (1, "silenced by the cut"))  # of a neuron; 0: silent by itself
COLOURS = ("#EDEDED", plots.SKY, plots.RED)  # by state
_LINE = 104  # letters of a line below the figure
_LINES = (plots.GREY, plots.BLUE, plots.GREEN, plots.PURPLE)  # of the models' losses


def picture(view: dict) -> go.Figure:
    """Draw a view, 600 pixels high."""
    parts = {"column_widths": [0.58, 0.42], "row_heights": [0.6, 0.4]}
    figure = make_subplots(rows=2, cols=2, horizontal_spacing=0.2, vertical_spacing=0.18, **parts)
    (layers, d_ff), place = view["states"].shape, list(range(len(view["tokens"])))
    squares(figure, _cells(view), COLOURS, row=1, col=1, xgap=1, ygap=1, hoverinfo="skip")
    lines = -(-d_ff // ACROSS)
    for layer in range(1, layers):
        figure.add_hline(y=lines * layer - 0.5, line={"color": "white", "width": 4}, row=1, col=1)
    for name, colour in (("fire", COLOURS[2]), ("silenced by the cut", COLOURS[1])):
        hover = f"%{{y:,}} {name}<extra></extra>"
        figure.add_bar(x=place, name=name, marker_color=colour, hovertemplate=hover, row=2, col=1)
    here = {"symbol": "triangle-up", "size": 9, "color": plots.INK}
    figure.add_scatter(mode="markers", marker=here, hoverinfo="skip", row=2, col=1)
    bars = {"orientation": "h", "hovertemplate": "%{x:.0f}% of dense<extra></extra>", "row": 1, "col": 2}
    for colour in (plots.GREEN, plots.FAINT):
        figure.add_bar(marker_color=colour, **bars)
    for name, colour in zip(view["losses"], _LINES, strict=False):
        look = {"line": {"color": colour}, "marker": {"size": 5}, "hovertemplate": "%{y:.2f} bits a token"}
        figure.add_scatter(name=name, mode="lines+markers", row=2, col=2, **look)
    here = {"size": 13, "color": plots.RED}
    figure.add_scatter(mode="markers", marker=here, hoverinfo="skip", row=2, col=2)

    plots.styled(figure, "", height=600).update_layout(barmode="stack", showlegend=False)
    figure.update_layout(margin={"t": 82, "b": 84, "l": 58, "r": 24}, bargap=0.12)
    figure.update_xaxes(visible=False, row=1, col=1)
    middles = [lines * layer + (lines - 1) / 2 for layer in range(layers)]
    names = [f"layer {layer}" for layer in range(layers)]
    figure.update_yaxes(autorange="reversed", tickvals=middles, ticktext=names, showgrid=False, row=1, col=1)
    figure.update_xaxes(tickangle=0, tickfont={"size": 10, "family": "monospace"}, showgrid=False, row=2, col=1)
    figure.update_yaxes(nticks=4, row=2, col=1)
    figure.update_xaxes(
        range=[0, 100], tickvals=[0, 50, 100], ticktext=["0", "half", "dense"], ticklabeloverflow="allow", row=1, col=2
    )
    figure.update_yaxes(autorange="reversed", automargin=False, showgrid=False, row=1, col=2)
    cuts = [percent(cut) for cut in view["cuts"]]
    figure.update_xaxes(tickvals=list(range(len(cuts))), ticktext=cuts, tickfont_size=10, tickangle=0, row=2, col=2)
    paper = {"xref": "paper", "yref": "paper", "yanchor": "bottom"}
    models = " ".join(_key(colour, name) for name, colour in zip(view["losses"], _LINES))
    texts = (
        "",
        f"along the sentence: {', '.join(_key(COLOURS[state], word) for state, word in STATES)}",
        "a token reads; a layer of {:,} x {:,} takes".format(*SIZE),
        f"loss: {models}",
    )
    for text, axes in zip(texts, "1324", strict=True):
        x, y = (figure.layout[f"{letter}axis{axes.strip('1')}"].domain for letter in "xy")
        say(figure, x[0], y[1] + 0.01, text, "left", **paper)
    say(figure, 0, -0.09, "", "left", 13, **(paper | {"yanchor": "top"}))
    move(figure, view)
    return figure


def _key(colour: str, text: str) -> str:
    return f'<span style="color:{colour}">■</span> {text}'


def _cells(view: dict) -> list[list[int | None]]:
    """Return the map's numbers: ACROSS neurons a line, layer below layer."""
    rows = []
    for layer in view["states"].tolist():
        layer += [None] * (-len(layer) % ACROSS)
        rows += [layer[at : at + ACROSS] for at in range(0, len(layer), ACROSS)]
    return rows


def move(figure: go.Figure, view: dict) -> None:
    """Show another view, of the same models, in a figure that `picture` made (a FigureWidget of it too)."""
    cells, fire, cut, here, part, rest, *losses, point = figure.data
    states, layout, place = view["states"], figure.layout, list(range(len(view["tokens"])))
    cells.z = _cells(view)
    fire.x = cut.x = place
    fire.y, cut.y = view["fires"], [whole - now for whole, now in zip(view["whole"], view["fires"])]
    here.x, here.y = [view["token"]], [0]
    layout.xaxis3.tickvals, layout.xaxis3.ticktext = place, view["tokens"]
    layout.xaxis3.range = [-0.6, len(place) - 0.4]
    rows = [("weights, this model", view["bytes"], view["dense_bytes"], size)]
    rows += [(where, took, dense, ms) for where, took, dense in view["times"]]
    shares = [None if now is None else 100 * now / dense for _, now, dense, _ in rows]
    part.x, rest.x = shares, [None if share is None else max(0, 100 - share) for share in shares]
    part.y = rest.y = layout.yaxis2.tickvals = list(range(len(rows)))
    layout.yaxis2.ticktext = [
        "<br>".join(textwrap.wrap(name, 20) + [f"<b>{line}</b>" for line in textwrap.wrap(of(*row), 20)])
        for name, *row in rows
    ]
    for line, values in zip(losses, view["losses"].values(), strict=True):
        line.x, line.y = list(range(len(values))), values
    point.x, point.y = [view["cuts"].index(view["cut"])], [view["loss"]]
    layout.title.text = said(view)
    fires, silenced = (_key(COLOURS[state], f"{int((states == state).sum()):,} {word}") for state, word in STATES)
    letter = view["tokens"][view["token"]]
    layout.annotations[0].text = f"token {view['token']}, “{letter}”: {fires}, {silenced}, of {states.size:,} neurons"
    # The sentence, and bold what the model wrote after it.
    lines = textwrap.wrap(f"{view['sentence']}\0{view['text']}", _LINE)[:3]
    layout.annotations[-1].text = html.escape("\n".join(lines)).replace("\n", "<br>").replace("\0", "<b>") + "</b>"
