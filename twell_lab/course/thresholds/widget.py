"""The widget of thresholds: drag a sparsity, and see what it saves and costs; measure the loss where you are."""

from __future__ import annotations

from ...core.errors import InputError
from ..widgets import Drawn, ipywidgets
from . import data, figures


class ThresholdExplorer(Drawn):
    """A slider over the sparsity above the figure of it (figures.picture), and a button that measures the loss here.

    counted: what `data.count` returned. Moving `.slider` runs no model. `.button` does: it adds a point to the loss,
    as does `measure()`. `.view` is the data behind `.figure`."""

    def __init__(self, counted: data.Counted, sparsity: float = 0.5) -> None:
        if not isinstance(counted, data.Counted):
            raise InputError(
                f"counted is a {type(counted).__name__}; what twell_lab.course.thresholds.count returned is"
            )
        self.counted, self.view = counted, data.view(counted, sparsity)
        self.slider = ipywidgets.FloatSlider(
            min=0.0,
            max=data.MOST,
            step=0.01,
            value=sparsity,
            description="sparsity",
            readout_format=".0%",
            continuous_update=True,
            layout={"width": "560px", "max_width": "100%"},
        )
        self.button = ipywidgets.Button(description="measure the loss here", layout={"width": "200px"})
        super().__init__([ipywidgets.HBox([self.slider, self.button])], figures.picture(self.view))
        self.slider.observe(lambda _: self._draw(), names="value")
        self.button.on_click(lambda _: self.measure())
        self.redraw(lambda: None)

    def measure(self) -> None:
        """Measure the loss at the slider's sparsity, and draw it."""
        self.button.disabled, said = True, self.button.description
        self.button.description = "measuring ..."
        try:
            data.measure(self.counted, round(self.slider.value, 4))
        finally:
            self.button.disabled, self.button.description = False, said
        self._draw()

    def _draw(self) -> None:
        self.view = data.view(self.counted, round(self.slider.value, 4))  # steps of 0.01 add up to other floats
        self.redraw(lambda: figures.move(self.figure, self.view))
