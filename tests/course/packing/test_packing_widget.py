"""The interactive tile, without a browser: whatever the sliders say, what is drawn is what packing gives."""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twell_lab.core import InputError
from twell_lab.course.packing.widget import TILES, TileExplorer
from twell_lab.formats import TwELL


def gate(rows: int = 6, columns: int = 300, dtype=torch.bfloat16) -> torch.Tensor:
    torch.manual_seed(0)
    return (torch.randn(rows, columns) - torch.linspace(-1.5, 1.5, rows)[:, None]).to(dtype)


def drawn_as_packed(explorer: TileExplorer) -> None:
    """Every trace of the figure against a packing of the same row."""
    line = explorer.gate[explorer.row.value][None]
    kept = torch.where(~(line <= explorer.threshold.value), line, 0)
    packed = TwELL.from_dense(kept, explorer.tile.value, explorer.words.value)
    in_words, in_tail, columns, words, tail = explorer.figure.data
    counts = packed.counts[0].tolist()
    assert list(in_words.y) == [min(count, packed.slots) for count in counts]
    assert list(in_tail.y) == [max(0, count - packed.slots) for count in counts]

    def drawn(trace):
        return sum(cell is not None for row in trace.z for cell in row)

    part = explorer.part.value
    width = min(explorer.tile.value, line.shape[1] - part * explorer.tile.value)
    assert drawn(columns) == width and drawn(words) == explorer.words.value
    assert drawn(tail) == min(64, max(0, counts[part] - packed.slots))
    assert words.text[0][0] == f"<b>{counts[part]}</b>"
    assert explorer.figure.layout.title.text.startswith(f"Row {explorer.row.value}: {packed.nnz} kept")


def test_the_figure_follows_every_slider(draws):
    explorer = TileExplorer(gate())
    assert (explorer._canvas is None) == (draws == "in place")
    drawn_as_packed(explorer)
    for slider, values in (
        ("row", (3, 5, 1)),
        ("part", (1, 0)),
        ("words", (2, 9, 200)),
        ("tile", (64, 256, 32)),
        ("threshold", (0.5, explorer.threshold.max, 0.0)),
    ):
        for value in values:
            getattr(explorer, slider).value = value
            drawn_as_packed(explorer)


def test_sliders_that_do_not_go_together_are_brought_along(draws):
    explorer = TileExplorer(gate(), tile=32, words=8, part=9)
    assert explorer.part.max == 9 and explorer.words.max == 33
    explorer.words.value = 33
    explorer.tile.value = 512  # one tile is left
    assert (explorer.part.value, explorer.part.max, explorer.words.max) == (0, 0, 513)
    explorer.words.value = 300
    explorer.tile.value = 64
    assert explorer.words.value == 65
    drawn_as_packed(explorer)


@settings(max_examples=25)
@given(st.data())
def test_any_sequence_of_moves_is_drawn_as_packed(data):
    explorer = _shared()
    for slider, value in (("tile", 256), ("words", 32), ("row", 0), ("part", 0), ("threshold", 0.0)):
        getattr(explorer, slider).value = value
    for _ in range(data.draw(st.integers(1, 4))):
        slider = data.draw(st.sampled_from(("row", "part", "tile", "words", "threshold")))
        widget = getattr(explorer, slider)
        if slider == "tile":
            widget.value = data.draw(st.sampled_from(TILES))
        elif slider == "threshold":
            widget.value = data.draw(st.floats(0, widget.max))
        else:
            widget.value = data.draw(st.integers(widget.min, min(widget.max, 60)))
        drawn_as_packed(explorer)


@cache
def _shared() -> TileExplorer:
    return TileExplorer(gate(4, 200))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(dtype):
    explorer = TileExplorer(gate(dtype=dtype), words=5)
    explorer.row.value = 2
    drawn_as_packed(explorer)


def test_a_gate_with_nothing_finite_and_nothing_positive():
    explorer = TileExplorer(torch.full((2, 40), torch.nan, dtype=torch.bfloat16), tile=32, words=4)
    assert list(explorer.figure.data[0].y) == [3, 3] and list(explorer.figure.data[1].y) == [29, 5]
    explorer = TileExplorer(torch.full((1, 40), -1.0, dtype=torch.bfloat16))
    assert sum(explorer.figure.data[0].y) == 0 and explorer.threshold.max > 0


def test_a_gate_that_is_being_trained_is_drawn_and_left_alone():
    trained = gate().requires_grad_()
    explorer = TileExplorer(trained)
    assert not explorer.gate.requires_grad and trained.grad is None


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"gate": torch.zeros(3)}, r"\[3\]"),
        ({"gate": torch.zeros(0, 4)}, r"\[0, 4\]"),
        ({"gate": [[1.0]]}, "list"),
        ({"row": 6}, "row is 6"),
        ({"part": 2}, "part is 2"),
        ({"words": 1}, "words is 1"),
        ({"tile": 0}, "tile is 0"),
        ({"threshold": -1.0}, "threshold is -1"),
        ({"gate": torch.zeros(2, 4, dtype=torch.int32)}, "int32"),
    ],
)
def test_what_cannot_be_drawn_is_refused(wrong, named):
    with pytest.raises(InputError, match=named):
        TileExplorer(**({"gate": gate()} | wrong))


def test_a_move_is_light(light):
    """Also where the tile's size changes, and with it that of the figure."""
    explorer = TileExplorer(gate())
    sliders = [
        (explorer.words, 20),
        (explorer.tile, 64),
        (explorer.threshold, 0.5),
        (explorer.row, 2),
        (explorer.part, 1),
    ]
    light(explorer, [lambda slider=slider, at=at: setattr(slider, "value", at) for slider, at in sliders])
