"""The room for kept values, without a browser: wherever the slider is, the tokens drawn as lost are those that were."""

from twell_lab.course.backward import data as backward
from twell_lab.course.backward import figures, widget

SWEEP = backward.capacity_sweep(backward.drawn(), 0.05, [0, 60, 140])


def test_the_figure_follows_the_room(draws):
    explorer = widget.capacity_explorer(SWEEP)
    for room in (140, 60, 0):
        explorer.slider.value = room
        row, figure = SWEEP[explorer.index], explorer.figure
        assert row["capacity"] == room and figure.layout.title.text.startswith(f"room for {room} values")
        assert [token for token, colour in enumerate(figure.data[0].marker.color) if colour != figures.KEPT] == row[
            "lost"
        ]
        assert list(figure.data[3].x) == [room] and figure.data[3].y[0] == row["stored_rows"] + row["lost_rows"]


def test_a_move_is_light(light):
    explorer = widget.capacity_explorer(SWEEP)
    light(explorer, [lambda: setattr(explorer.slider, "index", 1), lambda: setattr(explorer.slider, "index", 0)])
