"""The figures on L1 training show the runs they were given, as objects and as plain data."""

import pytest

from twell_lab import plots
from twell_lab.core import InputError
from twell_lab.course.training import figures


def run(share: float, bits: float, layers: int = 2) -> dict:
    return {
        "config": {"d_ff": 100},
        "mean_nnz": 100 * share,
        "validation_bits_per_byte": bits,
        "density": [share] * layers,
        "history": [{"step": 1, "nnz": 50.0}, {"step": 9, "nnz": 100 * share}],
    }


RUNS = {"no L1": run(0.5, 3.0), "seed": run(0.5, 3.1), "L1": run(0.02, 2.9)}


def test_the_band_is_as_wide_as_what_the_seed_does():
    figure = figures.density_against_loss(RUNS, again="seed")
    assert list(figure.data[0].x) == [50, 50, 2] and list(figure.data[0].y) == [3.0, 3.1, 2.9]
    band = figure.layout.shapes[0]
    assert (band.y0, band.y1) == (pytest.approx(2.9), pytest.approx(3.1))
    assert list(figure.data[0].marker.color) == [plots.GREY, plots.GREY, plots.BLUE]
    assert not figures.density_against_loss(RUNS).layout.shapes


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(InputError, match="0 to 2"):
        figures.picked_run(RUNS, index=3)
    for draw in (figures.density_against_loss, figures.picked_run):
        with pytest.raises(InputError, match="nothing to draw"):
            draw({})
