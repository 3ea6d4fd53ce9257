"""The interactive tile: one row of real gate values, packed again at every move of a slider."""

from __future__ import annotations

from torch import Tensor

from ...errors import InputError
from ...formats import TILE, WORDS
from ..widgets import display, ipywidgets, live_figure
from . import data, figures

TILES = (32, 64, 128, 256, 512)


class TileExplorer(ipywidgets.VBox):
    """Sliders for row, tile, words and threshold, above the row that they draw (figures.tile_view).

    gate: [rows, d_ff], before the ReLU. Each slider is an attribute (`.tile`, `.words`, `.threshold`, `.row`,
    `.part`) that code can set; `.figure` is what is drawn, `.view` the plain data behind it. Where two
    sliders do not go together (more words than columns, a tile beyond the row's last), the other one is
    brought along.
    """

    def __init__(self, gate: Tensor, *, tile: int = TILE, words: int = WORDS, threshold: float = 0.0,
                 row: int = 0, part: int = 0) -> None:
        if not isinstance(gate, Tensor) or gate.dim() != 2 or 0 in gate.shape:
            shape = list(gate.shape) if isinstance(gate, Tensor) else type(gate).__name__
            raise InputError(f"gate is {shape}; a tensor [rows, d_ff], neither of them 0, is accepted")
        self.gate = gate.detach().cpu()
        self.view = data.view(self.gate, row, part, tile, words, threshold)  # checks them all
        finite = self.gate[self.gate.isfinite()].float()
        most = max(float(finite.max()) if finite.numel() else 0.0, threshold, 0.01)
        wide = {"style": {"description_width": "82px"}, "layout": {"width": "420px", "max_width": "100%"}}
        self.tile = ipywidgets.SelectionSlider(options=sorted({*TILES, tile}), value=tile, description="tile",
                                               **wide)
        self.words = ipywidgets.IntSlider(min=2, max=tile + 1, value=words, description="words", **wide)
        self.threshold = ipywidgets.FloatSlider(min=0.0, max=most, step=most / 100, value=threshold,
                                                description="threshold", readout_format=".3f", **wide)
        self.row = ipywidgets.IntSlider(min=0, max=len(gate) - 1, value=row, description="row", **wide)
        self.part = ipywidgets.IntSlider(min=0, max=len(self.view["counts"]) - 1, value=part,
                                         description="which tile", **wide)
        self._still = False
        self.figure = live_figure(figures.tile_view(self.view))
        self._canvas = None if isinstance(self.figure, ipywidgets.Widget) else ipywidgets.Output()
        super().__init__([self.row, self.part, self.tile, self.words, self.threshold,
                          self.figure if self._canvas is None else self._canvas])
        for slider in (self.tile, self.words, self.threshold, self.row, self.part):
            slider.observe(self._moved, names="value")
        self._show()

    def _moved(self, event) -> None:
        if self._still:  # a slider that is being brought along
            return
        self._still = True
        try:
            self.words.max = self.tile.value + 1
            self.part.max = -(-self.gate.shape[1] // self.tile.value) - 1
        finally:
            self._still = False
        self.view = data.view(self.gate, self.row.value, self.part.value, self.tile.value,
                              self.words.value, self.threshold.value)
        if self._canvas is None:
            with self.figure.batch_update():
                figures.move_tile_view(self.figure, self.view)
        else:
            figures.move_tile_view(self.figure, self.view)
            self._show()

    def _show(self) -> None:
        if self._canvas is not None:
            with self._canvas:
                self._canvas.clear_output(wait=True)
                display(self.figure)
