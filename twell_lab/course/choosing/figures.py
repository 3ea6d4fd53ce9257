"""Figures of the notebook on choosing a path, each a function of rows and numbers; in the style of `plots`."""

from __future__ import annotations

from collections.abc import Iterable

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ... import plots
from ...bench import methods
from ...bench.methods import DENSE, EXPERTS, METHODS, PACKED, PREDICTED, SPLIT, TILES
from ..charts import MARKS, bars, finish, grids, groups, legend_key, lines, one, squares
from . import data

COLOUR = {
    DENSE: "#C4C4C4",  # pale, so that its cells' names can be read
    PACKED: plots.BLUE,
    SPLIT: plots.ORANGE,
    TILES: plots.GREEN,
    EXPERTS: plots.PURPLE,
    PREDICTED: plots.RED,
}
_SHORT = {  # of a cell's width
    DENSE: "dense",
    PACKED: "packed",
    SPLIT: "hot and cold",
    TILES: "micro-tiles",
    EXPERTS: "experts",
    PREDICTED: "predicted",
}
_KINDS = {  # what works() tells apart
    "not computed": "#F7F7F7",
    "computed for nothing": plots.SKY,
    "fires, and is computed": plots.BLUE,
    "fires, and is missed": plots.RED,
}


def works(kinds: dict) -> go.Figure:
    """Return what each method computes, a panel a method. kinds: as `data.works` returns them."""
    done = {name: (each != data.SKIPPED) & (each != data.MISSED) for name, each in kinds.items()}
    named = {f"{name}: {done[name].double().mean():.0%}": each.tolist() for name, each in kinds.items()}
    tokens, neurons = next(iter(kinds.values())).shape
    return grids(named, _KINDS, f"{tokens} tokens down, {neurons} neurons across: what each method computes", 390)


def occupied(rows: list[dict]) -> go.Figure:
    """Draw the share of a stripe's columns that hold anything over its height, a colour for each layer. rows: layer,
    density, height, and the share as `counted`, and as it were if firing were `random`."""
    figure = go.Figure()
    name = lambda row: f"layer {row['layer']}, {row['density']:.1%} fire"
    for key, more in (("counted", {}), ("random", {"mode": "lines", "showlegend": False})):
        said = lambda row, key=key: f"{name(row)}, {row['height']} tokens: {row[key]:.1%}, {key}"
        looks = {name(row): {"dash": "dot" if more else "solid"} for row in rows}
        lines(figure, rows, "height", lambda row, key=key: 100 * row[key], name, hover=said, looks=looks, **more)
    title, told = "The taller a tile, the fewer are empty", ["solid: counted; dotted: if firing were random"]
    axes = {"x": "height of a tile, tokens", "y": "columns that hold anything, %"}
    return finish(figure, title, height=280, also=told, log_x=(row["height"] for row in rows), **axes)


def products(rows: list[dict]) -> go.Figure:
    """Draw micro-tiles beside the dense product over the share of zeros, a line for each source and pattern, with and
    without finding the tiles. rows: each with `where`; those of kind "comparison" are drawn."""
    place = lambda row: (row["path"], row["where"], row["pattern"], row["density"])
    compared = [row for row in rows if row["kind"] == "comparison"]
    finding = {place(row): row["ms"] for row in compared if row["path"].endswith(", conversion")}
    tiled = sorted((row for row in compared if row["path"].startswith("micro-tiles")), key=lambda row: row["density"])
    figure, several = go.Figure(), len({row["path"] for row in tiled}) > 1
    for searched in ("", ", with finding them"):
        shown = [
            row | {"x": row["dense_ms"] / (row["ms"] + search)}
            for row in tiled
            for search in [finding.get((f"part: {row['path']}, conversion", *place(row)[1:])) if searched else 0.0]
            if search is not None
        ]
        name = lambda row, more=searched: (
            f"{row['path']}, " * several + f"zeros: {row['pattern']}, {row['where']}{more}"
        )
        said = lambda row, name=name: f"{name(row)}: {1 - row['density']:.1%}, {row['x']:.2f} times as fast"
        looks = {name(row): {"dash": "dot" if searched else "solid"} for row in shown}
        lines(figure, shown, "density", "x", name, hover=said, looks=looks)
    axes = {"x": "zeros, %", "y": "times as fast as dense", "log_y": (0.25, 0.5, 1, 2, 5, 10, 20, 50)}
    ticks = (0.5, 0.25, 0.1, 0.05, 0.01, 0.001)
    figure = finish(one(figure), "A product in micro-tiles", tiled, 320, log_x=ticks, **axes)
    return figure.update_xaxes(autorange="reversed", ticktext=[f"{100 * (1 - tick):g}" for tick in sorted(ticks)])


