"""The figures of the first notebooks show the numbers they were given."""

import pytest

from twell_lab.core import InputError
from twell_lab.course.measure import figures


def test_bars_show_medians_and_ratios_to_the_base():
    figure = figures.bars({"dense": [4.0, 4.0, 4.4], "sparse": [1.0, 2.0, 9.0]}, "a title", base="dense")
    assert list(figure.data[0].x) == [4.0, 2.0]
    assert [note.text for note in figure.layout.annotations] == ["4 ms", "2 ms  (2x)"]
    assert min(figure.data[0].error_x.array) >= 0 and min(figure.data[0].error_x.arrayminus) >= 0


def test_bars_of_one_sample_have_no_whisker():
    figure = figures.bars({"once": [0.05], "often": [0.1, 0.2, 0.3]}, "a title")
    often, once = figure.data
    assert once.error_x.array is None and once.y == ("once",) and often.error_x.array and often.y == ("often",)
    assert figure.layout.yaxis.categoryarray == ("once", "often") and figure.layout.annotations[0].text == "50 us"


@pytest.mark.parametrize("samples", [{}, {"nothing": [0.0]}])
def test_bars_refuse_what_is_no_time(samples):
    with pytest.raises(InputError):
        figures.bars(samples, "a title")


def test_firing_map_marks_the_neurons_that_fire():
    figure = figures.firing_map([True, False, True, False, False], across=3)
    assert [list(line) for line in figure.data[0].z] == [[1, 0, 1], [0, 0, None]]
    assert "2 of 5 neurons" in figure.layout.title.text


def rows(path, **more):
    return [
        {"density": density, "path": path, "x_dense": 2.0, "ms": 1.0, "dense_ms": 2.0} | more for density in (0.1, 0.01)
    ]


def test_densities_are_sorted_named_and_dense_is_the_line_at_one():
    recorded = rows("CSR", device="Some GPU", date="2026-01-02T03:04:05Z")
    figure = figures.against_density(rows("dense") + rows("CSR"), "a title", recorded)
    assert [trace.name for trace in figure.data] == ["CSR, yours, now", "CSR, recorded on Some GPU, 2026-01-02"]
    assert list(figure.data[0].x) == [1.0, 10.0]
    assert [trace.line.dash for trace in figure.data] == ["solid", "dot"]
    assert figure.layout.shapes[0].y0 == 1


def test_a_threshold_that_was_not_measured_is_refused():
    sweep = {
        "d_ff": 4,
        "tokens": 1,
        "edges": [0.0, 1.0],
        "counts": [2.0],
        "rows": [{"threshold": 0.0, "nnz": 2.0, "density": 0.5, "error": 0.0, "weights": 0.6}],
    }
    assert figures.threshold(sweep).layout.title.text.startswith("Threshold 0.00: 2 of 4 fire")
    with pytest.raises(InputError, match="0 to 0"):
        figures.threshold(sweep, 1)
