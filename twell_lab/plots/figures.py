"""Figures. Each function returns a plotly `go.Figure`; none shows or measures anything.

Arguments are what the library returns (a FiringProfile, TrainResults, a TwELL, rows of records), or the same as dicts
and lists read back from JSON, so that a figure can be drawn on a machine without torch. Recorded measurements are
always called "recorded on <device>, <date>", and the reader's own "yours, now".
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..core import InputError, StackError
from .data import alike, apart, decode, layer_names, percentiles, picked, tile_of

try:
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots
except ImportError:
    raise StackError("figures need plotly, which is not installed: pip install plotly") from None

# Okabe and Ito's colours, which readers with any colour vision can tell apart.
BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
SKY, RED, GREY = "#56B4E9", "#D55E00", "#8A8A8A"
COLOURS = (BLUE, RED, GREEN, ORANGE, PURPLE, SKY)
INK, FAINT = "#222222", "#E6E6E6"


def training_curves(results: Mapping[str, object]) -> go.Figure:
    """Loss and firing during training, one colour for each run.

    Left: bits per byte, training as a thin line, held-out text as dots. Right: neurons that fire for a token,
    in percent of d_ff.

    Args:
        results: label of each run -> its TrainResult, or summary() of that.
    """
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.12)
    for colour, (label, result) in zip(COLOURS, results.items(), strict=False):
        history = _get(result, "history")
        steps = [row["step"] for row in history]
        seen = [row for row in history if row.get("val_bits_per_byte") is not None]
        group = {"legendgroup": label, "hovertemplate": "step %{x}: %{y:.3g}"}
        figure.add_scatter(
            x=steps,
            y=[row["ce"] / math.log(2) for row in history],
            row=1,
            col=1,
            mode="lines",
            line={"color": colour, "width": 1},
            opacity=0.4,
            name=f"{label}, training",
            showlegend=False,
            **group,
        )
        figure.add_scatter(
            x=[row["step"] for row in seen],
            y=[row["val_bits_per_byte"] for row in seen],
            row=1,
            col=1,
            mode="lines+markers",
            line={"color": colour},
            marker={"size": 7},
            name=label,
            **group,
        )
        width = _get(_get(result, "config"), "d_ff")
        figure.add_scatter(
            x=steps,
            y=[100 * row["nnz"] / width for row in history],
            row=1,
            col=2,
            mode="lines",
            line={"color": colour},
            name=label,
            showlegend=False,
            **group,
        )
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text="bits per byte", row=1, col=1)
    figure.update_yaxes(title_text="neurons firing for a token, %", rangemode="tozero", row=1, col=2)
    return styled(figure, "Training: loss (dots: held-out text) and firing", height=380)


def firing_by_layer(profile, without=None) -> go.Figure:
    """How many neurons fire in each layer: mean share, and the span that holds the middle 90% of tokens.

    Args:
        profile: a FiringProfile, or its layers as dicts.
        without: the densities (0 to 1) of the layers of the model trained without L1, to be drawn beside.

    Raises:
        InputError: for a profile without layers.
    """
    layers = _layers(profile)
    mean = [100 * _get(layer, "density") for layer in layers]
    upper, lower = [], []
    for layer, here in zip(layers, mean, strict=True):
        low, high = percentiles(_get(layer, "nnz_histogram"))
        # With a heavy tail the mean can lie above the 95th percentile: then the whisker has length 0.
        upper.append(max(0.0, 100 * high / _get(layer, "d_ff") - here))
        lower.append(max(0.0, here - 100 * low / _get(layer, "d_ff")))
    figure = go.Figure()
    names = [f"{name}<br>" for name in layer_names([_get(layer, "name") for layer in layers])]
    if without is not None:
        before = [100 * share for share in without]
        names = [f"{name}{_percent(share)} to " for name, share in zip(names, before, strict=True)]
    # The figures stand below the bars: above them they would collide with the whiskers.
    names = [name + _percent(share) for name, share in zip(names, mean, strict=True)]
    if without is not None:
        figure.add_bar(
            x=names, y=before, name="without L1", marker_color=GREY, hovertemplate="%{y:.2f}% without L1<extra></extra>"
        )
    figure.add_bar(
        x=names,
        y=mean,
        name="with L1" if without is not None else "",
        marker_color=BLUE,
        error_y={"array": upper, "arrayminus": lower, "color": INK, "thickness": 1, "width": 4},
        showlegend=without is not None,
        hovertemplate="%{y:.2f}%<extra></extra>",
    )
    figure.update_yaxes(title_text="neurons firing for a token, %", rangemode="tozero")
    figure.update_xaxes(title_text="feed-forward layer")
    return styled(figure, "Share of neurons that fire (whiskers: the middle 90% of tokens)")


def firing_by_position(profile, names: list[str] | None = None) -> go.Figure:
    """The share of neurons that fire at the first tokens of a sequence and at later ones: all layers together as a
    thick line, each layer as a thin one with its name at its end.

    Args:
        profile: a FiringProfile, or the rows of its by_position().
        names: of the layers; those of the profile, unless given.

    Raises:
        InputError: for a profile in which no position is known.
    """
    rows = profile if isinstance(profile, list) else profile.by_position()
    if not rows:
        raise InputError(
            "no position of a token is known in this profile; accepted: one made from token ids or sequences"
        )
    if names is None and not isinstance(profile, list):
        names = layer_names([layer.name for layer in profile.layers])
    places = [
        f"{row['first']}" + ("" if row["last"] == row["first"] else f"-{row['last']}" if row["last"] else " on")
        for row in rows
    ]
    figure = go.Figure()
    for number in range(len(rows[0]["layers"])):
        name = names[number] if names else f"layer {number}"
        figure.add_scatter(
            x=places,
            y=[_times_100(row["layers"][number]) for row in rows],
            mode="lines",
            line={"color": SKY, "width": 1},
            name="each layer",
            legendgroup="layers",
            showlegend=number == 0,
            hovertemplate=f"{name}, %{{x}}: %{{y:.3g}}%<extra></extra>",
        )
    figure.add_scatter(
        x=places,
        y=[100 * row["density"] for row in rows],
        mode="lines+markers",
        line={"color": BLUE, "width": 3},
        name="all layers together",
        customdata=[row["tokens"] for row in rows],
        hovertemplate="%{x}: %{y:.3g}% (%{customdata:,} tokens)<extra></extra>",
    )
    figure.update_yaxes(title_text="neurons firing for a token, %", rangemode="tozero")
    figure.update_xaxes(title_text="position in its sequence, from 0", type="category")
    # Each thin line is named where it ends, and the figure is as high as the names of all layers need.
    each, above = 13, 130  # pixels: a name; what is above and below the lines
    height = max(400, above + each * len(rows[0]["layers"]))
    known = [share for row in rows for share in (row["density"], *row["layers"]) if share is not None]
    top = 108 * max(known) or 1.0
    ends = [(number, 100 * share) for number, share in enumerate(rows[-1]["layers"]) if share is not None]
    at = apart([share for _, share in ends], top * each / (height - above))
    called = [names[number] if names else f"layer {number}" for number, _ in ends]
    for name, place in zip(called, at, strict=True):
        figure.add_annotation(
            x=len(places) - 1, y=place, text=name, showarrow=False, xanchor="left", xshift=8, font={"size": 10}
        )
    figure.update_yaxes(range=[0, max([top, *at])])
    return styled(figure, "Share of neurons that fire, by position in the sequence", height=height)


def profiles_compared(comparison, mine: str = "this profile", other: str = "the other") -> go.Figure:
    """Two profiles layer by layer. Left: how many neurons fire in each. Right: what the other's hottest neurons catch
    of this profile's firing, of what its own hottest catch.

    Args:
        comparison: what FiringProfile.compare gave, or its rows.
        mine, other: what to call the two.

    Raises:
        InputError: for no rows.
    """
    rows = comparison if isinstance(comparison, list) else _get(comparison, "rows")
    if not rows:
        raise InputError("the comparison has no layers; accepted: one layer or more")
    names = layer_names([row["layer"] for row in rows])
    titles = ("neurons firing for a token, %", "caught by the other's hot neurons, %")
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.12)
    for name, key, colour in ((mine, "density", BLUE), (other, "other_density", GREY)):
        figure.add_bar(
            x=names,
            y=[_times_100(row[key]) for row in rows],
            name=name,
            marker_color=colour,
            hovertemplate=f"{name}, %{{x}}: %{{y:.3g}}%<extra></extra>",
            row=1,
            col=1,
        )
    figure.add_bar(
        x=names,
        y=[_times_100(row["hot_kept"]) for row in rows],
        marker_color=GREEN,
        showlegend=False,
        customdata=[_times_100(row["hot_overlap"]) for row in rows],
        hovertemplate="%{x}: %{y:.0f}%; %{customdata:.0f}% of the hottest are the same<extra></extra>",
        row=1,
        col=2,
    )
    figure.update_yaxes(title_text=titles[0], rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title_text=titles[1], range=[0, 105], row=1, col=2)
    return styled(figure, "Two profiles: how many neurons fire, and whether the same ones are hot")


def neuron_frequency(profile, layer: int = 0) -> go.Figure:
    """On which share of the tokens each neuron of one layer fires, most used first, and how many never fire.

    Args:
        profile: a FiringProfile, or its layers as dicts.
        layer: which of its layers, from 0.

    Raises:
        InputError: for a layer that is not there.
    """
    layers = _layers(profile)
    if not 0 <= layer < len(layers):
        raise InputError(f"layer is {layer!r}; this profile has layers 0 to {len(layers) - 1}")
    values = sorted((100 * float(value) for value in _get(layers[layer], "neuron_frequency")), reverse=True)
    alive = [value for value in values if value > 0]
    figure = go.Figure(
        go.Scatter(
            x=list(range(1, len(alive) + 1)),
            y=alive,
            mode="lines",
            line={"color": BLUE},
            hovertemplate="neuron %{x}: %{y:.3g}% of tokens",
        )
    )
    figure.update_yaxes(
        title_text="fires on this share of tokens, % (log scale)",
        type="log",
        dtick=1,
        tickformat="~g",
        range=[math.log10(alive[-1] / 1.5), 2.05] if alive else [-1, 2],
    )
    figure.update_xaxes(title_text="neuron, most used first", range=[0, len(values) * 1.01])
    if len(alive) < len(values):
        figure.add_vrect(x0=len(alive), x1=len(values), fillcolor=FAINT, line_width=0, layer="below")
        figure.add_annotation(
            text=f"{len(values) - len(alive)} of {len(values)}<br>never fire",
            align="right",
            x=len(values),
            xanchor="right",
            y=0.97,
            yref="paper",
            showarrow=False,
        )
    name = layer_names([_get(each, "name") for each in layers])[layer]
    return styled(figure, f"How often each neuron fires: {name}")


def packed_tile(twell, row: int = 0, tile: int = 0) -> go.Figure:
    """One tile before and after packing: its columns above, its words below (a count, then the values).

    Args:
        twell: a formats.TwELL, or the dict that `data.tile_of` made of one, which holds row and tile.
        row, tile: which tile of a TwELL, from 0.

    Raises:
        InputError: for a row or tile that is not there.
    """
    at = twell if isinstance(twell, Mapping) else tile_of(twell, row, tile)
    entries = [decode(word, at["dtype"]) for word in at["words"][1:]]
    across, down = 32, -(-at["width"] // 32)
    each = 16 if at["slots"] > 15 else 8
    lines = -(-(at["slots"] + 1) // each)
    columns = [[line * across + i for i in range(across)] for line in range(down)]
    cells = [[0.0 if column < at["width"] else None for column in line] for line in columns]
    everything = entries + [decode(word, at["dtype"]) for word in at["tail"]]
    for value, column in everything:
        cells[column // across][column % across] = value
    top = max([value for value, _ in everything if math.isfinite(value)], default=1.0)
    colours = {
        "colorscale": [[0, "#F2F2F2"], [0.001, "#CFE5F2"], [1, BLUE]],
        "zmin": 0,
        "zmax": top,
        "showscale": False,
        "xgap": 2,
        "ygap": 2,
    }
    above, gap, below = 26 * down, 46, 44 * lines
    figure = make_subplots(
        rows=2,
        cols=1,
        vertical_spacing=gap / (above + gap + below),
        row_heights=[above, below],
        subplot_titles=[
            f"before: {at['width']} columns, 32 a line; {at['count']} hold a value",
            f"after: {at['slots'] + 1} words, {len(at['words'])} used: the count, then column: value",
        ],
    )
    figure.add_heatmap(
        z=cells,
        customdata=columns,
        hoverongaps=False,
        row=1,
        col=1,
        **colours,
        hovertemplate="column %{customdata}: %{z:.4g}<extra></extra>",
    )
    # One (shade, text, text while the pointer is over it) for each word; None where the last line has no words left.
    words = [(0.0, f"<b>{at['count']}</b>", f"word 0: the count, {at['count']}")]
    for i, (value, column) in enumerate(entries, start=1):
        stored = f"0x{at['words'][i]:08x}"
        words.append((value, f"{column}:<br>{value:.2g}", f"word {i}: {stored} = value {value:.4g}, column {column}"))
    words += [(0.0, "", f"word {i}: unused, never read") for i in range(len(words), at["slots"] + 1)]
    words += [(None, None, None)] * (lines * each - len(words))
    values, texts, hover = ([list(part[i : i + each]) for i in range(0, len(part), each)] for part in zip(*words))
    figure.add_heatmap(
        z=values,
        text=texts,
        customdata=hover,
        texttemplate="%{text}",
        textfont={"size": 10},
        hovertemplate="%{customdata}<extra></extra>",
        hoverongaps=False,
        row=2,
        col=1,
        **colours,
    )
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False, autorange="reversed")
    figure.update_annotations(font_size=13, x=0, xanchor="left")
    rest = f"; {len(at['tail'])} more live in the tail" if at["tail"] else ""
    return styled(
        figure, f"TwELL: row {at['row']}, tile {at['tile']} ({at['dtype']}){rest}", height=110 + above + gap + below
    ).update_layout(margin_b=20)


def speedups(rows: list[dict], recorded: list[dict] | None = None, mine: str = "yours, now") -> go.Figure:
    """How many times as fast as torch's dense layer (eager, same run), over the number of tokens.

    One line for each device, dtype, path and workload. The eager dense layer is the line at 1; its rows are not drawn.
    Recorded lines are dotted, and grey where the kernels have changed since.

    Args:
        rows: the reader's measurement rows.
        recorded: flat rows of records (`records.flat_rows`).
        mine: the name of the reader's lines.
    """
    figure, ticks = go.Figure(), set()
    for own, part in ((True, rows), (False, recorded or [])):
        for i, (name, points) in enumerate(_series(part, mine if own else None).items()):
            points.sort(key=lambda row: row["tokens"])
            ticks |= {row["tokens"] for row in points}
            colour = COLOURS[i % len(COLOURS)] if own else (ORANGE, PURPLE, SKY, GREEN)[i % 4]
            figure.add_scatter(
                x=[row["tokens"] for row in points],
                y=[row["x_dense"] for row in points],
                name=name,
                mode="lines+markers",
                marker={"symbol": "circle" if own else "diamond-open", "size": 9},
                line={"color": GREY if points[0].get("stale") else colour, "dash": "solid" if own else "dot"},
                customdata=[[row["ms"], row["dense_ms"]] for row in points],
                hovertemplate="%{x} tokens: %{y:.2f}x (%{customdata[0]:.3g} ms, dense %{customdata[1]:.3g} ms)",
            )
    figure.add_hline(y=1, line={"color": INK, "width": 1})
    # On a log axis an annotation's place is the exponent: 0 is the line at 1x.
    figure.add_annotation(
        x=1,
        xref="paper",
        y=0,
        xanchor="right",
        yanchor="bottom",
        showarrow=False,
        text="torch's dense layer",
        font={"size": 11},
    )
    figure.update_xaxes(title_text="tokens (log scale)", type="log", tickvals=sorted(ticks), tickformat=",d")
    marks = [0.1, 0.15, 0.25, 0.35, 0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 32]
    figure.update_yaxes(
        title_text="times as fast as dense (log scale)",
        type="log",
        tickvals=marks,
        ticktext=[f"{mark:g}x" for mark in marks],
    )
    lines = len(figure.data)
    figure = styled(figure, "Sparse feed-forward layer against torch's dense one", height=360 + 22 * lines)
    return figure.update_layout(
        legend={"orientation": "v", "yanchor": "top", "y": -0.2, "x": 0}, margin_b=60 + 22 * lines
    )


# ---- parts -----------------------------------------------------------------------------------------------


def styled(figure: go.Figure, title: str, height: int = 400) -> go.Figure:
    """The figure itself, with the look that all figures here have. height: in pixels."""
    figure.update_layout(
        template="plotly_white",
        height=height,
        bargap=0.25,
        hoverlabel={"namelength": -1},
        title={"text": title, "x": 0, "xref": "paper", "font": {"size": 15}},
        font={"family": "system-ui, sans-serif", "size": 12, "color": INK},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0},
        margin={"l": 60, "r": 20, "t": 80, "b": 50},
    )
    return figure.update_yaxes(ticklabelstandoff=4)  # else names touch the bars and points beside them


def _get(item, name: str):
    """A field of an object, or of the dict that the same object is in JSON."""
    return item[name] if isinstance(item, Mapping) else getattr(item, name)


def _layers(profile) -> list:
    layers = profile if isinstance(profile, list) else _get(profile, "layers")
    if not layers:
        raise InputError("the profile has no layers; accepted: one layer or more")
    return layers


def _times_100(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _percent(value: float) -> str:
    return f"{value:.0f}%" if value >= 9.5 else f"{value:.1f}%"


def _series(rows: list[dict], mine: str | None) -> dict[str, list[dict]]:
    """Measured rows grouped into named lines, in their order. mine: the name of the reader's rows; None: recorded."""
    rows = [
        row
        for row in rows
        if not row["path"].startswith("dense eager")
        and picked(row["path"])
        and row.get("x_dense") is not None
        and row.get("tokens")
    ]
    several = len({row.get("workload") for row in rows if not row.get("label")}) > 1
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(row["dtype"], row["dtype"])
        where = mine
        if mine is None:
            state = ", stale" if row.get("stale") else ""
            where = f"recorded on {row['device']}, {row['date'][:10]}{state}"
        workload = row.get("workload") if several and not row["path"].startswith("dense") else None
        groups.setdefault((where, row.get("label"), short, row["path"], workload), []).append(row)
    lines = {}
    for (where, label, short, path, workload), members in groups.items():
        dense = path.startswith("dense")
        if dense:  # a dense layer takes as long whatever fires: one point for each number of tokens
            members = list({row["tokens"]: row for row in members}.values())
        for points in [members] if label or dense else alike(members):
            nnz = None if dense else max(points, key=lambda row: row["tokens"]).get("nnz")
            parts = [label, short, path, workload, None if nnz is None else f"mean nnz {nnz:.0f}"]
            lines[f"{where}: {', '.join(part for part in parts if part)}"] = points
    return lines