def padding(rows: list[dict], recorded: Iterable[dict] = ()) -> go.Figure:
    """Time over the share of real rows, with the padding, without it, and of as many rows that never had any. recorded:
    of `data.recorded`; below the title, how far the layers there are from a time in proportion."""
    paths, whole = [*dict.fromkeys(row["path"] for row in rows)], max(rows, key=lambda row: row["real"])
    looks = {path: {"colour": colour} for path, colour in zip(paths, (plots.GREY, plots.GREEN, plots.BLUE))}
    looks[paths[-1]]["dash"] = "dash"
    said = lambda row: f"{row['path']}, {row['real']:.0%} real: {row['ms']:.3g} ms"
    figure = lines(go.Figure(), rows, lambda row: 100 * row["real"], "ms", "path", hover=said, looks=looks)
    line = {"color": plots.INK, "dash": "dot", "width": 1}
    figure.add_scatter(x=[0, 100], y=[0, whole["ms"]], mode="lines", name="in proportion", line=line, hoverinfo="skip")
    timed, told = [row for row in recorded if row["kind"] == "padding"], []
    for layers, off, alone in methods.proportions(timed):
        own = "" if alone is None else f" (as many tokens alone {alone:+.0%})"
        told.append(f"beside proportion: {layers} layer{'s' * (layers > 1)} {off:+.0%}{own}")
    axes = {"x": "rows that are real, %", "y": "ms"}
    return finish(figure, "A layer on a padded batch", [*rows, *timed[:1]], 240, also=told, **axes)


def firing(shares, times: float) -> go.Figure:
    """Draw how often each neuron fires, the busiest first, and the share above which it is cheaper dense. shares: float
    [d_ff], of the tokens. times: what a packed neuron costs, of a dense one."""
    hot, said = len(data.hot_neurons(shares, times)), f"break-even: 1 in {times:.0f} tokens"
    ordered = enumerate((100 * shares).sort(descending=True).values.tolist())
    rows = [{"place": i, "share": share, "of": "hot: computed densely" if i < hot else "cold"} for i, share in ordered]
    looks = {"hot: computed densely": {"colour": plots.ORANGE}, "cold": {"colour": plots.BLUE}}
    figure = bars(go.Figure(), rows, "place", "share", "of", looks=looks, marker_line_width=0)
    figure.add_hline(y=100 / times, line={"color": plots.INK, "dash": "dot"}, annotation_text=said)
    title, told = f"{hot} of {len(rows)} neurons are cheaper dense", ["one layer of the small model, with that cost"]
    axes = {"x": "neurons, busiest first", "y": "fires at so many tokens, %"}
    return finish(figure, title, height=230, also=told, **axes).update_layout(bargap=0)


