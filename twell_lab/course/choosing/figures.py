"""Figures of the notebook on choosing a path, each a function of rows and numbers; in the style of `plots`."""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ... import plots
from ...bench.methods import DENSE, EXPERTS, GROUPED, METHODS, PACKED, PREDICTED, SPLIT, TILES
from ..drawing import legend_key, nothing, squares
from ..recorded import sources
from . import data

_MARKS = ("circle", "square", "diamond", "cross", "x", "triangle-up")
COLOUR = {
    DENSE: plots.GREY,
    PACKED: plots.BLUE,
    SPLIT: plots.ORANGE,
    TILES: plots.GREEN,
    EXPERTS: plots.PURPLE,
    PREDICTED: plots.RED,
    GROUPED: plots.SKY,
}
_SHORT = {  # of a cell's width
    DENSE: "dense",
    PACKED: "packed",
    SPLIT: "hot and cold",
    TILES: "micro-tiles",
    EXPERTS: "experts",
    PREDICTED: "predicted",
    GROUPED: "as experts",
}
_KINDS = (  # what works() tells apart
    ("not computed", "#F7F7F7"),
    ("computed for nothing", plots.SKY),
    ("fires, and is computed", plots.BLUE),
    ("fires, and is missed", plots.RED),
)


def _line(figure: go.Figure, rows: list[dict], x, y, name: str, colour: str, mark: int, hover: str, **looks) -> None:
    """Add a line with a mark at each row to a figure. x, y: from a row to a number. looks: of the line's trace."""
    line = {"color": colour, "dash": looks.pop("dash", "solid")}
    figure.add_scatter(
        x=[x(row) for row in rows],
        y=[y(row) for row in rows],
        name=name,
        line=line,
        marker={"size": 8, "symbol": _MARKS[mark % len(_MARKS)]},
        hovertemplate=f"{hover}<extra></extra>",
        **{"mode": "lines+markers"} | looks,
    )


def works(kinds: dict) -> go.Figure:
    """Return what each method computes, a panel a method. kinds: as `data.works` returns them."""
    shares = {
        name: (each != data.SKIPPED).logical_and(each != data.MISSED).double().mean() for name, each in kinds.items()
    }
    figure = make_subplots(
        rows=2,
        cols=3,
        horizontal_spacing=0.03,
        vertical_spacing=0.12,
        subplot_titles=[f"{name}: {share:.0%}" for name, share in shares.items()],
    )
    for i, each in enumerate(kinds.values()):
        squares(
            figure, each.tolist(), [colour for _, colour in _KINDS], row=1 + i // 3, col=1 + i % 3, hoverinfo="skip"
        )
    for name, colour in _KINDS:
        legend_key(figure, name, colour)
    figure.update_xaxes(showticklabels=False, showgrid=False, zeroline=False)
    figure.update_yaxes(showticklabels=False, showgrid=False, zeroline=False, autorange="reversed")
    tokens, neurons = next(iter(kinds.values())).shape
    title = f"{tokens} tokens down, {neurons} neurons across: what each method computes"
    figure = plots.styled(figure, title, height=520).update_annotations(font_size=12)
    return figure.update_layout(margin={"t": 70, "b": 60, "l": 20}, legend={"y": -0.04, "yanchor": "top"})


def occupied(rows: list[dict]) -> go.Figure:
    """The share of a stripe's columns that hold anything over its height: counted, and expected of random firing, a
    colour for each layer. rows: of `data.occupied_rows`."""
    figure = go.Figure()
    for i, layer in enumerate(dict.fromkeys(row["layer"] for row in rows)):
        mine = [row for row in rows if row["layer"] == layer]
        for key, dash in (("measured", "solid"), ("expected", "dot")):
            counted, percent = key == "measured", lambda row, key=key: 100 * row[key]
            name = f"layer {layer}, {mine[0]['density']:.1%} fire" + ", if at random" * (not counted)
            looks = {"dash": dash, "showlegend": counted, "mode": "lines+markers" if counted else "lines"}
            colour = plots.COLOURS[i % len(plots.COLOURS)]
            _line(figure, mine, itemgetter("height"), percent, name, colour, i, "%{x} tokens: %{y:.1f}%", **looks)
    figure.update_xaxes(
        type="log", tickvals=sorted({row["height"] for row in rows}), title_text="height of a tile, tokens (log scale)"
    )
    figure.update_yaxes(range=[0, 103], title_text="columns that hold anything, %")
    title = "The taller a tile, the fewer are empty<br><sup>solid: counted; dotted: if firing were random</sup>"
    figure = plots.styled(figure, title, height=430)
    return figure.update_layout(margin={"t": 70, "b": 90}, legend={"y": -0.18, "yanchor": "top"})


