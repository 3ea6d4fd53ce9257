"""The interactive tile: one row of real gate values, packed again at every move of a slider."""

from __future__ import annotations

from torch import Tensor

from ...formats.twell import TILE, WORDS, TwELL
from ..widgets import Drawn, ipywidgets
from . import figures

TILES = (32, 64, 128, 256, 512)


class TileExplorer(Drawn):
    """Sliders for row, tile and words, above the row that they draw (figures.tile_view).

    gate: [rows, d_ff], before the ReLU. Each slider is an attribute (`.row`, `.part`, `.tile`, `.words`). A value that
    does not fit another slider's (more words than columns, a tile beyond the row's last) moves that one too."""

    def __init__(self, gate: Tensor, *, tile: int = TILE, words: int = WORDS, row: int = 0, part: int = 0) -> None:
        self.gate = gate.detach().cpu()
        wide = {"style": {"description_width": "82px"}, "layout": {"width": "420px", "max_width": "100%"}}
        last = -(-gate.shape[1] // tile) - 1
        self.row = ipywidgets.IntSlider(min=0, max=len(gate) - 1, value=row, description="row", **wide)
        self.part = ipywidgets.IntSlider(min=0, max=last, value=part, description="which tile", **wide)
        self.tile = ipywidgets.SelectionSlider(options=sorted({*TILES, tile}), value=tile, description="tile", **wide)
        self.words = ipywidgets.IntSlider(min=2, max=tile + 1, value=words, description="words", **wide)
        self._still = False
        sliders = [self.row, self.part, self.tile, self.words]
        super().__init__(sliders, figures.tile_view(*self._packed()))
        for slider in sliders:
            slider.observe(self._moved, names="value")
        self.redraw(lambda: None)

    def _packed(self) -> tuple[TwELL, int, int]:
        row = self.row.value
        return TwELL.from_gate(self.gate[row : row + 1], self.tile.value, self.words.value), row, self.part.value

    def _moved(self, event) -> None:
        if self._still:  # this handler itself moves another slider
            return
        self._still = True
        try:
            self.words.max = self.tile.value + 1
            self.part.max = -(-self.gate.shape[1] // self.tile.value) - 1
        finally:
            self._still = False
        self.redraw(lambda: figures.move_tile_view(self.figure, *self._packed()))
