"""The room for kept values, without a browser: wherever the slider is, the tokens drawn as lost are those that were."""

import pytest

from twell_lab.course import backward, plots_backward, widgets, widgets_backward

SWEEP = backward.capacity_sweep(backward.drawn(), 0.05, [0, 60, 140])


@pytest.fixture(params=["in place", "drawn anew"])
def draws(request, monkeypatch):
    """Both ways of drawing; the explorer made afterwards takes this one."""
    if request.param == "drawn anew":
        monkeypatch.setattr(widgets, "on_colab", lambda: True)
    else:
        pytest.importorskip("anywidget")


def test_the_figure_follows_the_room(draws):
    explorer = widgets_backward.capacity_explorer(SWEEP)
    for room in (140, 60, 0):
        explorer.slider.value = room
        row, figure = SWEEP[explorer.index], explorer.figure
        assert row["capacity"] == room and figure.layout.title.text.startswith(f"room for {room} values")
        assert [token for token, colour in enumerate(figure.data[0].marker.color) if colour != plots_backward.KEPT] == row["lost"]
        assert list(figure.data[3].x) == [room] and figure.data[3].y[0] == row["stored_rows"] + row["lost_rows"]