def products(rows: list[dict]) -> go.Figure:
    """Micro-tiles beside the dense product over the share of zeros, a line for each source and pattern, with and
    without finding the tiles. rows: each with `where`; those of kind "comparison" are drawn."""
    rows = [row for row in rows if row["kind"] == "comparison"]
    made = [row for row in rows if row["path"].startswith("micro-tiles")]
    if not made:
        return nothing("Micro-tiles beside the dense product")
    key = lambda row: (row["where"], row["path"], row["pattern"])
    part = lambda row: (row["where"], f"part: {row['path']}, conversion", row["pattern"], row["density"])
    finding = {(*key(row), row["density"]): row["ms"] for row in rows}
    several = len({row["where"] for row in made}) > 1
    figure = go.Figure()
    for i, one in enumerate(dict.fromkeys(map(key, made))):
        mine = sorted((row for row in made if key(row) == one), key=lambda row: row["density"])
        name = f"zeros: {one[2]}" + f", {one[0]}" * several
        name = f"{one[1]}, {name}" if len({row["path"] for row in made}) > 1 else name
        for found in (False, True):
            if found and not all(part(row) in finding for row in mine):
                continue
            faster = lambda row, found=found: row["dense_ms"] / (row["ms"] + (finding[part(row)] if found else 0))
            looks = {"dash": "dot" if found else "solid", "customdata": [1 - row["density"] for row in mine]}
            colour, called = plots.COLOURS[i % len(plots.COLOURS)], name + ", with finding them" * found
            hover = "%{customdata:.1%} zeros: %{y:.2f} times as fast"
            _line(figure, mine, itemgetter("density"), faster, called, colour, i, hover, **looks)
    ticks = (0.5, 0.25, 0.1, 0.05, 0.01, 0.001)
    figure.update_xaxes(type="log", autorange="reversed", title_text="zeros (log scale)")
    figure.update_xaxes(tickvals=ticks, ticktext=[f"{100 * (1 - each):g}%" for each in ticks])
    figure.update_yaxes(type="log", tickvals=[0.25, 0.5, 1, 2, 5, 10, 20, 50])
    figure.update_yaxes(title_text="times as fast as dense (log scale)")
    figure.add_hline(y=1, line={"color": plots.INK, "width": 1, "dash": "dot"})
    figure = plots.styled(figure, f"A product in micro-tiles<br><sup>{sources(made)}</sup>", height=450)
    return figure.update_layout(margin={"t": 70, "b": 120}, legend={"y": -0.25, "yanchor": "top"})


def padding(rows: list[dict], recorded: Iterable[dict] = ()) -> go.Figure:
    """Time over the share of real rows, with the padding, without it, and of as many rows that never had any. recorded:
    of `data.recorded("comparison")`; what a GPU took is said in the title."""
    figure = go.Figure()
    for i, path in enumerate(dict.fromkeys(row["path"] for row in rows)):
        mine = [row for row in rows if row["path"] == path]
        colour, dash = (plots.GREY, plots.GREEN, plots.BLUE)[i], ("solid", "solid", "dash")[i]
        share, hover = lambda row: 100 * row["real"], "%{x:.0f}% real: %{y:.3g} ms"
        _line(figure, mine, share, itemgetter("ms"), path, colour, i, hover, dash=dash)
    whole = next(row for row in rows if row["path"] == "padded" and row["real"] == 1)
    line = {"color": plots.INK, "dash": "dot", "width": 1}
    figure.add_scatter(x=[0, 100], y=[0, whole["ms"]], mode="lines", name="in proportion", line=line, hoverinfo="skip")
    figure.update_xaxes(title_text="rows that are real, %", range=[0, 103])
    figure.update_yaxes(title_text="ms", rangemode="tozero")
    beside = data.proportion_sentence(recorded)
    said = sources(rows) + f"<br>{beside}" * bool(beside)
    top = 60 + 20 * len(said.split("<br>"))
    figure = plots.styled(figure, f"A layer on a padded batch<br><sup>{said}</sup>", height=330 + top)
    return figure.update_layout(
        margin={"t": top, "b": 90},
        legend={"y": -0.22, "yanchor": "top"},
        title={"y": 1, "yref": "container", "yanchor": "top", "pad": {"t": 20}},
    )


