"""The figures of notebook 11 show the numbers they were given, and say so where there are none."""

import math

import pytest

from tests.course.backward.test_measured import RATES, WHERE, compared, models, placed
from twell_lab.core import InputError
from twell_lab.course.backward import data as backward
from twell_lab.course.backward import figures, measured

CASE = backward.drawn()
FIRED = CASE.x @ CASE.gate.T > 0


def test_quantities_tell_the_useful_from_the_rest():
    figure = figures.quantities({"u": [[1.0, 2.0, 0.0]], "g": [[1.0, 0.0, 0.0]]}, [[True, False, False]])
    assert [list(map(list, trace.z)) for trace in figure.data[:2]] == [[[2, 1, 0]], [[2, 0, 0]]]
    with pytest.raises(InputError, match="1 to 6"):
        figures.quantities({}, [[True]])


@pytest.mark.parametrize("which", [{"token": 4}, {"neuron": 2}])
def test_a_product_shows_the_rows_that_are_read(which):
    figure = figures.product(FIRED.tolist(), 16, **which)
    uses = int((FIRED[4] if "token" in which else FIRED[:, 2]).sum())
    middle = figure.data[1].z
    assert sum(row[0] > 0 for row in middle) == uses and str(uses) in figure.layout.title.text


@pytest.mark.parametrize("which", [{}, {"token": 1, "neuron": 1}, {"token": 24}, {"neuron": -1}])
def test_one_row_of_one_product_is_picked(which):
    with pytest.raises(InputError, match="one of them, below 24 or 40"):
        figures.product(FIRED.tolist(), 16, **which)


def test_lists_show_the_same_pairs_both_ways():
    rows, columns = backward.by_row(FIRED[:6, :9]), backward.by_neuron(FIRED[:6, :9])
    figure = figures.lists(rows, columns, picked=(2,))
    shown = [[text for line in trace.text for text in line if text] for trace in figure.data]
    assert len(shown[0]) == len(shown[1]) == int(FIRED[:6, :9].sum())
    coloured = [sum(value == 2 for line in trace.z for value in line) for trace in figure.data]
    assert coloured[0] == coloured[1] == len(columns[2])
    with pytest.raises(InputError, match="transposed"):
        figures.lists(rows, rows)
    with pytest.raises(InputError, match="at most 5"):
        figures.lists(rows, columns, picked=tuple(range(6)))


def test_memory_stacks_every_tensor():
    sizes = {"dense": backward.dense_saved(16384, 2048, 5632), "sparse": backward.sparse_saved(16384, 2048, 5632)}
    figure = figures.memory(sizes, "a title")
    names, rows = set(sizes["dense"]) | set(sizes["sparse"]), {"spans", "kept", "lost"}
    assert {trace.name.split(":")[0] for trace in figure.data} == names - rows | {"lists of rows"}
    thin = figure.data[-1]  # what is too thin to be seen says its size
    assert thin.name.endswith(", 0.25 MiB") and thin.x[1] == sum(sizes["sparse"][name] for name in rows) / 2**20
    assert sum(trace.x[0] for trace in figure.data) == 592
    assert [note.text for note in figure.layout.annotations] == [" 592 MiB", " 103 MiB"]


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


def test_steps_compare_like_with_like():
    figure = figures.steps(measured.steps(placed(compared())))
    shown = {trace.name: list(trace.y) for trace in figure.data}
    assert shown == {
        "planned, beside eager torch": [2.0],
        "planned, compiled, beside compiled torch": [2.0],
        "sparse, beside eager torch": [2.0],
    }
    assert WHERE in figure.layout.title.text
    own = [each | {"where": "yours, now, on My GPU"} for each in compared()[:3]]
    mine = figures.steps([], measured.steps(own)).data
    assert [trace.name for trace in mine] == ["sparse, beside eager torch, yours, now, on My GPU"]
    assert mine[0].line.dash == "solid" and mine[0].line.color == figure.data[0].line.color
    assert not [note for note in figure.layout.annotations if "no training step" in note.text]
    assert "twell-lab x makes the record" in figures.steps([], [], "twell-lab x").layout.annotations[0].text


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


def test_whole_models_have_a_bar_for_each_way():
    figure = figures.models(measured.wholes(placed(models())))
    assert [list(bar.text) for bar in figure.data] == [["0.07", "0.07"], ["1.30", "0.98"]]
    assert figure.data[0].x[0] == "8 layers of 2,048 x 5,632, nnz 30<br>8 of 8 layers sparse"
    assert "no whole model is recorded" in figures.models([]).layout.annotations[0].text


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


def test_a_capacity_that_was_not_computed_is_refused():
    sweep = backward.capacity_sweep(CASE, 0.05, [0, 60])
    with pytest.raises(InputError, match="0 to 1"):
        figures.capacity(sweep, 2)
    figure = figures.capacity([row | {"error": 0.5} for row in sweep])
    assert "off by 5.0e-01" in figure.layout.title.text
