"""The figures of the simulator show who touched what, the numbers they were given, and nothing of the step before."""

from functools import cache

import numpy as np
import pytest

from tests.simulator import modelled
from twell_lab import plots
from twell_lab.core import InputError
from twell_lab.course.first_kernels import figures as drawn
from twell_lab.simulator.counts import Counts, predicted_time
from twell_lab.simulator.report import ArrayInfo
from twell_lab.simulator.trace import Trace


def gate(rows: int = 1, columns: int = 512) -> np.ndarray:
    return modelled.rounded(np.random.default_rng(3).standard_normal((rows, columns)) - 1.5)


@cache
def trace(kernel: str, rows: int = 1, columns: int = 512) -> Trace:
    block = (
        modelled.block_sum(np.arange(64.0))
        if kernel == "block_sum"
        else getattr(modelled, kernel)(gate(rows, columns), 256, 32)
    )
    raw = block.raw()
    return Trace.of(raw["steps"], raw["lanes"], block.lines, block.arrays, block.names, (block.threads, 1, 1))


def panels(figure) -> dict:
    """Caption -> (texts, colours, framed, hover) of its cells, line by line."""
    found = {}
    for i, caption in enumerate(figure.layout.annotations):
        frame, cells = figure.data[2 * i : 2 * i + 2]
        found[caption.text] = (
            [list(line) for line in cells.text],
            _colours(cells),
            [[cell == 1 for cell in line] for line in frame.z],
            cells.customdata,
        )
    return found


def _colours(cells) -> list:
    """The colour of each cell, as the browser looks it up."""
    scale, (least, most) = cells.colorscale, (cells.zmin, cells.zmax)

    def colour(z):
        if z is None:
            return None
        share = (z - least) / (most - least)
        return next(
            colour for (start, colour), (end, _) in zip(scale[::2], scale[1::2], strict=True) if start <= share < end
        )

    return [[colour(z) for z in line] for line in cells.z]


def test_words_are_shown_for_every_dtype():
    assert [drawn.packed_text(32)(1, word) for word in (0x4020_0007, -0x4000_0000 + 7)] == ["7<br>2.5", "7<br>-2"]
    assert drawn.packed_text(32, "float16")(1, 0x4100_0003) == "3<br>2.5"
    assert drawn.packed_text(32, "float32")(1, 0x4020_0000_0000_0009) == "9<br>2.5"


def panel(figure, word: str) -> tuple:
    return next(found for caption, found in panels(figure).items() if word in caption)


def flat(lines) -> list:
    return [cell for line in lines for cell in line]


# ---- who touches what ----


def test_every_cell_names_the_thread_that_read_it():
    figure = drawn.who_touches_what(trace("pack_v2"), cells=256)
    texts, colours, framed, hover = panel(figure, "gate")
    assert len(texts) == 8 and all(line == [str(lane) for lane in range(32)] for line in texts)
    assert len(set(colours[0])) == 32 and all(line == colours[0] for line in colours)
    assert not any(flat(framed))
    assert "gate[0, 33]" in hover[1][1] and "read by thread 1" in hover[1][1] and "smxx_pack.cu:63" in hover[1][1]
    assert f"value {gate()[0, 33]:.6g}" in hover[1][1]
    assert any("the first 256 of 512" in caption for caption in panels(figure))


def test_what_is_written_is_framed_and_what_is_not_stays_empty():
    kept = (gate().reshape(2, 256) > 0).sum(1)
    texts, colours, framed, _ = panel(drawn.who_touches_what(trace("pack_v2")), "packed")
    for tile in (0, 1):
        assert [cell != "" for cell in texts[tile]] == framed[tile] == [word <= kept[tile] for word in range(32)]
        assert all(
            (colour == drawn.UNTOUCHED) != cell for colour, cell in zip(colours[tile], framed[tile], strict=True)
        )
    assert texts[1][0] == "32"  # the second warp's first thread


