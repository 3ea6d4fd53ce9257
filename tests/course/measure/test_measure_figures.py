"""The figures of the first notebooks show the numbers they were given."""

import pytest

from twell_lab.core import InputError
from twell_lab.course.measure import figures


def test_bars_show_medians_and_ratios_to_the_base():
    figure = figures.bars({"dense": [4.0, 4.0, 4.4], "sparse": [1.0, 2.0, 9.0]}, "a title", base="dense")
    assert list(figure.data[0].x) == [4.0, 2.0]
    assert [note.text for note in figure.layout.annotations] == ["4 ms", "2 ms  (2x)"]
    assert min(figure.data[0].error_x.array) >= 0 and min(figure.data[0].error_x.arrayminus) >= 0


@pytest.mark.parametrize("samples", [{}, {"nothing": [0.0]}])
def test_bars_refuse_what_is_no_time(samples):
    with pytest.raises(InputError):
        figures.bars(samples, "a title")


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
