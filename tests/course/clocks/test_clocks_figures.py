"""The figures of the notebook on clocks show the numbers they were given."""

import math

import pytest

from twell_lab.core import InputError
from twell_lab.course.clocks import figures


def test_the_ladder_names_each_step_and_holds_one():
    figure = figures.ladder({"claimed": 2000.0, "waits": 30.0, "fair": 0.25})
    assert list(figure.data[0].x) == [2000, 30, 0.25] and list(figure.data[0].y) == ["claimed", "waits", "fair"]
    assert [note.text for note in figure.layout.annotations] == ["2,000x", "30x", "0.25x"]
    low, high = figure.layout.xaxis.range
    assert low < math.log10(0.25) < math.log10(2000) < high and figure.layout.shapes[0].x0 == 1
    with pytest.raises(InputError, match="one ratio or more"):
        figures.ladder({})


def test_orders_show_each_sample_where_it_was_taken():
    samples = {"first": [1.0, 2.0, 3.0], "second": [4.0, 5.0, 6.0]}
    figure = figures.orders({"one after the other": samples, "in turns": samples})
    assert [list(trace.x) for trace in figure.data] == [[1, 2, 3], [4, 5, 6], [1, 3, 5], [2, 4, 6]]
    assert {shape.x0 for shape in figure.layout.shapes} == {2.5}


def test_readings_are_of_one_loop():
    read = figures.readings([(0.5, 9.0), (0.1, 1.0), (0.2, 2.0), (0.3, 6.0)])
    assert read == {
        "median": [1.0, 2.0, 6.0],
        "mean": [3.0],
        "best": [1.0],
        "worst": [6.0],
        "first call": [9.0],
        "stopped at the return": [0.2],
    }
    with pytest.raises(InputError, match="two or more"):
        figures.readings([(0.5, 9.0)])