def test_one_request_of_one_thread_a_tile_touches_a_sector_a_lane():
    steps = trace("pack_v1", 2, 4096)
    texts, *_ = panel(drawn.who_touches_what(steps, steps=[0], per_cell={"gate": 16}), "32 cells touched")
    assert len(texts) == 32 and all(line == [str(thread)] + [""] * 15 for thread, line in enumerate(texts))
    texts, *_ = panel(drawn.who_touches_what(trace("pack_v2"), steps=[0], per_cell=16), "2 cells touched")
    assert texts[0][:3] == ["0–15", "16–31", ""]


def test_several_threads_and_atomics():
    figure = drawn.who_touches_what(trace("block_sum"))
    captions = list(panels(figure))
    assert [caption.split(":")[1].split(" by")[0].strip() for caption in captions] == [
        "read",
        "read",
        "written",
        "updated",
    ]
    texts, colours, framed, hover = panels(figure)[captions[3]]
    assert set(flat(texts)) == {"×2"} and set(flat(colours)) == {drawn.SHARED_BY_MANY} and all(flat(framed))
    assert "updated by thread 3 and 35" in hover[0][3]


def few(shape: tuple) -> Trace:
    """Two threads write the elements of a small shared array."""
    block = modelled.Block(
        32,
        {1: modelled.Line("toy.cu", 1, "part[i] = a < b;", "toy")},
        [ArrayInfo("part", "shared", np.dtype("f4"), shape, None)],
    )
    block.access(modelled.WRITE, "part", [1], {0: 0, 1: 3}, {0: 0, 1: 0})
    raw = block.raw()
    return Trace.of(raw["steps"], raw["lanes"], block.lines, block.arrays, (), (32, 1, 1))


@pytest.mark.parametrize(("shape", "lines"), [((4,), 1), ((2, 1, 2), 1), ((3, 12), 3), ((2, 48), 3), ((4, 1), 1)])
def test_small_and_odd_arrays(shape, lines):
    for figure in (drawn.who_touches_what(few(shape)), drawn.step_view(few(shape), 0)):
        texts, colours, framed, _ = panel(figure, "<b>part")
        assert [i for i, cell in enumerate(flat(framed)) if cell] == [0, 3] and None not in flat(texts)
        assert (
            len(texts) <= lines
            and figure.layout[f"xaxis{len(figure.data) // 2}" if len(figure.data) > 2 else "xaxis"].range[1] == 31.5
        )
        assert sum(colour is not None for colour in flat(colours)) <= np.prod(shape)


def test_the_whole_block_and_neighbours():
    texts, *_ = panel(drawn.who_touches_what(trace("block_sum"), per_cell=64), "<b>part</b>, shared float32 [64]: read")
    assert texts == [["all"] + [""] * 15]
    texts, *_ = panel(drawn.who_touches_what(trace("block_sum"), by="warp"), "<b>part</b>, shared float32 [64]: read")
    assert set(flat(texts)) == {"all"}


def test_by_warp():
    texts, colours, *_ = panel(drawn.who_touches_what(trace("pack_v2"), by="warp", cells=512), "gate")
    assert [set(line) for line in texts] == [{"0"}] * 8 + [{"1"}] * 8 and colours[0][0] != colours[8][0]


def test_the_drawn_part_can_be_chosen():
    texts, *_ = panel(drawn.who_touches_what(trace("pack_v2"), ["gate"], first={"gate": 256}), "gate")
    assert texts[0][0] == "32" and len(texts) == 8


def test_lanes_differ_in_lightness_too():
    """In grey print neighbouring lanes may look alike, but far ones do not, and the order is kept."""
    grey = [
        sum(weight * int(part) for weight, part in zip((0.299, 0.587, 0.114), colour[4:-1].split(","), strict=True))
        for colour in drawn.LANE_COLOURS
    ]
    assert all(later > earlier for earlier, later in zip(grey[::4], grey[4::4], strict=False))
    assert grey[-1] - grey[0] > 150


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"by": "lane"}, "'lane'"),
        ({"arrays": ["x"]}, "'x'"),
        ({"steps": [1]}, "no array"),
        ({"first": {"gate": 5000}}, "5000"),
    ],
)
def test_what_cannot_be_drawn_is_refused(wrong, named):
    with pytest.raises(InputError, match=named):
        drawn.who_touches_what(trace("pack_v2"), **wrong)


# ---- one step ----


