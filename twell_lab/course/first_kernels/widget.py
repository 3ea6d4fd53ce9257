"""The widget of notebook 08: a slider through the steps that the simulator recorded of a block."""

from __future__ import annotations

from ...simulator.trace import Trace
from ..widgets import Explorer, ipywidgets
from . import figures


class StepExplorer(Explorer):
    """A slider through the steps of a trace, above the arrays as they are after the chosen one, `.index`.

    It begins at the fault that stopped the block, if one did, otherwise at the first step. options: those of
    figures.step_view. `.next_barrier()` does what the button does."""

    def __init__(self, trace: Trace, **options) -> None:
        self.trace, last = trace, len(trace) - 1
        self.button = ipywidgets.Button(description="next barrier", layout={"width": "120px"})
        move = lambda shown, step: figures.move_step_view(shown, trace, step, **options)
        choices = [(f"{step} of {last}", step) for step in range(len(trace))]
        super().__init__(figures.step_view(trace, 0, **options), move, choices, "step")
        if trace.fault:
            self.slider.index = last
        self.button.on_click(lambda _: self.next_barrier())
        self.children = (ipywidgets.HBox([self.slider, self.button]), *self.children[1:])

    def next_barrier(self) -> None:
        """Go to the block's next meeting at a barrier; stay if there is none."""
        self.slider.index = next((barrier for barrier in self.trace.barriers if barrier > self.index), self.index)

    def _draw(self) -> None:
        self.button.disabled = max(self.trace.barriers, default=-1) <= self.index
        super()._draw()
