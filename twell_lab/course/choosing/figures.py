"""Figures of the notebook on choosing a path, each a function of rows and numbers; in the style of `plots`."""

from __future__ import annotations

from collections.abc import Iterable

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ... import plots
from ...bench import methods
from ...bench.methods import DENSE, EXPERTS, METHODS, PACKED, PREDICTED, SPLIT, TILES
from ..charts import MARKS, bars, finish, grids, lines, one
from ..drawing import legend_key, nothing, squares
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
    """The share of a stripe's columns that hold anything over its height: counted, and expected of random firing, a
    colour for each layer. rows: of `data.occupied_rows`."""
    figure = go.Figure()
    name = lambda row: f"layer {row['layer']}, {row['density']:.1%} fire"
    for key, more in (("measured", {}), ("expected", {"mode": "lines", "showlegend": False})):
        said = lambda row, key=key: f"{name(row)}, {row['height']} tokens: {row[key]:.1%}, {key}"
        looks = {name(row): {"dash": "solid" if key == "measured" else "dot"} for row in rows}
        lines(figure, rows, "height", lambda row, key=key: 100 * row[key], name, hover=said, looks=looks, **more)
    title, told = "The taller a tile, the fewer are empty", ["solid: counted; dotted: if firing were random"]
    axes = {"x": "height of a tile, tokens", "y": "columns that hold anything, %"}
    return finish(figure, title, height=280, also=told, log_x=(row["height"] for row in rows), **axes)


def products(rows: list[dict]) -> go.Figure:
    """Micro-tiles beside the dense product over the share of zeros, a line for each source and pattern, with and
    without finding the tiles. rows: each with `where`; those of kind "comparison" are drawn."""
    place = lambda row: (row["where"], row["pattern"], row["density"])
    finding = {(row["path"], *place(row)): row["ms"] for row in rows if row["kind"] == "comparison"}
    made = [row for row in rows if row["kind"] == "comparison" and row["path"].startswith("micro-tiles")]
    made.sort(key=lambda row: row["density"])
    figure, several = go.Figure(), len({row["path"] for row in made}) > 1
    name = lambda row: f"{row['path']}, " * several + f"zeros: {row['pattern']}, {row['where']}"
    for searched in (False, True):
        shown = []
        for row in made:
            search = finding.get((f"part: {row['path']}, conversion", *place(row))) if searched else 0.0
            if search is not None:
                shown.append(row | {"x": row["dense_ms"] / (row["ms"] + search)})
        called = lambda row, searched=searched: name(row) + ", with finding them" * searched
        said = lambda row, called=called: f"{called(row)}: {1 - row['density']:.1%}, {row['x']:.2f} times as fast"
        looks = {called(row): {"dash": "dot" if searched else "solid"} for row in shown}
        lines(figure, shown, "density", "x", called, hover=said, looks=looks)
    axes = {"x": "zeros, %", "y": "times as fast as dense", "log_y": (0.25, 0.5, 1, 2, 5, 10, 20, 50)}
    ticks = (0.5, 0.25, 0.1, 0.05, 0.01, 0.001)
    figure = finish(one(figure), "A product in micro-tiles", made, 320, log_x=ticks, **axes)
    names = [f"{100 * (1 - tick):g}" for tick in sorted(ticks)]
    return figure.update_xaxes(autorange="reversed", ticktext=names) if made else figure


def padding(rows: list[dict], recorded: Iterable[dict] = ()) -> go.Figure:
    """Time over the share of real rows, with the padding, without it, and of as many rows that never had any. recorded:
    of `data.recorded("comparison")`; below the title, how far the layers there are from a time in proportion."""
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


def firing(shares, times: float | None) -> go.Figure:
    """Return how often each neuron fires, the busiest first, and the share above which it is cheaper dense.

    shares: float [d_ff], of the tokens. times: how many times as much a packed neuron costs as a dense one."""
    if times is None:
        return nothing("How often each neuron fires")
    hot = len(data.hot_neurons(shares, times))
    ordered = sorted((100 * float(share) for share in shares), reverse=True)
    rows = [
        {"place": i, "share": share, "of": "hot: computed densely" if i < hot else "cold"}
        for i, share in enumerate(ordered)
    ]
    looks = {"hot: computed densely": {"colour": plots.ORANGE}, "cold": {"colour": plots.BLUE}}
    figure = bars(go.Figure(), rows, "place", "share", "of", looks=looks, marker_line_width=0)
    said = f"break-even: 1 in {times:.0f} tokens"
    figure.add_hline(y=100 / times, line={"color": plots.INK, "dash": "dot"}, annotation_text=said)
    title, told = f"{hot} of {len(rows)} neurons are cheaper dense", ["one layer of the small model, with that cost"]
    axes = {"x": "neurons, busiest first", "y": "fires at so many tokens, %"}
    return finish(figure, title, height=230, also=told, **axes).update_layout(bargap=0)