def test_a_step_shows_the_line_the_lanes_and_the_arrays():
    steps = trace("pack_v2")
    step = next(step for step in steps if step.kind == "write" and len(step.threads) == 2)
    figure = drawn.step_view(steps, step.index, text={"packed": drawn.packed_text(32)})
    title = figure.layout.title.text
    assert (
        "smxx_pack.cu:67" in title
        and "if (kept(v) &amp;&amp; slot &lt; words)" in title
        and "2 lanes write packed" in title
    )
    texts, colours, *_ = panel(figure, "lanes of warp 0")
    assert [lane for lane, colour in enumerate(colours[0]) if colour == plots.ORANGE] == [t % 32 for t in step.threads]
    assert texts[0] == [str(lane) for lane in range(32)]
    texts, colours, framed, hover = panel(figure, "packed")
    assert [i for i, colour in enumerate(flat(colours)) if colour == plots.ORANGE] == list(step.elements)
    column, value = texts[0][step.elements[0]].split("<br>")
    assert gate()[0, int(column)] == pytest.approx(float(value), abs=0.06)
    assert flat(framed) == steps.at(step.index).last("packed").written.tolist()


@pytest.mark.parametrize("value, text", [(-0.03, "-.03"), (0.0071, ".01"), (-0.5, "-0.5"), (1e-4, "1e-4"), (2.0, "2")])
def test_small_values_fit_a_cell(value, text):
    assert drawn._short(value) == text


def test_every_cell_holds_the_value_after_the_step():
    steps = trace("block_sum")
    for index in range(0, len(steps), 7):
        figure = drawn.step_view(steps, index)
        state = steps.at(index)
        for name in ("x", "part", "y"):
            texts, colours, *_ = panel(figure, f"<b>{name}</b>")
            assert [text or None for text in flat(texts)] == [
                None if value is None else f"{value:.0f}" for value in state[name].reshape(-1).tolist()
            ]
            now = steps[index].covered if steps[index].array == name else ()
            strong = {i for i, colour in enumerate(flat(colours)) if colour in (plots.BLUE, plots.ORANGE)}
            assert strong == set(now)


def test_numbers_that_are_not_asked_for_are_left_to_the_hover_text():
    steps = trace("pack_v2")
    plain, few = (drawn.step_view(steps, 3, only=only) for only in (None, {"gate": lambda value: value > 0}))
    (texts, colours, _, hover), (left, *same) = panel(plain, "gate"), panel(few, "gate")
    values = gate()[0, :256].tolist()
    assert flat(left) == [text if value > 0 else "" for text, value in zip(flat(texts), values, strict=True)]
    assert (
        "" in flat(left) and same[0] == colours and [list(line) for line in same[2]] == [list(line) for line in hover]
    )
    assert panel(few, "lanes") == panel(plain, "lanes")


def test_frames_are_drawn_where_anything_is_written():
    steps = trace("pack_v2")
    for index in range(0, len(steps), 5):
        for frame in drawn.step_view(steps, index).data[::2]:
            assert frame.visible == any(cell == 1 for line in frame.z for cell in line)


def test_an_array_that_is_only_written_is_empty_until_then():
    texts, *_ = panel(drawn.step_view(trace("pack_v2"), 0), "packed")
    assert not any(flat(texts))


def test_watched_values_and_results_stand_under_their_lanes():
    steps = trace("pack_v2")
    watch = next(step for step in steps if step.kind == "watch" and step.values[0] > 0)
    figure = drawn.step_view(steps, watch.index + 1)
    row = list(figure.layout.yaxis.ticktext).index("count")
    texts, *_ = panel(figure, "lanes of warp")
    assert texts[row] == [f"{watch.values[0]:.0f}"] * 32
    assert figure.layout.yaxis.ticktext[1] == "reads"
    assert "count" in drawn.step_view(steps, 0).layout.yaxis.ticktext  # from the start, so that nothing jumps


def test_a_large_array_shows_the_page_that_was_touched_last():
    steps = trace("pack_v2")
    late = next(step.index for step in steps if step.kind == "read" and step.elements[0] == 256)
    for index, page in (
        (late - 1, "elements 0 to 255"),
        (late, "elements 256 to 511"),
        (late + 1, "elements 256 to 511"),
    ):
        assert panel(drawn.step_view(steps, index), page)
    assert len(panel(drawn.step_view(steps, 0, page={"gate": 64}), "gate")[0]) == 2
    with pytest.raises(InputError, match="steps 0 to"):
        drawn.step_view(steps, len(steps))


