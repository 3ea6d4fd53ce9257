"""The widget of weight thresholds: drag one, and see what is left of a weight and what each format makes of it."""

from __future__ import annotations

from ..widgets import Drawn, ipywidgets
from . import data, figures


class WeightExplorer(Drawn):
    """A slider over the magnitude below which weights go, above the figure of what is left (figures.picture).

    weighed: what `data.weigh` returned. `.slider` can be set by code and moved with the arrow keys; nothing is timed
    while it moves. `.view` is the data behind `.figure`."""

    def __init__(self, weighed: data.Weighed, sparsity: float = 0.5) -> None:
        self.weighed = weighed
        most = float(weighed.weight.abs().max())
        self.slider = ipywidgets.FloatSlider(
            min=0.0,
            max=most,
            step=most / 500,
            value=data.threshold_for(weighed.weight, sparsity),
            description="weights below",
            readout_format=".4f",
            continuous_update=True,
            style={"description_width": "initial"},
            layout={"width": "560px", "max_width": "100%"},
        )
        self.view = data.view(weighed, self.slider.value)
        super().__init__([self.slider], figures.picture(self.view))
        self.slider.observe(lambda _: self._draw(), names="value")
        self._draw()

    def _draw(self) -> None:
        self.view = data.view(self.weighed, self.slider.value)
        self.redraw(lambda: figures.move(self.figure, self.view))
