"""The pickers of the recorded sweep, without a browser: the figure shows the L1 that the slider names."""

import pytest

from twell_lab.course.sweep import data as course
from twell_lab.course.sweep import widget
from twell_lab.training import sweep

ROWS = course.recorded().rows
RUNS = sweep.pressed(ROWS)


@pytest.mark.parametrize(
    "explorer, shown",
    [
        (widget.run_explorer, lambda figure, row: list(figure.data[-1].y) == [layer["nnz"] for layer in row["layers"]]),
        (widget.layer_explorer, lambda figure, row: figure.data[-1].y[0] == row["history"]["nnz_layers"][0][-1]),
        (
            widget.place_explorer,
            lambda figure, row: list(figure.data[-1].y) == [name for name, _ in course.extremes(row)],
        ),
    ],
)
def test_the_figure_follows_the_slider(explorer, shown, draws):
    made = explorer(ROWS, "recorded somewhere")
    assert [value for _, value in made.slider.options] == [row["config"]["l1"] for row in RUNS]
    for number in (3, 0, len(RUNS) - 1):
        made.slider.value = RUNS[number]["config"]["l1"]
        assert made.index == number and shown(made.figure, RUNS[number])
        assert "recorded somewhere" in made.figure.layout.title.text
