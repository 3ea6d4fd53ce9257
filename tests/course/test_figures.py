"""The figures of the course: their traces hold the numbers that they were given, and they say where there are none."""

import pytest

from tests.course.backward import test_backward as steps
from tests.course.recorded_rows import everything, gates
from tests.course.sparsity_map.test_sparsity_map import ROWS as PRODUCTS
from twell_lab.course import measure, packing, sweep
from twell_lab.course.backward import data as backward
from twell_lab.course.backward import figures as backward_figures
from twell_lab.course.clocks import figures as clock_figures
from twell_lab.course.conversion import figures as conversion_figures
from twell_lab.course.conversion.data import HERE
from twell_lab.course.hopper import data as hopper
from twell_lab.course.hopper import figures as hopper_figures
from twell_lab.course.sparsity_map import figures as sparsity_figures
from twell_lab.course.speedups import figures as speedup_figures


def point(way, model, density, change, where=HERE):
    interval = (change - 1, change + 1) if where == HERE else (None, None)
    made = {"way": way, "model": model, "what": "w", "density": density, "change": change, "where": where}
    return made | dict(zip(("low", "high"), interval))


CUTS = [point("cut", "a", 0.1, 1.0), point("cut", "a", 0.01, 20.0), point("convert", "b", 0.2, 2.0)]
DENSITIES = [
    {"density": density, "path": path, "x_dense": 2.0, "dense_ms": 2.0, "where": "yours, now"}
    for path in ("dense", "CSR")
    for density in (0.1, 0.01)
]


# name -> (the figure, {name of a trace: its y, or its x where that says more})
SHOWN = {
    "training steps": (
        lambda: backward_figures.steps(backward.layers(steps.compared())),
        {"sparse, beside eager torch": [2.0], "planned, compiled, beside compiled torch": [2.0]},
    ),
    "claims": (
        lambda: clock_figures.ladder({"claimed": 2000.0, "waits": 30.0, "fair": 0.25}),
        {None: [2000, 30, 0.25]},
    ),
    "cuts": (
        lambda: conversion_figures.picture([*CUTS, point("train", "a", 0.02, 0.5, "recorded on G, 2026-01-01")]),
        {"cut: a": [20.0, 1.0], "convert: b": [2.0], "train with L1: twin of a, recorded": [0.5]},
    ),
    "parts": (
        lambda: hopper_figures.parts(hopper.parts(everything())),
        {"torch's dense layer": [2.0, 2.0, 2.0], "planned, and what sparsity adds": [1.0, 1.2, 1.8]},
    ),
    "against nnz": (lambda: hopper_figures.against_nnz(everything()), {"TwELL": [1.0, 1.2, 3.0]}),
    "bars": (
        lambda: measure.figures.bars({"dense": [4.0, 4.0, 4.4], "sparse": [1.0, 2.0, 9.0]}, "", base="dense"),
        {"medians": [4.0, 2.0]},
    ),
    "against density": (lambda: measure.figures.against_density(DENSITIES, ""), {"CSR, yours, now": [2.0, 2.0]}),
    "versions": (
        lambda: hopper_figures.versions(hopper.versions(gates()), 0.38),
        {None: [0.9, 0.62, 0.58, 0.56, 0.52, 0.5]},
    ),
    "products": (lambda: sparsity_figures.beside_dense(PRODUCTS), {"CSR": [2.0, 4.0], "ELL": [0.5]}),
}


@pytest.mark.parametrize("name", SHOWN)
def test_traces_hold_the_numbers_given(name):
    draw, wanted = SHOWN[name]
    figure = draw()
    for trace, values in wanted.items():
        drawn = [list(each[axis] or ()) for each in figure.data if each.name == trace for axis in "yx"]
        assert values in drawn, (trace, drawn)
    assert figure.layout.title.text is not None


NOTHING = {
    "steps": lambda: backward_figures.steps([]),
    "parts": lambda: hopper_figures.parts([]),
    "against nnz": lambda: hopper_figures.against_nnz([]),
    "cells": lambda: hopper_figures.loss_map([]),
    "roofline": lambda: hopper_figures.roofline([], hopper.datasheet()),
    "versions": lambda: hopper_figures.versions([], 0.4),
    "zeros": lambda: sparsity_figures.by_zeros([]),
    "trained on": lambda: sparsity_figures.after_training([]),
    "beside layers": lambda: speedup_figures.beside_layers([]),
    "law": lambda: speedup_figures.law([]),
    "pieces": lambda: speedup_figures.pieces([]),
}


@pytest.mark.parametrize("name", NOTHING)
def test_a_figure_without_rows_says_so(name):
    assert " is recorded" in " ".join(note.text for note in NOTHING[name]().layout.annotations)


def test_the_recorded_sweep_is_drawn_with_every_run_once():
    rows = sweep.recorded().rows
    figure = sweep.loss_against_nnz(rows, "recorded somewhere")
    drawn = sorted((x, y) for trace in figure.data for x, y in zip(trace.x, trace.y, strict=True))
    assert drawn == sorted((row["mean_nnz"], row["validation_bits_per_byte"]) for row in rows)
    assert "recorded somewhere" in figure.layout.title.text


def test_the_smallest_geometry_is_framed():
    table = [{"tile": tile, "words": words, "bytes": 9.0, "overflow": 0.1} for tile in (8, 64) for words in (9, 33)]
    framed = {
        (frame.x0, frame.x1, frame.y0, frame.y1) for frame in packing.figures.geometries(table, table[2]).layout.shapes
    }
    assert framed == {(0.5, 1.5, -0.5, 0.5)}


def test_the_map_holds_every_cell():
    cells = hopper.cells(everything())
    figure = hopper_figures.loss_map(cells)
    shown = [text for panel in figure.data for line in panel.text for text in line if text]
    assert sorted(shown) == sorted(f"{cell['x']:.2f}" for cell in cells)


def test_the_roofline_has_a_point_for_each_kernel_under_the_roof():
    gpu, found = hopper.datasheet(), hopper.points(everything())
    figure = hopper_figures.roofline(found, gpu)
    points = [trace for trace in figure.data if trace.mode == "markers"]
    assert [trace.name for trace in points] == [hopper_figures.VERSIONS.get(p["name"], p["name"]) for p in found]
    roof = figure.data[0]
    assert roof.y[-1] == gpu["tensor_tflops"] and roof.y[0] == pytest.approx(0.3 * gpu["bandwidth_gb_s"] / 1e3)
