"""The widget of thresholds: drag a sparsity, and see what it saves and costs; measure where you are."""

from __future__ import annotations

from ..widgets import Drawn, ipywidgets
from . import data, figures


class ThresholdExplorer(Drawn):
    """A slider over the sparsity above the figure of it (figures.picture), and a button that measures here.

    counted: what `data.count` returned. Moving `.slider` runs no model. `.button` does, as does `measure()`: it adds
    the loss and the time of a step to the points. What is known is not measured again, so that a second press does
    nothing. Both work with the arrow keys, Enter and the space bar; the button is never disabled, which would take the
    focus from it. `.view` is the data behind `.figure`."""

    def __init__(self, counted: data.Counted, sparsity: float = 0.5) -> None:
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
        self.button = ipywidgets.Button(
            tooltip="the loss on the held-out text, and the time of a step here, on the TwELL path and as it was",
            layout={"width": "200px"},
        )
        self._measuring = False
        super().__init__([ipywidgets.HBox([self.slider, self.button])], figures.picture(self.view))
        self.slider.observe(lambda _: self._draw(), names="value")
        self.button.on_click(lambda _: self.measure())
        self._draw()

    @property
    def _sparsity(self) -> float:
        return round(self.slider.value, 4)  # steps of 0.01 add up to other floats

    def measure(self) -> None:
        """Measure the loss and a step's time at the slider's sparsity, as far as they are not known, and draw both."""
        if self._measuring:
            return
        self._measuring, sparsity = True, self._sparsity
        try:
            self._draw()
            for known, run in ((self.counted.losses, data.measure), (self.counted.steps, data.clock)):
                if sparsity not in known:
                    run(self.counted, sparsity)
        finally:
            self._measuring = False
            self._draw()

    def _draw(self) -> None:
        self.view = data.view(self.counted, self._sparsity)
        known = self._sparsity in self.counted.losses and self.view["step"]
        said = "measured here" if known else "measure here"
        self.button.description = "measuring ..." if self._measuring else said
        self.redraw(lambda: figures.move(self.figure, self.view))
