"""The drawings of notebook 09 say what the kernel's source and the computed layout say."""

import pytest

from twell_lab.course.hopper import figures, tile

ALL = {
    "pipeline": figures.pipeline,
    "sums": figures.sums,
}


@pytest.mark.parametrize("name", ALL)
def test_each_drawing_has_a_title_and_fits_a_page(name):
    figure = ALL[name]()
    assert figure.layout.title.text and figure.layout.height <= 480
    assert all(len(line) <= 90 for note in figure.layout.annotations for line in (note.text or "").split("<br>"))


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
