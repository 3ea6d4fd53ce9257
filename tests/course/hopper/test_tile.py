"""What a tile goes through: the layout held against the kernel's own code, lost rows against the library's rule."""

import pytest
import torch

from twell_lab import simulator
from twell_lab.course.hopper import figures, tile


def test_every_sum_has_one_place_and_every_register_one_sum():
    places = {*zip(*(each.flatten().tolist() for each in tile.sums()))}
    assert places == {(warp, lane, register) for warp in range(4) for lane in range(32) for register in range(128)}


@pytest.mark.parametrize("beside", [False, True])
def test_nobody_works_on_a_stage_that_is_not_theirs(beside):
    found = tile.schedule(beside, tiles=3, steps=8)
    fills, uses, packs = (
        [part for part in found if part["who"] == who] for who in (tile.PRODUCER, tile.TENSOR, tile.PACKING)
    )
    assert len(fills) == len(uses) == 24
    for i, (fill, use) in enumerate(zip(fills, uses)):
        assert fill["stage"] == use["stage"] and use["start"] >= fill["end"]
        assert i < 4 or fill["start"] >= uses[i - 4]["end"]
    for line in (fills, uses):
        assert all(after["start"] >= before["end"] for before, after in zip(line, line[1:]))
    assert sum(part["end"] - part["start"] for part in packs) == pytest.approx(3)
    for part in packs:
        busy = any(use["start"] < part["end"] and part["start"] < use["end"] for use in uses)
        assert busy == (beside and part["what"] == "")  # but for the last tile, which no other follows


@pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lost_rows_are_listed_and_the_others_right(dtype):
    counts = [12, 40, 9, 31, 0, 33, 18, 75, 22, 30, 52, 8, 31, 14, 36, 20]
    lost, error = tile.overflow(counts, dtype)
    assert lost == [10, 14] and error < 0.01
    assert tile.overflow([0] * 15 + [256], dtype)[0] == [15]


def test_the_pipeline_draws_every_piece():
    for drawn, beside in zip(figures.pipeline().data, (False, True), strict=True):
        parts = tile.schedule(beside)
        assert [*drawn.base] == [part["start"] for part in parts] and [*drawn.text] == [part["what"] for part in parts]
        ends = [start + takes for start, takes in zip(drawn.base, drawn.x)]
        assert ends == pytest.approx([part["end"] for part in parts])


def test_the_sums_drawn_are_those_of_the_layout():
    (cells,) = figures.sums().data
    _, lane, register = tile.sums()
    for row, column in ((0, 0), (8, 9), (15, 15), (3, 6)):
        assert cells.text[row][column] == f"{lane[row, column]}·d{register[row, column]}"
