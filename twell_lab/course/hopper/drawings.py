"""Drawings of notebook 09: the chip, its threads, a tile's way, the pipeline, and the sums of wgmma.

Numbers in them are those of the kernel (`tile.SIZES`) or counted here; colour is never the only sign.
"""

from __future__ import annotations

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ... import plots
from ...formats.twell import WORDS
from ..drawing import arrow, box, say, sheet, squares
from ..roofline.data import datasheet
from . import tile
from .tile import PACKING, PRODUCER, QUAD, TENSOR

KIB, MIB = 2**10, 2**20
MULTIPROCESSORS = 132
# Of one multiprocessor (H100 architecture whitepaper, CUDA C++ programming guide, compute capability 9.0).
SCHEDULERS, REGISTERS, SHARED, SHARED_OF_A_BLOCK = 4, 256 * KIB, 256 * KIB, 227 * KIB
LANES = (plots.BLUE, plots.ORANGE, plots.GREEN, plots.PURPLE)  # the four lanes that share a row
PALE = "#D6E9F5"  # of BLUE
X, WEIGHTS = plots.SKY, "#F3D58F"  # what is fetched: x, and the weights
STAGES = (plots.SKY, "#F3D58F", "#9BD8C4", "#E9C3D6")


def chip() -> go.Figure:
    """An H100: memory, the L2 cache and its multiprocessors, and what is in one of these, with their sizes."""
    figure, gpu = go.Figure(), datasheet()
    across, side = 12, 3
    small = [
        {"x0": x, "x1": x + side, "y0": y, "y1": y + side, "fillcolor": plots.BLUE if i == 6 else plots.FAINT}
        for i in range(MULTIPROCESSORS)
        for x, y in [(1 + 3.4 * (i % across), 54 - 3.4 * (i // across))]
    ]
    figure.update_layout(shapes=[{"type": "rect", "line": {"width": 0}, **each} for each in small])
    for y, fill, text in (
        (10.5, PALE, f"<b>L2 cache</b>, {gpu['l2_mb']} MiB, shared by all"),
        (2, plots.FAINT, f"<b>memory</b> (HBM), {gpu['memory_gb']} GB, {gpu['bandwidth_gb_s'] / 1e3:.2f} TB/s"),
    ):
        box(figure, 1, y, 40.4, 6, fill, text)
    say(figure, 21, 60, f"the chip: <b>{MULTIPROCESSORS} multiprocessors</b> (SM)")
    line = {"color": plots.GREY, "width": 1, "dash": "dot"}
    for y0, y1 in ((57, 57), (54, 2)):
        figure.add_shape(type="line", x0=24.4, y0=y0, x1=48, y1=y1, line=line)
    box(figure, 48, 2, 51, 55, "#F7F7F7")
    say(figure, 73.5, 60, "one <b>multiprocessor</b>")
    each = REGISTERS // SCHEDULERS // KIB
    for i in range(SCHEDULERS):
        x = 49.5 + 12.2 * i
        box(figure, x, 46, 11.4, 8, plots.ORANGE, f"scheduler {i}", size=11)
        box(figure, x, 34, 11.4, 11, PALE, f"registers<br>{each} KiB")
        box(figure, x, 22, 11.4, 11, "#9BD8C4", "tensor core")
    text = f"<b>shared memory</b> and L1 cache, {SHARED // KIB} KiB;<br>a block may have {SHARED_OF_A_BLOCK // KIB} KiB"
    box(figure, 49.5, 4, 48, 16, WEIGHTS, text)
    title = (
        f"An H100. On chip: {MULTIPROCESSORS * REGISTERS / MIB:.0f} MiB of registers, "
        f"{MULTIPROCESSORS * SHARED / MIB:.0f} of shared memory and L1, {gpu['l2_mb']} of L2"
    )
    return sheet(figure, title, 100, 63, 430)


def levels() -> go.Figure:
    """From the grid to a lane, as the kernel's version 3 has them, with what each level shares."""
    figure, size = go.Figure(), tile.SIZES
    clusters, groups = MULTIPROCESSORS // size.cluster, size.threads // 128
    rows = (  # what is drawn, who of them is chosen, what the level is
        ([*map(str, range(11)), f"… {clusters - 1}"], 2, f"<b>grid</b>: {clusters} clusters, a block for each SM"),
        (["block 0", "block 1"], 1, "<b>cluster</b>: blocks that reach each other's shared memory"),
        (
            ["producer", *(f"consumer {i}" for i in range(groups - 1))],
            1,
            f"<b>block</b>: {size.threads} threads, {size.shared // KIB} KiB of shared memory, alone on its SM",
        ),
        ([f"warp {i}" for i in range(4)], 0, "<b>warpgroup</b>: 4 warps, one for each scheduler; together they wgmma"),
        ([*map(str, range(32))], 5, "<b>warp</b>: 32 lanes, one instruction for all"),
    )
    high, step = 7, 15
    for level, (names, chosen, text) in enumerate(rows):
        y, wide = step * (len(rows) - 1 - level) + 1, 98 / len(names)
        for i, name in enumerate(names):
            fill = plots.SKY if i == chosen else plots.FAINT
            box(figure, 1 + wide * i + 0.2, y, wide - 0.4, high, fill, name, size=11)
        if level + 1 < len(rows):
            line = {"color": plots.GREY, "width": 1, "dash": "dot"}
            for x0, x1 in ((1 + wide * chosen, 1), (1 + wide * (chosen + 1), 99)):
                figure.add_shape(type="line", x0=x0, y0=y, x1=x1, y1=y - step + high, line=line)
        say(figure, 1, y + high + 2, text, "left", bgcolor="white")
    return sheet(figure, "Who works together: each line shows what is in the blue box above it", 100, 71.5, 430)


def way() -> go.Figure:
    """A tile's way: from memory to shared memory, through the tensor cores into registers, and out as words."""
    figure, size = go.Figure(), tile.SIZES
    box(figure, 0.5, 32, 12, 20, plots.FAINT, "<b>memory</b><br>x, weights")
    box(figure, 20, 32, 11, 20, PALE, "<b>L2 cache</b>")
    of_x, of_w = (2 * size.depth * n // KIB for n in (size.rows, size.columns))
    for i in range(size.stages):
        box(figure, 43 + 6.6 * i, 44, 6.2, 6, X, f"x<br>{of_x}", size=10)
        box(figure, 43 + 6.6 * i, 32, 6.2, 12, WEIGHTS, f"weights<br>{of_w}", size=10)
    text = f"<b>shared memory</b>: {size.stages} stages of {size.stage // KIB} KiB"
    say(figure, 43 + 3.3 * size.stages, 53, text)
    box(figure, 82, 32, 17, 20, "#9BD8C4", "<b>tensor cores</b><br>64 x 256 x 16<br>an instruction")
    held = 4 * size.rows * size.columns // KIB
    box(
        figure, 76, 4, 23, 17, PALE, f"<b>registers</b>: {held} KiB of sums,<br>128 for each of<br>256 consumer threads"
    )
    words = 4 * WORDS * size.rows // KIB
    box(
        figure,
        38,
        4,
        20,
        17,
        plots.ORANGE,
        f"<b>packed words</b>:<br>{WORDS} a row, {words} KiB<br>(the sums rounded: {held // 2})",
    )
    box(figure, 0.5, 4, 24, 17, plots.FAINT, "<b>memory</b><br>words that are in use")
    for start, end, text, at in (
        ((12.7, 42), (19.8, 42), "", (0, 0)),
        ((31.2, 42), (42.6, 42), "<b>TMA</b>", (36.8, 45)),
        ((43 + 6.6 * size.stages, 42), (81.8, 42), "<b>wgmma</b>", (75.8, 45)),
        ((90, 31.7), (90, 21.3), "", (0, 0)),
        ((75.8, 12), (58.2, 12), "<b>epilogue</b>", (67, 15)),
        ((37.8, 12), (24.7, 12), "", (0, 0)),
    ):
        arrow(figure, start, end)
        if text:
            say(figure, at[0], at[1], text)
    say(figure, 36.8, 28, "one thread of the producer<br>starts each copy", size=11)
    say(figure, 72, 28, "by the consumer warpgroups;<br>no operand passes a register", size=11)
    title = f"A tile of {size.rows} tokens x {size.columns} neurons, in steps of {size.depth} along d_model"
    return sheet(figure, title, 100, 56, 400)


def cluster() -> go.Figure:
    """Return what two blocks of a cluster fetch for one step: each its rows of x, and half of the weights for both."""
    figure, size = go.Figure(), tile.SIZES
    of_x, of_w = (2 * size.depth * n // KIB for n in (size.rows, size.columns))
    half = of_w // size.cluster
    box(figure, 36, 2, 28, 10, PALE, "<b>L2 cache</b>")
    for i, left in enumerate((2, 62)):
        box(figure, left, 26, 36, 27, "#F7F7F7")
        say(figure, left + 18, 55.5, f"<b>block {i}</b>: tokens {size.rows * i} to {size.rows * (i + 1) - 1}")
        box(figure, left + 1.5, 29, 10, 21, X, f"its x<br>{of_x} KiB")
        for j in range(2):
            text = f"weights {size.columns // 2 * j} to<br>{size.columns // 2 * (j + 1) - 1}, {half} KiB"
            box(figure, left + 13 + 11 * j, 29, 10.6, 21, WEIGHTS, text, size=11)
    for start, end, colour in (
        ((39, 12.3), (8.5, 28.7), plots.BLUE),
        ((61, 12.3), (68.5, 28.7), plots.BLUE),
        ((45, 12.3), (20.5, 28.7), plots.RED),
        ((45, 12.3), (80.2, 28.7), plots.RED),
        ((55, 12.3), (31.3, 28.7), plots.GREEN),
        ((55, 12.3), (91.3, 28.7), plots.GREEN),
    ):
        arrow(figure, start, end, colour)
    say(figure, 14, 14, "blue: each its own x<br>orange: block 0 fetches for both", size=11)
    say(figure, 86, 14, "green: block 1<br>fetches for both", size=11)
    title = f"A cluster: a block asks the L2 for {of_x + half} KiB a step, not {of_x + of_w}"
    return sheet(figure, title, 100, 58, 330)


def pipeline() -> go.Figure:
    """Who works when in a model of the pipeline (`tile.schedule`): tiles packed at their end, and beside the next."""
    titles = ["v1, v2: a tile is packed when it is done", "v3: it is packed in pieces beside the next tile's products"]
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.2, subplot_titles=titles)
    lanes = (PACKING, TENSOR, PRODUCER)
    shapes, numbers = [], []
    for row, beside in enumerate((False, True), 1):
        axes = {"xref": f"x{row}", "yref": f"y{row}"}
        for part in tile.schedule(beside):
            at, packs = lanes.index(part["who"]), part["stage"] is None
            fill = plots.RED if packs else STAGES[part["stage"]]
            place = {"x0": part["start"], "x1": part["end"], "y0": at - 0.36, "y1": at + 0.36, **axes}
            shapes.append({"type": "rect", **place, "fillcolor": fill, "line": {"color": "white", "width": 1}})
            font = {"size": 10, "color": "white" if packs else plots.INK}
            middle = {"x": (part["start"] + part["end"]) / 2, "y": at, **axes}
            if part["what"]:
                numbers.append({**middle, "text": part["what"], "showarrow": False, "font": font})
        figure.add_scatter(x=[0], y=[0], mode="markers", marker={"opacity": 0}, hoverinfo="skip", row=row, col=1)
    captions = [caption.to_plotly_json() for caption in figure.layout.annotations]
    left = {"font": {"size": 12}, "x": 0, "xanchor": "left"}
    figure.layout.shapes = shapes
    figure.layout.annotations = [*(each | left for each in captions), *numbers]
    end = max(shape["x1"] for shape in shapes)
    figure.update_xaxes(range=[0, end + 0.2], showgrid=False, zeroline=False)
    figure.update_xaxes(title_text="time, in steps of a product", row=2, col=1)
    ticks = {"tickvals": [0, 1, 2], "ticktext": list(lanes), "range": [-0.6, 2.6]}
    figure.update_yaxes(showgrid=False, zeroline=False, **ticks)
    title = "Three tiles of 8 steps (really 32); colour: the stage, number: the step"
    return plots.styled(figure, title, height=380).update_layout(showlegend=False, margin={"l": 125, "t": 85})


def sums() -> go.Figure:
    """Return which lane and register hold which sum: the first warp's 16 rows of a wgmma tile, its first 16 columns."""
    _, lane, register = tile.sums()
    rows, columns = 16, 16
    figure = make_subplots(rows=1, cols=2, column_widths=[0.14, 0.86], horizontal_spacing=0.07)
    squares(figure, [[0], [1], [1], [1]], (plots.SKY, plots.FAINT), row=1, col=1, hoverinfo="skip", ygap=3)
    for warp in range(4):
        figure.add_annotation(x=0, y=warp, text=f"warp {warp}", showarrow=False, row=1, col=1)
    squares(
        figure,
        [[int(lane[r, c]) % QUAD for c in range(columns)] for r in range(rows)],
        [_pale(colour) for colour in LANES],
        text=[[f"{lane[r, c]}·d{register[r, c]}" for c in range(columns)] for r in range(rows)],
        texttemplate="%{text}",
        textfont={"size": 10, "color": plots.INK},
        hovertemplate="row %{y}, column %{x}: lane and register %{text}<extra></extra>",
        xgap=2,
        ygap=2,
        row=1,
        col=2,
    )
    figure.update_xaxes(visible=False, row=1, col=1)
    figure.update_yaxes(
        tickvals=[0, 1, 2, 3], ticktext=["0-15", "16-31", "32-47", "48-63"], title_text="row", row=1, col=1
    )
    figure.update_xaxes(title_text="column (the first 16 of 256)", dtick=1, showgrid=False, row=1, col=2)
    figure.update_yaxes(title_text="row", dtick=1, showgrid=False, row=1, col=2)
    figure.update_yaxes(autorange="reversed", zeroline=False)
    title = "Who holds the sums of a 64 x 256 tile: lane·register, in warp 0; four lanes share a row"
    return plots.styled(figure, title, height=470).update_layout(margin={"t": 60, "b": 45, "l": 55})


def _pale(colour: str) -> str:
    """The colour, half way to white."""
    return "#" + "".join(f"{(int(colour[i : i + 2], 16) + 255) // 2:02X}" for i in (1, 3, 5))
