"""Widgets without a browser: moving a slider from code changes the figure, in both ways of drawing."""

import subprocess
import sys

import plotly.graph_objects as go
import pytest
import torch

from twell_lab.core import InputError
from twell_lab.course import measure, widgets
from twell_lab.course.measure import widget
from twell_lab.ops.reference import GatedFeedForward

THRESHOLDS = [0.0, 0.25, 0.5, 0.75, 1.0]


@pytest.fixture(scope="module")
def sweep():
    torch.manual_seed(0)
    return measure.threshold_sweep(GatedFeedForward(32, 64), torch.randn(20, 32), THRESHOLDS)


@pytest.fixture
def explorer(draws, sweep):
    return widget.threshold_explorer(sweep)


def test_the_figure_follows_the_slider(explorer, sweep):
    for value in (0.5, 1.0, 0.0):
        explorer.slider.value = value
        row = sweep["rows"][THRESHOLDS.index(value)]
        assert explorer.index == THRESHOLDS.index(value)
        assert list(explorer.figure.data[2].x) == [100 * row["weights"]]
        assert list(explorer.figure.data[2].y) == [100 * row["error"]]
        assert explorer.figure.layout.title.text.startswith(f"Threshold {value:.2f}")


def test_the_kept_values_change_their_colour(explorer, sweep):
    def kept():
        return sum(colour == "#0072B2" for colour in explorer.figure.data[0].marker.color)

    explorer.slider.value = 0.0
    all_of_them = kept()
    explorer.slider.value = 0.5
    assert 0 < kept() < all_of_them == len(sweep["counts"])


def test_a_threshold_that_is_not_offered_is_refused(explorer):
    with pytest.raises(Exception, match="0.33|[Ii]nvalid"):
        explorer.slider.value = 0.33


def test_colab_gets_a_plain_figure_and_jupyter_a_live_one(sweep, monkeypatch):
    pytest.importorskip("anywidget")
    monkeypatch.delenv("COLAB_RELEASE_TAG", raising=False)
    assert isinstance(widget.threshold_explorer(sweep).figure, go.FigureWidget)
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release")
    explorer = widget.threshold_explorer(sweep)
    assert not isinstance(explorer.figure, go.FigureWidget)
    assert explorer.children[1] is explorer._canvas


def test_without_anywidget_the_figure_is_drawn_anew(sweep, monkeypatch):
    def refuse(*_):
        raise ImportError("Please install anywidget to use the FigureWidget class")

    monkeypatch.setattr(go, "FigureWidget", refuse)
    explorer = widget.threshold_explorer(sweep)
    explorer.slider.value = 0.75
    assert explorer._canvas is not None and explorer.figure.data[2].y[0] == 100 * sweep["rows"][3]["error"]


def test_no_choices_is_refused():
    with pytest.raises(InputError, match="choices"):
        widgets.Explorer(go.Figure(), lambda figure, index: None, [], "nothing")


def test_without_ipywidgets_a_sentence_says_what_to_install():
    hide = "import sys; sys.modules['ipywidgets'] = None; from twell_lab.course import widgets"
    done = subprocess.run([sys.executable, "-c", hide], capture_output=True, text=True)
    assert done.returncode and "StackError: widgets need ipywidgets" in done.stderr


def test_a_move_is_light(light, sweep):
    explorer = widget.threshold_explorer(sweep)
    light(explorer, [lambda: setattr(explorer.slider, "index", 1), lambda: setattr(explorer.slider, "index", 0)])


def test_plotly_need_not_measure_what_stands_beside_numbers(draws):
    """It would at each move. Names, which are longer and may overlap, are measured."""
    figure = go.Figure(go.Bar(x=["a long name", "another"], y=[1, 2]))
    figure.add_scatter(x=[1, 2], y=[3, 4], xaxis="x2", yaxis="y2")
    figure.update_layout(xaxis={"domain": [0, 0.4]}, xaxis2={"domain": [0.6, 1]}, yaxis2={"anchor": "x2"})
    shown = widgets.Explorer(figure, lambda figure, index: None, [("one", 1)], "choice").figure.layout
    names, numbers = (shown.xaxis,), (shown.yaxis, shown.xaxis2, shown.yaxis2)
    assert all(axis.automargin is None and axis.tickangle is None for axis in names)
    assert all((axis.automargin, axis.tickangle, axis.ticklabeloverflow) == (False, 0, "allow") for axis in numbers)