def hot_sizes(rows: list[dict]) -> go.Figure:
    """Draw times as fast as dense over the share of the neurons that is computed densely, a line for each source. Bars:
    low to high, where rows have them."""
    looks = {}
    for where, mine in groups(rows, "where").items():
        if "low" in mine[0]:
            ends = {"array": [row["high"] - row["x_dense"] for row in mine], "thickness": 1}
            looks[where] = {"error_y": ends | {"arrayminus": [row["x_dense"] - row["low"] for row in mine]}}
        else:
            looks[where] = {"dash": "dot"}
    said = lambda row: f"{row['hot'] / row['d_ff']:.0%} hot: {row['x_dense']:.2f} times as fast"
    share = lambda row: 100 * row["hot"] / row["d_ff"]
    figure = lines(go.Figure(), rows, share, "x_dense", "where", hover=said, looks=looks)
    told = ["bars: eight in ten of the turns in which it was timed beside dense"]
    axes = {"x": "neurons that are computed densely, %: 0 packed, 100 dense", "y": "times as fast as dense"}
    return finish(one(figure), "How many should be hot?", height=270, also=told, **axes)


def one_token(rows: list[dict]) -> go.Figure:
    """Times as fast as dense for one token over the share of neurons: timed, and by the bytes that have to be read."""
    figure, share = go.Figure(), lambda row: 100 * row["share"]
    for key, called, more in (("x_dense", "timed", {}), ("bytes_x", "by bytes", {"mode": "lines"})):
        name = lambda row, called=called: f"{row['method']}, {called}"
        said = lambda row, key=key: f"{row['share']:.2%}: {row[key]:.2f} times as fast"
        usual = lambda row: {"colour": COLOUR[row["method"]], "symbol": MARKS[METHODS.index(row["method"])]}
        looks = {name(row): usual(row) | {"dash": "dot" if more else "solid"} for row in rows}
        lines(figure, rows, share, key, name, hover=said, looks=looks, **more)
    axes = {"x": "neurons that fire, or are chosen, %", "y": "times as fast as dense"}
    ticks = {"log_x": map(share, rows), "log_y": (0.5, 1, 2, 5, 10, 20, 50)}
    return finish(one(figure), "One token", rows, 290, **axes, **ticks)


def winners(rows: list[dict]) -> go.Figure:
    """Draw the map: the fastest method at each share of firing neurons and number of tokens, among those that compute
    the dense layer's result, and among all where others were timed. rows: of `data.map_rows` or `recorded_maps`."""
    panels = {"the same result as dense": data.winners(rows)}
    if not all(row["exact"] for row in rows):
        panels["or another layer, or lossy"] = data.winners(rows, exact=False)
    shares, tokens = (sorted({at[i] for best in panels.values() for at in best}) for i in (0, 1))
    spacing = {"horizontal_spacing": 0.06, "shared_yaxes": True}
    figure = make_subplots(rows=1, cols=len(panels), subplot_titles=[*panels], **spacing)
    for column, best in enumerate(panels.values(), 1):
        cells = [[best.get((share, count)) for count in tokens] for share in shares]
        said = lambda cell: f"{_SHORT[cell['method']]}<br><b>{cell['x_dense']:.2g}</b>" if cell else ""
        numbers = [[METHODS.index(cell["method"]) if cell else None for cell in line] for line in cells]
        look = {"x": [f"{count:,}" for count in tokens], "y": [f"{100 * share:.2g}%" for share in shares]}
        look |= {"text": [[said(cell) for cell in line] for line in cells], "texttemplate": "%{text}"}
        look |= {"hovertemplate": "%{y} fire, %{x} tokens: %{text} times as fast as dense<extra></extra>"}
        squares(figure, numbers, COLOUR.values(), **look, xgap=2, ygap=2, row=1, col=column)
    for method in METHODS:
        if any(row["method"] == method for best in panels.values() for row in best.values()):
            legend_key(figure, method, COLOUR[method])
    told = ["dense where none is 5% faster; white: not timed"]
    figure = finish(figure, "Which method wins, and by how many times dense", rows, 250, x="tokens at once", also=told)
    figure.update_xaxes(type="category", showgrid=False).update_yaxes(type="category", showgrid=False)
    figure.update_yaxes(title_text="neurons that fire for a token", row=1, col=1)
    return figure.update_annotations(font_size=12).update_layout(margin_l=80)
