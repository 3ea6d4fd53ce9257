"""Figures of the notebook on packing, each a function of rows and numbers; in the style of `plots`."""

from __future__ import annotations

import math

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ... import plots
from ...formats.twell import TwELL
from ...plots import decode, tile_of
from ..charts import squares

ACROSS = 32  # columns of a tile on one line
EACH = 16  # words, or values of the tail, on one line
TAIL_LINES = 4  # of the tail, drawn at most
SILENT, IN_WORDS, IN_TAIL = range(3)  # what a cell is
COLOURS = ("#F2F2F2", "#8CC4E8", "#F2B36B")
GAP, ABOVE, BELOW = 44, 96, 24  # pixels between panels, and around them


def geometries(table: list[dict], best: dict) -> go.Figure:
    """Bytes a row, its tail included, and below them which rows overflow, for each tile (across) and number of words.
    table: rows {tile, words, bytes, overflow (share of rows)}. A red frame marks the `best` of them."""
    tiles, words = (sorted({row[key] for row in table}) for key in ("tile", "words"))
    cells: list[list] = [[None] * len(tiles) for _ in words]
    texts = [[""] * len(tiles) for _ in words]
    for row in table:
        y, x = words.index(row["words"]), tiles.index(row["tile"])
        cells[y][x] = math.log(row["bytes"])
        texts[y][x] = f"{row['bytes']:,.0f}<br>{plots.share(row['overflow'])} overflow"
    look = {"texttemplate": "%{text}", "textfont": {"color": plots.INK}, "xgap": 3, "ygap": 3, "showscale": False}
    scale = [[0, "#EAF3FA"], [1, "#5FA8D3"]]
    figure = go.Figure().add_heatmap(z=cells, text=texts, colorscale=scale, hoverinfo="skip", hoverongaps=False, **look)
    figure.update_xaxes(title_text="tile, columns", tickvals=[*range(len(tiles))], ticktext=tiles, showgrid=False)
    figure.update_yaxes(title_text="words a tile", tickvals=[*range(len(words))], ticktext=words, showgrid=False)
    x, y = tiles.index(best["tile"]), words.index(best["words"])
    line = {"color": plots.RED, "width": 3}
    figure.add_shape(type="rect", x0=x - 0.5, x1=x + 0.5, y0=y - 0.5, y1=y + 0.5, line=line)
    title = "Bytes a row (framed: the fewest with at most 1% of rows overflowing)"
    return plots.styled(figure, title, height=130 + 52 * len(words))


def tile_view(packed: TwELL, row: int = 0, part: int = 0) -> go.Figure:
    """One row's tiles, and the columns, the words and the tail of one of them. packed: the row alone; row: its number,
    for the title. part: which tile. Traces: 0 and 1 are the row's tiles (in words, in the tail), 2 the columns, 3 the
    words, 4 the tail."""
    figure = make_subplots(rows=4, cols=1, subplot_titles=["tiles", "columns", "words", "tail"])
    for name, colour in (("in words", COLOURS[IN_WORDS]), ("in the tail", COLOURS[IN_TAIL])):
        inside = {"textposition": "inside", "textangle": 0, "insidetextanchor": "middle", "constraintext": "none"}
        marker = {"color": colour, "line": {"width": 2}}
        hover = f"tile %{{x}}: %{{y}} {name}<extra></extra>"
        figure.add_bar(showlegend=False, marker=marker, hovertemplate=hover, row=1, col=1, **inside)
    for panel in (2, 3, 4):
        look = {"texttemplate": "%{text}", "textfont": {"size": 10, "color": plots.INK}, "xgap": 2, "ygap": 2}
        squares(figure, [], COLOURS, hovertemplate="%{customdata}<extra></extra>", row=panel, col=1, **look)
    figure.update_xaxes(visible=False).update_yaxes(visible=False)
    figure.update_xaxes(visible=True, showgrid=False, row=1, col=1)
    figure.update_annotations(font_size=13, x=0, xanchor="left")
    figure.add_hline(y=packed.slots, line={"color": plots.INK, "width": 1, "dash": "dot"}, row=1, col=1)
    figure = plots.styled(figure, "").update_layout(bargap=0.15, barmode="stack")
    figure.update_layout(margin={"t": ABOVE, "b": BELOW, "l": 30})
    move_tile_view(figure, packed, row, part)
    return figure