@pytest.mark.parametrize("kernel", ["pack_v1", "pack_v2", "block_sum"])
def test_moving_leaves_nothing_of_the_step_before(kernel):
    steps = trace(kernel)
    figure = drawn.step_view(steps, 0)
    for index in (len(steps) - 1, len(steps) // 2, 1):
        drawn.move_step_view(figure, steps, index)
        fresh = drawn.step_view(steps, index)
        assert [t.to_plotly_json() for t in figure.data] == [t.to_plotly_json() for t in fresh.data]
        assert figure.layout == fresh.layout


def test_the_height_never_changes():
    steps = trace("pack_v2")
    assert len({drawn.step_view(steps, index).layout.height for index in range(len(steps))}) == 1


# ---- bars ----


def counted(kernel: str) -> Counts:
    block = getattr(modelled, kernel)(gate(2, 4096), 256, 32)
    raw = block.raw()
    return Counts.of(raw["sites"], raw["footprint"], block.lines, block.arrays, block.threads)


def test_sectors_are_bars_of_bytes():
    counts = {kernel: counted(kernel) for kernel in ("pack_v1", "pack_v2")}
    asked, moved, written, sectors = drawn.sectors_figure(counts).data
    assert list(asked.y) == [16.384, 16.384] and list(moved.y) == [16 * 16.384, 16.384]
    assert moved.text[0].endswith("×16") and moved.text[1].endswith("×1") and moved.marker.pattern.shape
    assert list(written.x) == ["pack_v1", "pack_v2"] and all(m >= a for a, m in zip(written.y, sectors.y, strict=True))
    with pytest.raises(InputError):
        drawn.sectors_figure({})


def test_predictions_stand_beside_the_measurement():
    bounds = {name: 1e3 * seconds for name, seconds in predicted_time(counted("pack_v1")).bounds.items()}
    rows = [
        {"version": "pack_v1", "predicted_ms": bounds, "measured_ms": 0.5, "recorded": "H100 SXM, 2026-11-21"},
        {
            "version": "mine",
            "predicted_ms": {"device memory": 0.25, "L2 cache": 0.125},
            "measured_ms": None,
            "recorded": "",
        },
    ]
    *parts, measured = drawn.predicted_against_measured(rows).data
    assert [part.name for part in parts] == [f"predicted: {name}" for name in bounds]
    assert [part.y[0] for part in parts] == list(bounds.values()) and parts[2].y[1] is None
    assert [part.text[1] for part in parts] == ["<b>0.25</b>", "0.125", ""]  # the limit is bold
    assert (
        measured.y == (0.5, None)
        and measured.name == "measured (H100 SXM, 2026-11-21)"
        and measured.text == ("0.5", "")
    )
    assert len({part.marker.pattern.shape for part in parts}) == 3
    with pytest.raises(InputError):
        drawn.predicted_against_measured([])


def test_the_readers_own_times_are_points():
    row = {"predicted_ms": {"device memory": 0.25}, "measured_ms": 0.3, "recorded": "H100 SXM, 2026-11-21"}
    rows = [
        {"version": "v1", **row, "yours_ms": 0.7, "yours": "yours, now, on T4"},
        {"version": "v2", **row, "yours_ms": None},
    ]
    figure = drawn.predicted_against_measured(rows)
    own = figure.data[-1]
    assert own.x == ("v1",) and own.y == (0.7,) and own.name == "yours, now, on T4" and own.mode == "markers"
    assert figure.layout.yaxis.range[1] > 0.7 and figure.data[0].name == "predicted for an H100: device memory"
    figure = drawn.predicted_against_measured([{**rows[0], "yours_predicted_ms": 0.9}, rows[1]])
    predicted, own = figure.data[-2:]
    assert predicted.y == (0.9,) and predicted.name == "predicted for your GPU" and own.y == (0.7,)
    assert predicted.marker.symbol != own.marker.symbol and figure.layout.yaxis.range[1] > 0.9
