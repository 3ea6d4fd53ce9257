"""The run picker, without a browser: the figure shows the run that the slider names."""

import pytest

from twell_lab.core import InputError
from twell_lab.course.training import widget

RUNS = {
    name: {
        "config": {"d_ff": 100},
        "mean_nnz": 50 * share,
        "validation_bits_per_byte": 3 - share,
        "density": [share, share / 2],
        "history": [{"step": 1, "nnz": 50.0}, {"step": 9, "nnz": 50 * share}],
    }
    for name, share in (("no L1", 0.5), ("L1 1e-3", 0.1), ("L1 1e-2", 0.0))
}


def test_the_figure_follows_the_slider(draws):
    explorer = widget.run_explorer(RUNS)
    for index in (2, 0, 1):
        name = list(RUNS)[index]
        explorer.slider.value = name
        assert explorer.figure.layout.title.text.startswith(f"{name}: ")
        assert list(explorer.figure.data[3].y) == [100 * share for share in RUNS[name]["density"]]
        assert [trace.line.width for trace in explorer.figure.data[:3]] == [3 if i == index else 1 for i in range(3)]


def test_no_runs_are_refused():
    with pytest.raises(InputError):
        widget.run_explorer({})


def test_a_move_is_light(light):
    explorer = widget.run_explorer(RUNS)
    light(explorer, [lambda: setattr(explorer.slider, "index", 1), lambda: setattr(explorer.slider, "index", 0)])
