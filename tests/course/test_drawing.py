"""What the figures share: colours without blending, rows by number, and figures that have nothing to show."""

import pytest

from twell_lab.core.errors import InputError
from twell_lab.course import drawing


def test_a_flat_scale_changes_its_colour_at_once():
    assert drawing.flat(["red", "blue"]) == [[0, "red"], [0.5, "red"], [0.5, "blue"], [1, "blue"]]
    assert drawing.flat(f"#00000{i}" for i in range(3))[-1] == [1, "#000002"]


@pytest.mark.parametrize("index", [-1, 3])
def test_a_row_that_is_not_there_is_refused_by_name(index):
    assert drawing.row_at("abc", 2) == "c"
    with pytest.raises(InputError, match=f"index is {index}; there are cuts 0 to 2"):
        drawing.row_at("abc", index, "cuts")


def test_an_empty_figure_says_so():
    figure = drawing.nothing("a title")
    assert figure.layout.annotations[0].text.startswith("nothing is recorded") and figure.layout.title.text == "a title"
