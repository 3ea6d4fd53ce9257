"""The slider through the steps, without a browser: what is drawn is the step it stands at."""

import numpy as np
import pytest
import torch

from tests.simulator import modelled
from twell_lab import simulator
from twell_lab.core import InputError
from twell_lab.course.first_kernels import figures, same_words
from twell_lab.course.first_kernels.widget import StepExplorer
from twell_lab.course.packing import one_tile
from twell_lab.cuda.launch import run
from twell_lab.ops.pack import pack
from twell_lab.simulator.trace import Trace


def trace(barriers: bool = True) -> Trace:
    block = (
        modelled.block_sum(np.arange(64.0)) if barriers else modelled.pack_v2(-np.ones((1, 256), np.float32), 256, 32)
    )
    raw = block.raw()
    return Trace.of(raw["steps"], raw["lanes"], block.lines, block.arrays, block.names, (block.threads, 1, 1))


def drawn_as_stepped(explorer: StepExplorer, **options) -> None:
    fresh = figures.step_view(explorer.trace, explorer.step, **options)
    assert explorer.figure.layout.title.text == fresh.layout.title.text
    for mine, other in zip(explorer.figure.data, fresh.data, strict=True):
        assert [list(line) for line in mine.z] == [list(line) for line in other.z]
        assert mine.colorscale == other.colorscale
        if other.text is not None:
            assert [list(line) for line in mine.text] == [list(line) for line in other.text]


def test_the_figure_follows_the_slider(draws):
    explorer = StepExplorer(trace())
    assert (explorer._canvas is None) == (draws == "in place")
    for step in (0, 7, len(explorer.trace) - 1, 3):
        explorer.slider.value = step
        assert explorer.step == explorer.index == step
        drawn_as_stepped(explorer)


def test_the_button_goes_from_barrier_to_barrier(draws):
    explorer = StepExplorer(trace())
    for barrier in explorer.trace.barriers:
        assert not explorer.button.disabled
        explorer.button.click()
        assert explorer.step == barrier
        drawn_as_stepped(explorer)
    assert explorer.button.disabled
    explorer.next_barrier()
    assert explorer.step == explorer.trace.barriers[-1]
    explorer.slider.index = 0
    assert not explorer.button.disabled


def test_the_steps_of_one_warp_alone():
    steps = [step.index for step in trace() if step.warp == 0]
    explorer = StepExplorer(trace(), steps, page=32)
    assert [stop for _, stop in explorer.slider.options] == steps
    explorer.next_barrier()  # the last warp arrives in a step that is left out: the next stop
    assert explorer.step == min(step for step in steps if step >= explorer.trace.barriers[0])
    drawn_as_stepped(explorer, page=32)


def test_a_kernel_without_barriers_has_nothing_to_jump_to():
    explorer = StepExplorer(trace(barriers=False))
    assert explorer.button.disabled
    explorer.next_barrier()
    assert explorer.step == 0


@pytest.mark.parametrize("steps", [[], [3, 2], [0, 0], [-1], [10_000]])
def test_steps_that_are_none_are_refused(steps):
    with pytest.raises(InputError, match="ascending"):
        StepExplorer(trace(), steps)


@pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")
def test_the_slider_of_the_notebook_stops_where_words_are_written(draws):
    tile = one_tile(firing=9)
    with simulator.watching("counts", trace=0) as runs:
        run(pack, tile, tile=256, words=32, version=2)
    explorer = StepExplorer(runs[-1].trace, text={"packed": figures.packed_text(words=32)})
    writes = [step.index for step in explorer.trace.touching("packed")]
    for stop in writes:
        explorer.slider.value = stop
        assert explorer.trace[stop].line.text.split("(")[0] in explorer.figure.layout.title.text
    assert same_words(torch.from_numpy(explorer.trace.at(writes[-1])["packed"].data), tile)


def test_a_move_is_light(light):
    explorer = StepExplorer(trace())
    light(explorer, [lambda step=step: setattr(explorer.slider, "index", step) for step in (5, 1, 9)])
