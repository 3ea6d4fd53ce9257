"""The figures of notebook 11 show the numbers they were given, and say so where there are none."""

import math

import pytest

from tests.course.backward.test_measured import RATES, WHERE, compared, placed
from twell_lab.core import InputError
from twell_lab.course.backward import data as backward
from twell_lab.course.backward import figures, measured

CASE = backward.drawn()
FIRED = CASE.x @ CASE.gate.T > 0


@pytest.mark.parametrize("which", [{"token": 4}, {"neuron": 2}])
def test_a_product_shows_the_rows_that_are_read(which):
    figure = figures.product(FIRED.tolist(), 16, **which)
    uses = int((FIRED[4] if "token" in which else FIRED[:, 2]).sum())
    middle = figure.data[1].z
    assert sum(row[0] > 0 for row in middle) == uses and str(uses) in figure.layout.title.text


def test_the_budget_stacks_parts_and_marks_what_is_recorded():
    floors = {nnz: backward.floors(backward.parts(nnz=float(nnz)), RATES) for nnz in ("8", "29")}
    figure = figures.budget(floors, RATES, measured.steps(placed(compared())))
    bars = [trace for trace in figure.data if trace.type == "bar"]
    assert sum(trace.y[1] for trace in bars) == pytest.approx(sum(part["ms"] for part in floors["29"]))
    place = bars[0].x[1]
    assert place == f"nnz 29: {sum(part['ms'] for part in floors['29']):.2f} ms"
    marks = {trace.name: (list(trace.x), list(trace.y)) for trace in figure.data if trace.type == "scatter"}
    assert marks == {
        "sparse, recorded": ([place], [3.0]),
        "dense, recorded": ([place], [6.0]),
        "dense compiled, recorded": ([place], [5.4]),
    }
    assert f"marks: {WHERE}<" in figure.layout.title.text
    assert not [trace for trace in figures.budget(floors, RATES).data if trace.type == "scatter"]


def test_the_paths_stand_beside_the_dense_lines():
    kinds = measured.series(placed(compared() + compared(29.2, "trained, L1 0.0001, layer 0")))
    figure = figures.paths(kinds)
    shown = {trace.name: (trace.mode, list(trace.y)) for trace in figure.data}
    assert shown == {
        "planned": ("markers", [3.0, 3.0]),
        "sparse: a few neurons fire often": ("lines+markers", [3.0]),
        "sparse: layers of a trained model": ("markers", [3.0]),
        "torch, dense eager": ("lines", [6.0, 6.0]),
        "torch, dense compiled": ("lines", [5.4, 5.4]),
    }
    assert f"{WHERE}<" in figure.layout.title.text
    assert "no training step is recorded" in figures.paths({}).layout.annotations[0].text


def test_a_layer_that_switches_changes_its_line():
    history = [
        {"step": step, "nnz": [9.0, nnz], "paths": ["dense", path], "bytes": 2**20}
        for step, nnz, path in ((10, 9.0, "dense"), (20, 3.0, "twell"), (30, 8.0, "dense"), (40, 2.0, "twell"))
    ]
    figure = figures.switching(history, 32, 6.0)
    lines = [trace for trace in figure.data if trace.mode == "lines" and trace.name == "layer 1"]
    assert [trace.line.dash for trace in lines] == ["dot", "solid", "dot", "solid"] and list(lines[1].x) == [20, 30]
    (marks,) = [trace for trace in figure.data if trace.mode == "markers"]
    assert list(marks.x) == [20, 30, 40]
    kept = [trace for trace in figure.data if trace.xaxis == "x2"]
    assert [trace.line.shape for trace in kept] == ["vh"]  # the first step after a change is the first of other bytes
    assert figure.layout.yaxis.title.text == "neurons firing for a token, of 32 (log scale)"
    assert [note.y for note in figure.layout.annotations if note.text == "break-even"] == [math.log10(6)]
    silent = figures.switching([row | {"nnz": [0.0, 1.0]} for row in history], 32, 6.0)
    assert "log" not in silent.layout.yaxis.title.text  # silence has no place on a log axis
    with pytest.raises(InputError, match="empty"):
        figures.switching([], 32, 6.0)
