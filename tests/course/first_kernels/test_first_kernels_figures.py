"""The figures of the simulator show who touched what, the numbers they were given, and nothing of the step before."""

from functools import cache

import pytest
import torch

from tests.simulator import recorded
from twell_lab import plots
from twell_lab.core import InputError
from twell_lab.course.first_kernels import figures as drawn
from twell_lab.simulator.trace import Trace


def gate(rows: int = 1, columns: int = 512) -> torch.Tensor:
    return recorded.gate(rows, columns, seed=3)


@cache
def trace(kernel: str, rows: int = 1, columns: int = 512) -> Trace:
    run = recorded.block_sum() if kernel == "block_sum" else recorded.pack(int(kernel[-1]), gate(rows, columns))
    return run.trace


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


def panel(figure, word: str) -> tuple:
    return next(found for caption, found in panels(figure).items() if word in caption)


def flat(lines) -> list:
    return [cell for line in lines for cell in line]


def test_every_cell_names_the_thread_that_read_it():
    figure = drawn.who_touches_what(trace("pack_v2"), cells=256)
    texts, colours, framed, hover = panel(figure, "gate")
    assert len(texts) == 8 and all(line == [str(lane) for lane in range(32)] for line in texts)
    assert len(set(colours[0])) == 32 and all(line == colours[0] for line in colours)
    assert not any(flat(framed))
    assert "gate[0, 33]" in hover[1][1] and "read by thread 1" in hover[1][1] and "smxx_pack.cu:" in hover[1][1]
    assert f"value {gate()[0, 33]:.6g}" in hover[1][1]
    assert any("the first 256 of 512" in caption for caption in panels(figure))


@pytest.mark.parametrize(("wrong", "named"), [({"arrays": ["x"]}, "'x'"), ({"steps": [1]}, "no array")])
def test_what_cannot_be_drawn_is_refused(wrong, named):
    with pytest.raises(InputError, match=named):
        drawn.who_touches_what(trace("pack_v2"), **wrong)


def test_a_step_shows_the_line_the_lanes_and_the_arrays():
    steps = trace("pack_v2")
    step = next(step for step in steps if step.kind == "write" and len(step.threads) == 2)
    figure = drawn.step_view(steps, step.index, text={"packed": drawn.packed_text(32)})
    title = figure.layout.title.text
    for said in ("smxx_pack.cu:", "if (kept(v) &amp;&amp; slot &lt; words)", "2 lanes write packed"):
        assert said in title
    texts, colours, *_ = panel(figure, "lanes of warp 0")
    assert [lane for lane, colour in enumerate(colours[0]) if colour == plots.ORANGE] == [t % 32 for t in step.threads]
    assert texts[0] == [str(lane) for lane in range(32)]
    texts, colours, framed, hover = panel(figure, "packed")
    assert [i for i, colour in enumerate(flat(colours)) if colour == plots.ORANGE] == list(step.elements)
    column, value = texts[0][step.elements[0]].split("<br>")
    assert float(gate()[0, int(column)]) == pytest.approx(float(value), abs=0.06)
    assert flat(framed) == steps.at(step.index).last("packed").written.tolist()


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
