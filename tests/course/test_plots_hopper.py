"""The figures of notebook 05 show the numbers they were given, and say so where there are none."""

import pytest

from tests.course.test_hopper import RATES, WHERE, compared, everything
from twell_lab import plots
from twell_lab.course import hopper, plots_hopper, plots_hopper_work
from twell_lab.course import hopper_work as work
from twell_lab.errors import InputError


def test_speedups_are_named_by_where_they_are_from():
    own = [cell | {"where": "yours, now, on My GPU"} for cell in hopper.cells(compared(8, twell=1.0))]
    figure = plots_hopper.speedups(hopper.cells(everything()), own, 16384)
    names = [trace.name for trace in figure.data]
    assert names[0] == f"planned, {WHERE}" and names[-1] == "TwELL, forced, yours, now, on My GPU"
    assert list(figure.data[0].x) == [8, 29.1, 120] and figure.data[0].y[0] == 2.0
    assert [trace.line.dash for trace in figure.data[:3]] == ["dot"] * 3


def test_the_roofline_has_a_point_for_each_kernel_under_both_roofs():
    gpu = work.datasheet()
    found = work.points(everything(), {"gated_v3": {"ms": 0.5, "where": WHERE}})
    figure = plots_hopper.roofline(found, gpu, RATES)
    points = [trace for trace in figure.data if trace.mode == "markers"]
    assert [trace.name for trace in points] == [p["name"] for p in found]
    roof = figure.data[0]
    assert roof.y[-1] == gpu["tensor_tflops"] and roof.y[0] == pytest.approx(0.3 * gpu["bandwidth_gb_s"] / 1e3)
    assert len({(trace.marker.symbol, trace.marker.color) for trace in points}) == len(points)


def test_the_map_holds_every_cell():
    cells = hopper.cells(everything())
    figure = plots_hopper.loss_map(cells)
    shown = [text for panel in figure.data for line in panel.text for text in line if text]
    assert sorted(shown) == sorted(f"{cell['x']:.2f}" for cell in cells)
    assert [note.text for note in figure.layout.annotations] == ["1", "4", "16", "64", "16,384", "tokens"]
    assert list(figure.layout.xaxis.ticktext) == ["28", "27", "27", "27", "8", "29", "120"] and len(figure.layout.xaxis.tickvals) == 7
    assert WHERE in figure.layout.title.text


def test_drawn_workloads_that_nearly_meet_share_a_column():
    assert plots_hopper._columns([{"nnz": 30.1}, {"nnz": 29.0}, {"nnz": 8.0}]) == [(8.0, 8.0), (29.0, 30.1)]


def test_predictions_trained_layers_and_decode():
    rows = everything()
    figure = plots_hopper.predicted_against_measured(hopper.plan_points(rows))
    assert {trace.name for trace in figure.data if trace.name} == {"twell, chosen", "hot_cold"}
    assert sum(len(trace.x) for trace in figure.data if trace.name) == len(hopper.plan_points(rows))
    figure = plots_hopper.trained_layers(hopper.trained(rows))
    assert [trace.name for trace in figure.data] == ["planned", "TwELL, forced", "hot/cold, forced", "dense, forced"]
    assert list(figure.data[0].y) == [2.0, 2.0]
    figure = plots_hopper.decode(hopper.decode(rows, RATES), WHERE)
    assert list(figure.data[0].y) == pytest.approx([20] * 4) and list(figure.data[2].y) == pytest.approx([10] * 4)


@pytest.mark.parametrize("figure", [
    lambda: plots_hopper.speedups([], [], 16384), lambda: plots_hopper.roofline([], work.datasheet()), lambda: plots_hopper.loss_map([]),
    lambda: plots_hopper.predicted_against_measured([]), lambda: plots_hopper.trained_layers([]), lambda: plots_hopper.decode([], ""),
])  # fmt: skip
def test_a_figure_without_a_record_says_so(figure):
    assert "nothing is recorded" in figure().layout.annotations[0].text


def test_lanes():
    figure = plots_hopper_work.lanes({"before": [n % 8 // 2 for n in range(256)], "after": [n // 64 for n in range(256)]})
    assert list(figure.data[0].z[0][:4]) == [0, 0, 1, 1] and [line[0] for line in figure.data[1].z] == [0, 1, 2, 3]
    for wrong in ([0] * 255, [4] * 256):
        with pytest.raises(InputError):
            plots_hopper_work.lanes({"wrong": wrong})


def test_the_pool_shows_who_lies_where():
    figure = plots_hopper_work.pool_segment(work.pool_table([40, 10, 33, 90]))
    owners = [line for line in figure.data[2].customdata[0]]
    assert owners[:9] == ["row 0"] * 9 and owners[9:11] == ["row 2"] * 2 and owners[11] == "row 3, lost: never read"
    assert list(figure.data[0].y) == [31, 10, 31, 31] and list(figure.data[1].text) == ["", "", "", "lost"]
    assert plots_hopper_work.pool_segment(work.pool_table([3, 4])).data[2].z[0].count(None) == 64


def test_frequencies_splits_and_turns():
    figure = plots_hopper_work.frequencies({"some": [0.5, 0.0, 0.01]}, 0.01)
    assert list(figure.data[0].x) == [1, 2] and list(figure.data[0].y) == [50.0, 1.0] and figure.layout.shapes[0].y0 == 1.0
    rows = [{"hot": 0, "ms": 2.0, "cold_nnz": 5.0}, {"hot": 256, "ms": 1.0, "cold_nnz": 1.0}]
    figure = plots_hopper_work.splits({"some": rows})
    assert list(figure.data[1].x) == [256] and figure.data[0].line.color == plots.COLOURS[0]
    figure = plots_hopper_work.filled({"d_ff 5,632": [(256, 1 / 3), (512, 2 / 3)]})
    assert list(figure.data[0].y) == pytest.approx([100 / 3, 200 / 3])