def hot_sizes(rows: list[dict]) -> go.Figure:
    """Times as fast as dense over the share of the neurons that is computed densely, a line for each source. Bars: low
    to high, where rows have them."""
    said = lambda row: f"{row['hot'] / row['d_ff']:.0%} hot: {row['x_dense']:.2f} times as fast"
    share, looks = lambda row: 100 * row["hot"] / row["d_ff"], {}
    for where, colour in zip(dict.fromkeys(row["where"] for row in rows), (plots.ORANGE, *plots.COLOURS)):
        spread = [row for row in rows if row["where"] == where and "low" in row]
        ends = {
            "array": [row["high"] - row["x_dense"] for row in spread],
            "arrayminus": [row["x_dense"] - row["low"] for row in spread],
            "thickness": 1,
        }
        looks[where] = {"colour": colour, "dash": "solid" if spread else "dot", "error_y": ends}
    figure = lines(go.Figure(), rows, share, "x_dense", "where", hover=said, looks=looks)
    told = ["bars: eight in ten of the turns in which it was timed beside dense"]
    axes = {"x": "neurons that are computed densely, %: 0 packed, 100 dense", "y": "times as fast as dense"}
    return finish(one(figure), "How many should be hot?", height=270, also=told, **axes)


def experts(rows: list[dict]) -> go.Figure:
    """Time over the number of experts, a panel for each routing, a line for each way."""
    routings = [*dict.fromkeys(row["routing"] for row in rows)]
    titles = [f"tokens {routing}" for routing in routings]
    figure = make_subplots(rows=1, cols=len(routings), shared_yaxes="all", subplot_titles=titles)
    for at, routing in enumerate(routings, start=1):
        mine = [row for row in rows if row["routing"] == routing]
        said = lambda row: f"{row['way']}, {row['experts']} experts: {row['ms']:.3g} ms"
        lines(figure, mine, "experts", "ms", "way", hover=said, row=1, col=at)
    title, counts = "Two experts a token, computed in three ways", {row["experts"] for row in rows}
    axes = {"x": "experts, as many weights in all", "log_x": counts, "log_y": (0.2, 0.5, 1, 2, 5, 10, 20, 50)}
    figure = finish(figure, title, rows, 270, **axes).update_annotations(font_size=12)
    return figure.update_yaxes(title_text="ms (log scale)", row=1, col=1)


def losses(rows: list[dict]) -> go.Figure:
    """Return how much more the loss is, in percent, over the share of the neurons that is computed, a line for each
    way."""
    said = lambda row: f"{row['way']}, {row['computed']:.0%} computed: {row['more']:+.1%} loss"
    looks = {rows[0]["way"]: {"symbol": "star", "size": 13}}
    computed, more = lambda row: 100 * row["computed"], lambda row: 100 * row["more"]
    figure = lines(go.Figure(), rows, computed, more, "way", hover=said, looks=looks)
    axes = {"x": "neurons of up and down that are computed, %", "y": "more loss, %"}
    figure = finish(figure, "What guessing costs the small model", height=270, **axes)
    most = max(map(more, rows))
    return figure.update_xaxes(rangemode="tozero").update_yaxes(range=[-0.06 * most, 1.06 * most])


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
    """The map: the fastest method at each share of firing neurons and number of tokens, among those that compute the
    dense layer's result, and among all where others were timed. rows: of `data.map_rows` or `data.recorded_maps`."""
    if not rows:
        return nothing("Which method wins")
    panels = {"the same result as dense": data.winners(rows)}
    if not all(row["exact"] for row in rows):
        panels["or another layer, or lossy"] = data.winners(rows, exact=False)
    every = [at for best in panels.values() for at in best]
    shares, tokens = sorted({share for share, _ in every}), sorted({count for _, count in every})
    spacing = {"horizontal_spacing": 0.06, "shared_yaxes": True}
    figure = make_subplots(rows=1, cols=len(panels), subplot_titles=[*panels], **spacing)
    for column, best in enumerate(panels.values(), 1):
        cells = [[best.get((share, count)) for count in tokens] for share in shares]
        squares(
            figure,
            [[METHODS.index(cell["method"]) if cell else None for cell in line] for line in cells],
            COLOUR.values(),
            x=[f"{count:,}" for count in tokens],
            y=[f"{100 * share:.2g}%" for share in shares],
            text=[
                [f"{_SHORT[cell['method']]}<br><b>{cell['x_dense']:.2g}</b>" if cell else "" for cell in line]
                for line in cells
            ],
            texttemplate="%{text}",
            xgap=2,
            ygap=2,
            hovertemplate="%{y} fire, %{x} tokens: %{text} times as fast as dense<extra></extra>",
            row=1,
            col=column,
        )
    for method in METHODS:
        if any(row["method"] == method for best in panels.values() for row in best.values()):
            legend_key(figure, method, COLOUR[method])
    gaps = any(len(best) < len(shares) * len(tokens) for best in panels.values())
    told = [f"dense where none is 5% faster{'; white: not timed' * gaps}"]
    figure = finish(figure, "Which method wins, and by how many times dense", rows, 250, x="tokens at once", also=told)
    figure.update_xaxes(type="category", showgrid=False).update_yaxes(type="category", showgrid=False)
    figure.update_yaxes(title_text="neurons that fire for a token", row=1, col=1)
    return figure.update_annotations(font_size=12).update_layout(margin_l=80)
