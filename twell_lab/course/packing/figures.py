"""Figures of the notebook on packing, each a function of rows and numbers; in the style of `plots`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots
from torch import Tensor

from ... import plots
from ..drawing import squares
from .data import BELOW, IN_TAIL, IN_WORDS, SILENT, smallest

ACROSS = 32  # columns of a tile on one line
EACH = 16  # words, or values of the tail, on one line
TAIL_LINES = 4  # of the tail, drawn at most
SORTS = {SILENT: "#F2F2F2", BELOW: "#DCD3E4", IN_WORDS: "#8CC4E8", IN_TAIL: "#F2B36B"}
SORT_NAMES = {SILENT: "silent", BELOW: "positive, below the threshold", IN_WORDS: "in a word", IN_TAIL: "in the tail"}


def matrix(x: Tensor, title: str) -> go.Figure:
    """Where a matrix [rows, columns] is not zero."""
    hover = "row %{y}, column %{x}<extra></extra>"
    figure = squares(go.Figure(), (x != 0).int().tolist(), (SORTS[SILENT], plots.BLUE), hovertemplate=hover)
    figure.update_xaxes(title_text="neuron", showgrid=False)
    figure.update_yaxes(title_text="token", autorange="reversed", showgrid=False)
    return plots.styled(figure, title, height=340)


def format_bytes(sizes: dict[str, int], rows: int, values: int, value_bytes: int = 2) -> go.Figure:
    """The bytes of a row in each format, for one matrix; the line is what the kept values alone would take.

    sizes: format -> bytes of the whole matrix, "dense" among them; values: how many are kept in all rows.
    """
    each, floor = [size / rows for size in sizes.values()], values * value_bytes / rows
    figure = go.Figure(
        go.Bar(
            x=list(sizes),
            y=each,
            marker_color=[plots.GREY if name == "dense" else plots.BLUE for name in sizes],
            text=[f"{size / rows:,.0f}<br>{size / sizes['dense']:.0%}" for size in sizes.values()],
            textposition="outside",
            cliponaxis=False,
            hovertemplate="%{x}: %{y:,.1f} bytes a row<extra></extra>",
        )
    )
    beside = {"x": 1, "xanchor": "left", "yanchor": "middle", "align": "left", "font": {"color": plots.RED}}
    text = f"the values<br>alone: {floor:,.0f}"
    figure.add_hline(y=floor, line={"color": plots.RED, "dash": "dot", "width": 2}, annotation=beside | {"text": text})
    figure.update_yaxes(title_text="bytes a row", range=[0, 1.18 * max(each)], tickformat=",d")
    title = "The same rows in each format (share of dense below the bytes)"
    return plots.styled(figure, title, height=380).update_layout(margin_r=90)


def geometries(table: list[dict], overflow: float = 0.01) -> go.Figure:
    """Bytes a row and overflowing rows for each tile (across) and number of words (down).

    table: rows of `data.geometries`. A red frame marks the fewest bytes with at most this share of rows overflowing.
    """
    tiles, words = (sorted({row[key] for row in table}) for key in ("tile", "words"))
    at = {(row["tile"], row["words"]): row for row in table}
    titles = ["bytes a row (tail included)", "rows with an overflowing tile"]
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.12, subplot_titles=titles)
    blues, oranges = [[0, "#EAF3FA"], [1, "#5FA8D3"]], [[0, "#F5F5F5"], [0.0001, "#FDEBD3"], [1, plots.ORANGE]]
    for column, number, text, looks in (
        (1, lambda row: math.log(row["bytes"]), lambda row: f"{row['bytes']:,.0f}", {"colorscale": blues}),
        (
            2,
            lambda row: row["overflow"],
            lambda row: _share(row["overflow"]),
            {"colorscale": oranges, "zmin": 0, "zmax": 1},
        ),
    ):
        cells, texts = (
            [[take(at[tile, count]) if (tile, count) in at else None for tile in tiles] for count in words]
            for take in (number, text)
        )
        figure.add_heatmap(
            x=[f"{tile}" for tile in tiles],
            y=[f"{count}" for count in words],
            z=cells,
            text=texts,
            texttemplate="%{text}",
            textfont={"color": plots.INK},
            showscale=False,
            xgap=3,
            ygap=3,
            hoverongaps=False,
            hovertemplate="tile %{x}, %{y} words: %{text}<extra></extra>",
            row=1,
            col=column,
            **looks,
        )
    figure.update_xaxes(title_text="tile, columns", type="category", showgrid=False)
    figure.update_yaxes(type="category", showgrid=False)
    figure.update_yaxes(title_text="words a tile", col=1)
    if (best := smallest(table, overflow)) is not None:
        x, y = tiles.index(best["tile"]), words.index(best["words"])  # categories lie at whole numbers
        line = {"color": plots.RED, "width": 3}
        figure.add_shape(type="rect", x0=x - 0.5, x1=x + 0.5, y0=y - 0.5, y1=y + 0.5, line=line, row=1, col="all")
    title = f"Tile and words (framed: fewest bytes with at most {overflow:.0%} of rows overflowing)"
    figure = plots.styled(figure, title, height=130 + 52 * len(words)).update_layout(margin_t=90)
    return figure.update_annotations(font_size=12)


def error_by_row(errors: dict[str, list[float]], title: str) -> go.Figure:
    """Relative error of each row, worst first, one line a method. errors: name -> one number a row."""
    figure = go.Figure()
    for colour, (name, values) in zip((plots.RED, plots.BLUE), errors.items(), strict=False):
        worst_first = sorted((100 * float(value) for value in values), reverse=True)
        figure.add_scatter(
            x=list(range(1, len(worst_first) + 1)),
            y=worst_first,
            name=name,
            mode="lines+markers",
            marker={"size": 5},
            line={"color": colour},
            hovertemplate="row %{x}: %{y:.2f}%",
        )
    figure.update_xaxes(title_text="row, worst first")
    figure.update_yaxes(title_text="error of the row, %", rangemode="tozero")
    return plots.styled(figure, title, height=360)


def tile_view(view: dict) -> go.Figure:
    """One row under one geometry: its tiles, and the columns, the words and the tail of one of them.

    view: what `data.view` returned. Traces: 0 and 1 are the row's tiles (in words, in the tail), 2 the columns, 3 the
    words, 4 the tail.
    """
    captions = _captions(view)
    figure = make_subplots(rows=len(captions), cols=1, subplot_titles=captions)
    for name, colour in (("in words", SORTS[IN_WORDS]), ("in the tail", SORTS[IN_TAIL])):
        figure.add_bar(
            showlegend=False,
            row=1,
            col=1,
            marker={"color": colour, "line": {"width": 2}},
            textposition="inside",
            textangle=0,
            insidetextanchor="middle",
            constraintext="none",
            textfont={"size": 11},
            hovertemplate=f"tile %{{x}}: %{{y}} {name}<extra></extra>",
        )
    for row in (2, 3, 4):
        squares(
            figure,
            [],
            SORTS.values(),
            texttemplate="%{text}",
            textfont={"size": 10, "color": plots.INK},
            xgap=2,
            ygap=2,
            hovertemplate="%{customdata}<extra></extra>",
            row=row,
            col=1,
        )
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    figure.update_xaxes(visible=True, showgrid=False, row=1, col=1)
    figure.update_annotations(font_size=13, x=0, xanchor="left")
    figure.add_hline(y=view["slots"], line={"color": plots.INK, "width": 1, "dash": "dot"}, row=1, col=1)
    figure = plots.styled(figure, "").update_layout(
        bargap=0.15,
        barmode="stack",
        margin={"t": 96, "b": 24, "l": 30},
    )
    move_tile_view(figure, view)
    return figure


def move_tile_view(figure: go.Figure, view: dict) -> None:
    """Show another view in a figure that `tile_view` made (a FigureWidget of it too). What is as it was is not sent."""
    down = -(-view["width"] // ACROSS)
    word_lines = -(-(view["slots"] + 1) // EACH)
    tail_lines = min(TAIL_LINES, max(1, -(-len(view["tail"]) // EACH)))
    layout = figure.layout
    layout.title.text = _title(view)
    _place(layout, [96, 15 * down + 4, 38 * word_lines, 38 * tail_lines])
    for annotation, caption in zip(layout.annotations, _captions(view), strict=True):
        annotation.text = caption
    layout.xaxis.dtick = max(1, len(view["counts"]) // 16)
    layout.shapes[0].y0 = layout.shapes[0].y1 = view["slots"]
    _tiles(figure.data[:2], view)
    _cells(figure.data[2], layout.yaxis2, _columns(view), down, ACROSS)
    _cells(figure.data[3], layout.yaxis3, _words(view), word_lines, EACH)
    _cells(figure.data[4], layout.yaxis4, _tail(view), tail_lines, EACH)


# ---- parts of tile_view ----


def _title(view: dict) -> str:
    line = (
        f"Row {view['row']}: {view['nnz']} kept, {view['nnz'] - view['tail_row']} in words, "
        f"{view['tail_row']} in the tail"
    )
    line += f"<br><sup>{view['bytes']:,} bytes packed, {view['dense_bytes']:,} dense"
    if view["threshold"]:
        line += f"; threshold {view['threshold']:.3g}: {view['lost']:.1%} of the row's norm is lost"
    return line + "</sup>"


def _captions(view: dict) -> list[str]:
    of = f"tile {view['part']}"
    held, words = view["counts"][view["part"]], view["slots"] + 1
    unused = words - len(view["stored"])
    tail = f"the tail of {of}: column in the matrix, value" if view["tail"] else f"the tail of {of}: empty"
    if len(view["tail"]) > EACH * TAIL_LINES:
        tail += f" (the first {EACH * TAIL_LINES} of {len(view['tail'])})"
    tiles = f"{len(view['counts'])} tile{'s' * (len(view['counts']) > 1)}"
    return [
        f"the row's {tiles} of {view['tile']}: values kept (dotted: the {view['slots']} slots)",
        f"{of}: {view['width']} columns, {ACROSS} a line; {held} kept (<span style='color:#2E86C1'>blue</span>: in a "
        "word, <span style='color:#C77700'>orange</span>: tail)",
        f"the {words} words of {of}: the count, then column and value; {unused} unused",
        tail,
    ]


def _place(layout: go.Layout, heights: list[int]) -> None:
    """Give the panels these heights in pixels, from the first above to the last below, and each its caption."""
    gap, above, below = 44, 96, 24
    whole = sum(heights) + gap * (len(heights) - 1)
    layout.height = whole + above + below
    top = whole
    for number, (height, annotation) in enumerate(zip(heights, layout.annotations, strict=True), 1):
        layout[f"yaxis{number if number > 1 else ''}"].domain = (max(0, top - height) / whole, top / whole)
        annotation.y = top / whole
        top -= height + gap


def _tiles(bars: Sequence[go.Bar], view: dict) -> None:
    """The row's tiles: in words, and above it in the tail; the chosen one with an edge."""
    numbers = list(range(len(view["counts"])))
    edge = [plots.INK if number == view["part"] else "rgba(0,0,0,0)" for number in numbers]
    readable = 0.12 * max(max(view["counts"]), view["slots"])  # a number needs a bar of some height
    few = len(numbers) <= 16
    held = [min(count, view["slots"]) for count in view["counts"]]
    beyond = [max(0, count - view["slots"]) for count in view["counts"]]
    for bar, heights in zip(bars, (held, beyond), strict=True):
        bar.x, bar.y, bar.marker.line.color = numbers, heights, edge
        bar.text = [f"{height}" if few and height >= readable else "" for height in heights]


