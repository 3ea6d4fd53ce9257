"""The figures of the recorded sweep: what is drawn is what the rows hold."""

import pytest

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


@pytest.mark.parametrize("draw", [figures.picked, figures.where_it_fires])
@pytest.mark.parametrize("index", [-1, 99])
def test_a_run_that_is_not_there_is_refused(rows, draw, index):
    with pytest.raises(InputError, match="there are runs 0 to"):
        draw(rows, index)
