"""The figures of the work behind the kernels show the numbers they were given."""

import pytest

from tests.course.recorded_rows import RATES, WHERE, everything
from twell_lab import plots
from twell_lab.core.errors import InputError
from twell_lab.course.roofline import data as roofline
from twell_lab.course.roofline import figures


def test_the_roofline_has_a_point_for_each_kernel_under_both_roofs():
    gpu = roofline.datasheet()
    found = roofline.points(everything(), {"gated_v3": {"ms": 0.5, "where": WHERE}})
    figure = figures.roofline(found, gpu, RATES)
    points = [trace for trace in figure.data if trace.mode == "markers"]
    assert [trace.name for trace in points] == [p["name"] for p in found]
    roof = figure.data[0]
    assert roof.y[-1] == gpu["tensor_tflops"] and roof.y[0] == pytest.approx(0.3 * gpu["bandwidth_gb_s"] / 1e3)
    assert len({(trace.marker.symbol, trace.marker.color) for trace in points}) == len(points)


def test_lanes():
    figure = figures.lanes({"before": [n % 8 // 2 for n in range(256)], "after": [n // 64 for n in range(256)]})
    assert list(figure.data[0].z[0][:4]) == [0, 0, 1, 1] and [line[0] for line in figure.data[1].z] == [0, 1, 2, 3]
    for wrong in ([0] * 255, [4] * 256):
        with pytest.raises(InputError):
            figures.lanes({"wrong": wrong})


def test_the_pool_shows_who_lies_where():
    figure = figures.pool_segment(roofline.pool_table([40, 10, 33, 90]))
    owners = [line for line in figure.data[2].customdata[0]]
    assert owners[:9] == ["row 0"] * 9 and owners[9:11] == ["row 2"] * 2 and owners[11] == "row 3, lost: never read"
    assert list(figure.data[0].y) == [31, 10, 31, 31] and list(figure.data[1].text) == ["", "", "", "lost"]
    assert figures.pool_segment(roofline.pool_table([3, 4])).data[2].z[0].count(None) == 64


def test_frequencies_splits_and_turns():
    figure = figures.frequencies({"some": [0.5, 0.0, 0.01]}, 0.01)
    assert (
        list(figure.data[0].x) == [1, 2] and list(figure.data[0].y) == [50.0, 1.0] and figure.layout.shapes[0].y0 == 1.0
    )
    rows = [{"hot": 0, "ms": 2.0, "cold_nnz": 5.0}, {"hot": 256, "ms": 1.0, "cold_nnz": 1.0}]
    figure = figures.splits({"some": rows})
    assert list(figure.data[1].x) == [256] and figure.data[0].line.color == plots.COLOURS[0]
    figure = figures.filled({"d_ff 5,632": [(256, 1 / 3), (512, 2 / 3)]})
    assert list(figure.data[0].y) == pytest.approx([100 / 3, 200 / 3])


def test_a_roofline_without_a_record_says_so():
    assert "nothing is recorded" in figures.roofline([], roofline.datasheet()).layout.annotations[0].text
