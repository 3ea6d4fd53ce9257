"""The figures on packing show the numbers they were given, and can draw where there is little to show."""

import pytest
import torch

from twell_lab.course.packing import data as packing
from twell_lab.course.packing import figures


def gate(columns: int = 300) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(3, columns).to(torch.bfloat16)


def test_geometries_are_a_grid_with_the_best_one_framed():
    table = packing.geometries(gate(), [8, 64], [9, 33])
    figure = figures.geometries(table, overflow=0.0)
    cost, overflow = figure.data
    assert list(cost.x) == ["8", "64"] and list(cost.y) == ["9", "33"]
    assert cost.text[1][0] is None and cost.z[1][0] is None  # 33 words for a tile of 8 do not exist
    assert overflow.text[0][0] == "0%"
    best = packing.smallest(table, 0.0)
    x, y = [8, 64].index(best["tile"]), [9, 33].index(best["words"])
    whole = (x - 0.5, x + 0.5, y - 0.5, y + 0.5)
    assert [(frame.x0, frame.x1, frame.y0, frame.y1) for frame in figure.layout.shapes] == 2 * [whole]


@pytest.mark.parametrize(("columns", "tile", "words"), [(300, 256, 32), (1, 1, 2), (40, 64, 65), (600, 8, 2)])
def test_tile_view_draws_every_column_word_and_value(columns, tile, words):
    view = packing.view(gate(columns), row=1, tile=tile, words=words)
    figure = figures.tile_view(view)
    _, _, cells, stored, tail = figure.data
    assert sum(cell is not None for line in cells.z for cell in line) == view["width"]
    assert sum(cell is not None for line in stored.z for cell in line) == words
    texts = [text for line in stored.text for text in line if text]
    assert len(texts) == len(view["stored"])  # the count, and a text for each used word
    assert sum(bool(text) for line in tail.text for text in line) == min(64, len(view["tail"]))
    assert len(figure.layout.annotations) == 4