def firing(shares, times: float | None) -> go.Figure:
    """Return how often each neuron fires, the busiest first, and the share above which it is cheaper dense.

    shares: float [d_ff], of the tokens. times: how many times as much a packed neuron costs as a dense one."""
    if times is None:
        return nothing("How often each neuron fires")
    ordered = sorted((100 * float(each) for each in shares), reverse=True)
    hot = len(data.hot_neurons(shares, times))
    figure = go.Figure()
    for name, colour, part in (
        ("hot: computed densely", plots.ORANGE, slice(0, hot)),
        ("cold", plots.BLUE, slice(hot, None)),
    ):
        figure.add_bar(
            x=[*range(len(ordered))][part], y=ordered[part], name=name, marker_color=colour, marker_line_width=0
        )
    said = f"break-even: 1 in {times:.0f} tokens"
    figure.add_hline(y=100 / times, line={"color": plots.INK, "dash": "dot"}, annotation_text=said)
    figure.update_xaxes(title_text="neurons, busiest first")
    figure.update_yaxes(title_text="fires at so many tokens, %")
    title = (
        f"{hot} of {len(ordered)} neurons are cheaper dense<br><sup>one layer of the small model, with that cost</sup>"
    )
    figure = plots.styled(figure, title, height=380)
    return figure.update_layout(bargap=0, margin={"t": 70, "b": 90}, legend={"y": -0.2, "yanchor": "top"})


def hot_sizes(rows: list[dict]) -> go.Figure:
    """Times as fast as dense over the share of the neurons that is computed densely, a line for each source. Bars: low
    to high, where rows have them."""
    figure = go.Figure()
    for i, where in enumerate(dict.fromkeys(row["where"] for row in rows)):
        mine = [row for row in rows if row["where"] == where]
        spread = [row for row in mine if "low" in row]
        figure.add_scatter(
            x=[100 * row["hot"] / row["d_ff"] for row in mine],
            y=[row["x_dense"] for row in mine],
            error_y={
                "type": "data",
                "symmetric": False,
                "array": [row["high"] - row["x_dense"] for row in spread],
                "arrayminus": [row["x_dense"] - row["low"] for row in spread],
                "thickness": 1,
            },
            mode="lines+markers",
            name=where,
            line={"color": (plots.ORANGE, plots.BLUE, plots.GREEN)[i % 3], "dash": "solid" if spread else "dot"},
            marker={"size": 8, "symbol": _MARKS[i % len(_MARKS)]},
            hovertemplate="%{x:.0f}% hot: %{y:.2f} times as fast<extra></extra>",
        )
    figure.add_hline(y=1, line={"color": plots.INK, "width": 1, "dash": "dot"})
    figure.update_xaxes(title_text="neurons that are computed densely, %: 0 packed, 100 dense")
    figure.update_yaxes(title_text="times as fast as dense", rangemode="tozero")
    title = "How many should be hot?<br><sup>bars: eight in ten of the turns in which it was timed beside dense</sup>"
    figure = plots.styled(figure, title, height=430)
    return figure.update_layout(margin={"t": 70, "b": 130}, legend={"y": -0.2, "yanchor": "top"})


