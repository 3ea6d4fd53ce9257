"""The figures of the work behind the kernels show the numbers they were given."""

import pytest

from tests.course.recorded_rows import WHERE, everything, gates
from twell_lab.course.roofline import data as roofline
from twell_lab.course.roofline import figures


def test_the_roofline_has_a_point_for_each_kernel_under_the_roof():
    gpu = roofline.datasheet()
    found = roofline.points(everything())
    figure = figures.roofline(found, gpu)
    points = [trace for trace in figure.data if trace.mode == "markers"]
    assert [trace.name for trace in points] == [figures.VERSIONS.get(p["name"], p["name"]) for p in found]
    assert WHERE in figure.layout.title.text
    assert {"version 1", "version 2", "version 3"} <= {note.text for note in figure.layout.annotations}
    roof = figure.data[0]
    assert roof.y[-1] == gpu["tensor_tflops"] and roof.y[0] == pytest.approx(0.3 * gpu["bandwidth_gb_s"] / 1e3)
    assert len({(trace.marker.symbol, trace.marker.color) for trace in points}) == len(points)
    sizes = [trace.marker.size for trace in points if trace.legendgroup == points[0].legendgroup]
    assert sizes == sorted(set(sizes), reverse=True)  # one within another where they lie on one spot


def test_the_versions_stand_beside_the_floor():
    figure = figures.versions(roofline.versions(gates()), 0.38)
    (bars,) = figure.data
    assert bars.x[0] == 0.9 and bars.text[-1] == "0.500 ms, 76% of the peak"
    assert set(bars.y) == set(figures.VERSIONS.values()) and figure.layout.shapes[0].x0 == 0.38
    assert "floor 0.380 ms" in figure.layout.annotations[0].text and WHERE in figure.layout.title.text
