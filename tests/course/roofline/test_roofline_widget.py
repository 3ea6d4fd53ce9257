"""The cut between hot and cold, without a browser: wherever the slider is, the parts drawn are those computed."""

import pytest
import torch

from twell_lab.core.errors import InputError
from twell_lab.course.roofline import data as roofline
from twell_lab.course.roofline import figures, widget

RATES = roofline.Rates(tensor=800e12, memory=3e12, l2=8e12, source="a test")
SHARES = torch.logspace(0, -4, 1500, dtype=torch.float64)
ROWS = roofline.split(SHARES, [0, 256, 512, 1500], RATES)


def test_the_figure_follows_the_cut(draws):
    explorer = widget.cut_explorer(SHARES.tolist(), ROWS)
    for hot in (512, 0, 1500, 256):
        explorer.slider.value = hot
        row, (warm, cold, *parts) = ROWS[explorer.index], explorer.figure.data
        assert row["hot"] == hot and explorer.figure.layout.title.text.startswith(f"{hot:,} hot")
        assert [trace.x[2] for trace in parts] == [row[key] for key in figures.PARTS]
        assert [trace.x[0] for trace in parts] == [ROWS[-1][key] for key in figures.PARTS]
        assert (warm.x[-1] <= hot if hot else not warm.x) and (cold.x[0] == hot + 1 if hot < 1500 else not cold.x)


def test_a_cut_that_was_not_computed_is_refused():
    with pytest.raises(InputError, match="0 to 3"):
        figures.cut(SHARES.tolist(), ROWS, 4)