def experts(rows: list[dict]) -> go.Figure:
    """Time over the number of experts, a panel for each routing, a line for each way."""
    routings = [*dict.fromkeys(row["routing"] for row in rows)]
    titles = [f"tokens {routing}" for routing in routings]
    figure = make_subplots(rows=1, cols=len(routings), shared_yaxes="all", subplot_titles=titles)
    for i, way in enumerate(dict.fromkeys(row["way"] for row in rows)):
        for at, routing in enumerate(routings, start=1):
            mine = [row for row in rows if (row["way"], row["routing"]) == (way, routing)]
            looks = {"legendgroup": way, "showlegend": at == 1, "row": 1, "col": at}
            hover = way + ", %{x} experts: %{y:.3g} ms"
            _line(figure, mine, itemgetter("experts"), itemgetter("ms"), way, plots.COLOURS[i], i, hover, **looks)
    figure.update_xaxes(
        type="log",
        tickvals=sorted({row["experts"] for row in rows}),
        title_text="experts, as many weights in all (log scale)",
    )
    figure.update_yaxes(type="log", tickvals=[0.2, 0.5, 1, 2, 5, 10, 20, 50])
    figure.update_yaxes(title_text="ms (log scale)", col=1)
    title = f"Two experts a token, computed in three ways<br><sup>{sources(rows)}</sup>"
    figure = plots.styled(figure, title, height=410).update_annotations(font_size=12)
    return figure.update_layout(margin={"t": 90, "b": 90}, legend={"y": -0.22, "yanchor": "top"})


def losses(rows: list[dict]) -> go.Figure:
    """Return how much more the loss is, in percent, over the share of the neurons that is computed, a line for each
    way."""
    figure = go.Figure()
    for i, way in enumerate(dict.fromkeys(row["way"] for row in rows)):
        mine = [row for row in rows if row["way"] == way]
        figure.add_scatter(
            x=[100 * row["computed"] for row in mine],
            y=[100 * row["more"] for row in mine],
            mode="lines+markers",
            name=way,
            line={"color": (plots.BLUE, plots.RED, plots.ORANGE)[i % 3]},
            marker={"size": 13 if len(mine) == 1 else 8, "symbol": ("star", "circle", "square")[i % 3]},
            hovertemplate=way + ", %{x:.0f}% computed: %{y:+.1f}% loss<extra></extra>",
        )
    figure.update_xaxes(title_text="neurons of up and down that are computed, %", rangemode="tozero")
    most = max(100 * row["more"] for row in rows)
    figure.update_yaxes(title_text="more loss, %", range=[-0.06 * most, 1.06 * most])
    figure = plots.styled(figure, "What guessing costs the small model", height=400)
    return figure.update_layout(margin={"t": 50, "b": 90}, legend={"y": -0.2, "yanchor": "top"})


def one_token(rows: list[dict]) -> go.Figure:
    """Times as fast as dense for one token over the share of neurons: timed, and by the bytes that have to be read."""
    figure = go.Figure()
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == method]
        for key, dash, said in (("x_dense", "solid", "timed"), ("bytes_x", "dot", "by bytes")):
            looks = {"dash": dash, "mode": "lines+markers" if key == "x_dense" else "lines"}
            share, hover, mark = (
                lambda row: 100 * row["share"],
                "%{x:.2g}%: %{y:.2f} times as fast",
                METHODS.index(method),
            )
            _line(figure, mine, share, itemgetter(key), f"{method}, {said}", COLOUR[method], mark, hover, **looks)
    figure.add_hline(y=1, line={"color": plots.INK, "width": 1, "dash": "dot"})
    figure.update_xaxes(type="log", title_text="neurons that fire, or are chosen, % (log scale)", **_percents(rows))
    figure.update_yaxes(type="log", tickvals=[0.5, 1, 2, 5, 10, 20, 50])
    figure.update_yaxes(title_text="times as fast as dense (log scale)")
    figure = plots.styled(figure, f"One token<br><sup>{sources(rows)}</sup>", height=430)
    return figure.update_layout(margin={"t": 70, "b": 110}, legend={"y": -0.2, "yanchor": "top"})


