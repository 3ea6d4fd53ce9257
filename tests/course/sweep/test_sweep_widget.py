"""The picker of the recorded sweep, without a browser: the figure shows the L1 that the slider names."""

from twell_lab.course.sweep import data as course
from twell_lab.course.sweep import widget
from twell_lab.training import sweep

ROWS = course.recorded().rows
RUNS = sweep.pressed(ROWS)


def test_the_figure_follows_the_slider(draws):
    made = widget.run_explorer(ROWS, "recorded somewhere")
    assert [value for _, value in made.slider.options] == [row["config"]["l1"] for row in RUNS]
    for number in (3, 0, len(RUNS) - 1):
        made.slider.value = RUNS[number]["config"]["l1"]
        assert made.index == number
        assert list(made.figure.data[-1].y) == [layer["nnz"] for layer in RUNS[number]["layers"]]
        assert "recorded somewhere" in made.figure.layout.title.text


def test_a_move_is_light(light):
    explorer = widget.run_explorer(ROWS, "recorded somewhere")
    light(explorer, [lambda: setattr(explorer.slider, "index", 1), lambda: setattr(explorer.slider, "index", 0)])
