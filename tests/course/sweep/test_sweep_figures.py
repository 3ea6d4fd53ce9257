"""The figures of the recorded sweep: what is drawn is what the rows hold."""

import pytest

from twell_lab import plots
from twell_lab.core import InputError
from twell_lab.course.sweep import data as course
from twell_lab.course.sweep import figures
from twell_lab.training import sweep


@pytest.fixture(scope="module")
def rows():
    return course.recorded().rows


def test_loss_against_nnz_has_every_run_once(rows):
    figure = figures.loss_against_nnz(rows, "recorded somewhere")
    drawn = sorted((x, y) for trace in figure.data for x, y in zip(trace.x, trace.y, strict=True))
    assert drawn == sorted((row["mean_nnz"], row["validation_bits_per_byte"]) for row in rows)
    assert list(figure.data[0].text[:1]) == ["no L1"] and "1.5e-4" in figure.data[0].text
    assert [float(text) for text in figure.data[0].text[1:]] == pytest.approx(
        [row["config"]["l1"] for row in sweep.pressed(rows)[1:]]
    )
    assert "recorded somewhere" in figure.layout.title.text
    named = [text for trace in figure.data if trace.name == "another seed" for text in trace.text if text]
    assert named == [f"no L1, {row['label']}" for row in rows if row["label"].startswith("seed ")]
    assert "the twin, without L1" in [note.text for note in figure.layout.annotations]
    wanted = next(shape for shape in figure.layout.shapes if shape.type == "rect")
    twin = sweep.twin(rows)
    assert wanted.x1 == pytest.approx(0.03 * 2048) and wanted.y1 == pytest.approx(
        1.02 * twin["validation_bits_per_byte"]
    )
    best = sweep.best_sparse(sweep.pressed(rows))
    assert wanted.x0 < best["mean_nnz"] < wanted.x1 and best["validation_bits_per_byte"] < wanted.y1


def test_the_picked_run_stands_out_and_its_layers_are_drawn(rows):
    runs = sweep.pressed(rows)
    figure = figures.picked(rows, 4, "recorded somewhere")
    assert list(figure.data[0].marker.color).index(plots.BLUE) == 4 and list(figure.data[0].marker.size).count(14) == 1
    assert [trace.line.color == plots.BLUE for trace in figure.data[1:-1]] == [
        number == 4 for number in range(len(runs))
    ]
    assert list(figure.data[-1].y) == [layer["nnz"] for layer in runs[4]["layers"]]
    assert (
        figure.layout.title.text.startswith(f"{figures.short(runs[4])}: ")
        and "% against the twin<br>" in figure.layout.title.text
        and "recorded somewhere" in figure.layout.title.text
    )


def test_over_time_has_the_validations_and_every_logged_step(rows):
    figure, runs = figures.over_time(rows, ""), sweep.pressed(rows)
    assert len(figure.data) == 2 * len(runs)
    for row, loss, nnz in zip(runs, figure.data[::2], figure.data[1::2], strict=True):
        assert list(loss.y) == [bits for bits in row["history"]["val_bits_per_byte"] if bits is not None]
        assert list(nnz.y) == row["history"]["nnz"]
    assert len({trace.line.color for trace in figure.data}) == len(runs)


def test_where_it_fires_is_by_position_from_one_and_by_byte(rows):
    row = sweep.pressed(rows)[3]
    figure = figures.where_it_fires(rows, 3, "")
    assert figure.data[0].x[0] == 1 and list(figure.data[1].y) == row["positions"]["nnz"][1]
    assert list(figure.data[-1].y) == [name for name, _ in course.extremes(row)]
    assert list(figure.data[-1].x) == sorted(figure.data[-1].x)


def test_dead_neurons_with_and_without(rows):
    figure = figures.dead_by_layer(rows, "")
    (before, after) = course.renewed(rows)[0]
    assert list(figure.data[0].y) == [100 * layer["dead"] / 2048 for layer in before["layers"]]
    assert list(figure.data[1].y) == [100 * layer["dead"] / 2048 for layer in after["layers"]]
    with pytest.raises(InputError, match="re-initialisation"):
        figures.dead_by_layer(sweep.pressed(rows), "")


@pytest.mark.parametrize("draw", [figures.picked, figures.where_it_fires])
@pytest.mark.parametrize("index", [-1, 99])
def test_a_run_that_is_not_there_is_refused(rows, draw, index):
    with pytest.raises(InputError, match="there are runs 0 to"):
        draw(rows, index)


def test_a_sentence_is_drawn_byte_by_byte():
    figure = figures.sentence([("a", 3.0), (" ", 1.0)], "a model")
    assert list(figure.data[0].y) == [3.0, 1.0] and list(figure.layout.xaxis.ticktext) == ["a", "\u00b7"]