def move_tile_view(figure: go.Figure, packed: TwELL, row: int, part: int) -> None:
    """Show another tile in a figure that `tile_view` made (a FigureWidget of it too). What is as it was is not sent."""
    at, layout, counts = tile_of(packed, 0, part), figure.layout, packed.counts[0].tolist()
    entries, tail = ([decode(word, at["dtype"]) for word in words] for words in (at["words"][1:], at["tail"]))
    words, first, in_tail = at["slots"] + 1, part * packed.tile, packed.tail_value.numel()
    layout.title.text = (
        f"Row {row}: {packed.nnz} kept, {packed.nnz - in_tail} in words, {in_tail} in the tail<br><sup>"
        f"{packed.nbytes:,} bytes packed, {packed.shape[1] * packed.dtype.itemsize:,} dense</sup>"
    )

    # The row's tiles: in words, and above it in the tail; the chosen one with an edge.
    numbers, few = [*range(len(counts))], len(counts) <= 16
    readable = 0.12 * max(*counts, at["slots"])  # a number needs a bar of some height
    for bar, heights in zip(
        figure.data, ([min(n, at["slots"]) for n in counts], [max(0, n - at["slots"]) for n in counts])
    ):
        bar.x, bar.y = numbers, heights
        bar.marker.line.color = [plots.INK if number == part else "rgba(0,0,0,0)" for number in numbers]
        bar.text = [f"{height}" if few and height >= readable else "" for height in heights]
    layout.xaxis.dtick = max(1, len(counts) // 16)
    layout.shapes[0].y0 = layout.shapes[0].y1 = at["slots"]

    # A cell is (what it is, its text, its hover text).
    columns = [(SILENT, "", f"column {column}: silent") for column in range(at["width"])]
    for sort, kept, where in ((IN_WORDS, entries, "a word"), (IN_TAIL, tail, "the tail")):
        for value, column in kept:
            columns[column] = (sort, "", f"column {column}, {value:.4g}: in {where}")
    stored = [(SILENT, f"<b>{at['count']}</b>", f"word 0: the count, {at['count']}")]
    for number, (value, column) in enumerate(entries, 1):
        said = f"word {number}: 0x{at['words'][number]:08x} = column {column}, value {value:.4g}"
        stored.append((IN_WORDS, f"{column}<br>{value:.2g}", said))
    stored += [(SILENT, "", f"word {number}: unused, never read") for number in range(len(stored), words)]
    beyond = [
        (IN_TAIL, f"{first + column}<br>{value:.2g}", f"tail: column {first + column} of the matrix, value {value:.4g}")
        for value, column in tail[: EACH * TAIL_LINES]
    ]
    rest = f" (the first {EACH * TAIL_LINES} of {len(tail)})" * (len(tail) > EACH * TAIL_LINES)
    more, panels = "s" * (len(counts) > 1), ((columns, ACROSS), (stored, EACH), (beyond, EACH))
    captions = [
        f"the row's {len(counts)} tile{more} of {packed.tile}: values kept (dotted: the {at['slots']} slots)",
        f"tile {part}: {at['width']} columns, {ACROSS} a line; {at['count']} kept (<span style='color:#2E86C1'>blue"
        "</span>: in a word, <span style='color:#C77700'>orange</span>: tail)",
        f"the {words} words of tile {part}: the count, then column and value; {words - len(at['words'])} unused",
        f"the tail of tile {part}: column in the matrix, value{rest}" if tail else f"the tail of tile {part}: empty",
    ]
    heights = [96]
    for shown, axis, (cells, across), high in zip(figure.data[2:], (2, 3, 4), panels, (15, 38, 38)):
        down = max(1, -(-len(cells) // across))
        cells = cells + [(None, "", "")] * (down * across - len(cells))
        shown.z, shown.text, shown.customdata = (
            [list(column[i : i + across]) for i in range(0, len(column), across)] for column in zip(*cells)
        )
        layout[f"yaxis{axis}"].range = (down - 0.5, -0.5)
        heights.append(high * down)
    whole = sum(heights) + GAP * (len(heights) - 1)
    layout.height, top = whole + ABOVE + BELOW, whole
    for axis, height, annotation, caption in zip(("", 2, 3, 4), heights, layout.annotations, captions):
        layout[f"yaxis{axis}"].domain = (max(0, top - height) / whole, top / whole)
        annotation.y, annotation.text = top / whole, caption
        top -= height + GAP
