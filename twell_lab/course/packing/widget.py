"""The interactive tile: one row of real gate values, packed again at every move of a slider."""

from __future__ import annotations

from torch import Tensor

from ...formats.twell import TILE, WORDS
from ..widgets import Drawn, ipywidgets
from . import data, figures

TILES = (32, 64, 128, 256, 512)


class TileExplorer(Drawn):
    """Sliders for row, tile, words and threshold, above the row that they draw (figures.tile_view).

    gate: [rows, d_ff], before the ReLU. Each slider is an attribute (`.tile`, `.words`, `.threshold`, `.row`, `.part`)
    that code can set; `.figure` is what is drawn, `.view` the data behind it. If a new value does not fit another
    slider's (more words than columns, a tile beyond the row's last), that slider moves too.
    """

    def __init__(
        self, gate: Tensor, *, tile: int = TILE, words: int = WORDS, threshold: float = 0.0, row: int = 0, part: int = 0
    ) -> None:
        self.gate = gate.detach().cpu()
        self.view = data.view(self.gate, row, part, tile, words, threshold)
        finite = self.gate[self.gate.isfinite()].float()
        most = max(float(finite.max()) if finite.numel() else 0.0, threshold, 0.01)
        wide = {"style": {"description_width": "82px"}, "layout": {"width": "420px", "max_width": "100%"}}
        self.tile = ipywidgets.SelectionSlider(options=sorted({*TILES, tile}), value=tile, description="tile", **wide)
        self.words = ipywidgets.IntSlider(min=2, max=tile + 1, value=words, description="words", **wide)
        self.threshold = ipywidgets.FloatSlider(
            min=0.0, max=most, step=most / 100, value=threshold, description="threshold", readout_format=".3f", **wide
        )
        self.row = ipywidgets.IntSlider(min=0, max=len(gate) - 1, value=row, description="row", **wide)
        self.part = ipywidgets.IntSlider(
            min=0, max=len(self.view["counts"]) - 1, value=part, description="which tile", **wide
        )
        self._still = False
        sliders = [self.row, self.part, self.tile, self.words, self.threshold]
        super().__init__(sliders, figures.tile_view(self.view))
        for slider in sliders:
            slider.observe(self._moved, names="value")
        self.redraw(lambda: None)

    def _moved(self, event) -> None:
        if self._still:  # this handler itself moves another slider
            return
        self._still = True
        try:
            self.words.max = self.tile.value + 1
            self.part.max = -(-self.gate.shape[1] // self.tile.value) - 1
        finally:
            self._still = False
        self.view = data.view(
            self.gate, self.row.value, self.part.value, self.tile.value, self.words.value, self.threshold.value
        )
        self.redraw(lambda: figures.move_tile_view(self.figure, self.view))