def _percents(rows: Iterable[dict]) -> dict:
    shares = sorted({row["share"] for row in rows})
    return {"tickvals": [100 * each for each in shares], "ticktext": [f"{100 * each:.2g}" for each in shares]}


def winners(rows: list[dict]) -> go.Figure:
    """The map: the fastest method at each share of firing neurons and number of tokens, among those that compute the
    dense layer's result, and among all where others were timed; a line of panels for each `gpu`. rows: of
    `data.map_rows`, `data.recorded_map` or `data.recorded_maps`, of which those of all methods (`whole`) are drawn
    where there are any."""
    rows = [row for row in rows if row.get("whole")] or rows
    if not rows:
        return nothing("Which method wins")
    gpus = [*dict.fromkeys(row.get("gpu") for row in rows)]
    kinds = {"the same result as dense": True}
    if not all(row["exact"] for row in rows):
        kinds["or another layer, or lossy"] = False
    panels = {
        (line, column): data.winners([row for row in rows if row.get("gpu") == gpu], exact=exact)
        for line, gpu in enumerate(gpus, start=1)
        for column, exact in enumerate(kinds.values(), start=1)
    }
    figure = make_subplots(
        rows=len(gpus),
        cols=len(kinds),
        subplot_titles=[f"{gpu}: {kind}" if len(gpus) > 1 else kind for gpu in gpus for kind in kinds],
        horizontal_spacing=0.06,
        vertical_spacing=0.12,
        shared_xaxes=True,
        shared_yaxes=True,
    )
    shares = sorted({share for best in panels.values() for share, _ in best})
    tokens = sorted({count for best in panels.values() for _, count in best})
    for (line, column), best in panels.items():
        numbers = [[METHODS.index(best[s, t]["method"]) if (s, t) in best else None for t in tokens] for s in shares]
        text = [[f"{best[s, t]['x_dense']:.2g}" if (s, t) in best else "" for t in tokens] for s in shares]
        squares(
            figure,
            numbers,
            COLOUR.values(),
            x=[f"{each:,}" for each in tokens],
            y=[f"{100 * each:.2g}%" for each in shares],
            text=text,
            xgap=2,
            ygap=2,
            hovertemplate="%{y} fire, %{x} tokens: %{text} times as fast as dense<extra></extra>",
            row=line,
            col=column,
        )
        for method in METHODS:  # the cells' names, in a colour that is read on theirs
            mine = [at for at in best if best[at]["method"] == method]
            if mine:
                figure.add_scatter(
                    x=[f"{count:,}" for _, count in mine],
                    y=[f"{100 * share:.2g}%" for share, _ in mine],
                    text=[f"{_SHORT[method]}<br><b>{best[at]['x_dense']:.2g}</b>" for at in mine],
                    mode="text",
                    textfont={"size": 12, "color": "white" if method == PACKED else plots.INK},
                    name=method,
                    showlegend=False,
                    hoverinfo="skip",
                    row=line,
                    col=column,
                )
    for method in METHODS:
        if any(row["method"] == method for best in panels.values() for row in best.values()):
            legend_key(figure, method, COLOUR[method])
    figure.update_xaxes(type="category", showgrid=False)
    figure.update_xaxes(title_text="tokens at once", row=len(gpus))
    figure.update_yaxes(type="category", showgrid=False)
    figure.update_yaxes(title_text="neurons that fire for a token", col=1)
    gaps = any(len(best) < len(shares) * len(tokens) for best in panels.values())
    told = [f"dense where none is 5% faster{'; white: not timed' * gaps}", *dict.fromkeys(row["where"] for row in rows)]
    title, top = "Which method wins, and by how many times dense<br><sup>{}</sup>", 60 + 20 * len(told)
    figure = plots.styled(figure, title.format("<br>".join(told)), height=top + 90 + 250 * len(gpus))
    return figure.update_annotations(font_size=12).update_layout(
        margin={"t": top, "b": 90, "l": 80},
        legend={"y": -0.2 / len(gpus), "yanchor": "top"},
        title={"y": 1, "yref": "container", "yanchor": "top", "pad": {"t": 20}},
    )
