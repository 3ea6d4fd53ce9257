"""The drawings of notebook 09 say what the kernel's source and the computed layout say."""

import pytest

from twell_lab.course.hopper import figures, tile
from twell_lab.course.puzzles import figures as puzzles

ALL = {
    "levels": figures.levels,
    "hierarchy": puzzles.hierarchy,
    "pipeline": figures.pipeline,
    "sums": figures.sums,
}


@pytest.mark.parametrize("name", ALL)
def test_each_drawing_has_a_title_and_fits_a_page(name):
    figure = ALL[name]()
    assert figure.layout.title.text and figure.layout.height <= 480
    assert all(len(line) <= 90 for note in figure.layout.annotations for line in (note.text or "").split("<br>"))


@pytest.mark.parametrize("name", ["levels", "hierarchy"])
def test_no_box_leaves_the_sheet_and_no_two_texts_have_one_place(name):
    figure = ALL[name]()
    (left, right), (low, high) = figure.layout.xaxis.range, figure.layout.yaxis.range
    for box in figure.layout.shapes:
        assert left <= min(box.x0, box.x1) and max(box.x0, box.x1) <= right
        assert low <= min(box.y0, box.y1) and max(box.y0, box.y1) <= high
    places = [(note.x, note.y) for note in figure.layout.annotations if note.text]
    assert len(set(places)) == len(places)


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