# A cell is (its sort, its text, its hover text).


def _columns(view: dict) -> list[tuple]:
    return [
        (sort, "", f"column {column}{'' if sort == SILENT else f', {value:.4g}'}: {SORT_NAMES[sort]}")
        for column, (value, sort) in enumerate(view["columns"])
    ]


def _words(view: dict) -> list[tuple]:
    stored = view["stored"]
    cells = [(SILENT, f"<b>{stored[0]}</b>", f"word 0: the count, {stored[0]}")]
    for number, (value, column) in enumerate(view["entries"], 1):
        says = f"word {number}: 0x{stored[number]:08x} = column {column}, value {value:.4g}"
        cells.append((IN_WORDS, f"{column}<br>{_value(value)}", says))
    unused = range(len(stored), view["slots"] + 1)
    return cells + [(SILENT, "", f"word {number}: unused, never read") for number in unused]


def _tail(view: dict) -> list[tuple]:
    return [
        (IN_TAIL, f"{column}<br>{_value(value)}", f"tail: column {column} of the matrix, value {value:.4g}")
        for value, column in view["tail"][: EACH * TAIL_LINES]
    ]


def _cells(shown: go.Heatmap, axis: go.layout.YAxis, cells: list[tuple], lines: int, across: int) -> None:
    """Draw cells on so many lines, `across` on each; where there are no more, nothing is drawn."""
    cells = cells + [(None, "", "")] * (lines * across - len(cells))
    shown.z, shown.text, shown.customdata = (
        [list(column[first : first + across]) for first in range(0, len(cells), across)]
        for column in zip(*cells, strict=True)
    )
    axis.range = (lines - 0.5, -0.5)


def _value(value: float) -> str:
    return f"{value:.2g}" if math.isfinite(value) else str(value)


def _share(value: float) -> str:
    return "0%" if value == 0 else f"{value:.1%}" if value < 0.1 else f"{value:.0%}"
