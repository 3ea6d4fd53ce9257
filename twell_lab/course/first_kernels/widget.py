"""The widget of notebook 08: a slider through the steps that the simulator recorded of a block."""

from __future__ import annotations

from collections.abc import Iterable

from ...core import InputError
from ...simulator.trace import Trace
from ..widgets import Explorer, ipywidgets
from . import figures


class StepExplorer(Explorer):
    """A slider through the steps of a trace, above the arrays as they are after the chosen step (figures.step_view).

    steps: indices of the steps where the slider stops, ascending, such as those of one warp, or `trace.of_thread(5)`
    (None: all). It begins at the fault that stopped the block, if one did, otherwise at the first stop. The other
    options are those of step_view. `.index` is the number of the slider's stop, `.step` the trace's step that is shown;
    `.next_barrier()` does what the button does.
    """

    def __init__(self, trace: Trace, steps: Iterable[int] | None = None, **options) -> None:
        stops = list(range(len(trace))) if steps is None else list(steps)
        if not stops or any(not 0 <= stop < len(trace) for stop in stops) or sorted(set(stops)) != stops:
            raise InputError(
                f"steps holds {len(stops)} of this trace's {len(trace)} steps; at least one is "
                f"accepted, ascending, from 0 to {len(trace) - 1}"
            )
        self.trace, self._stops = trace, stops
        self.button = ipywidgets.Button(description="next barrier", layout={"width": "120px"})
        figure = figures.step_view(trace, stops[0], **options)
        super().__init__(
            figure,
            lambda shown, index: figures.move_step_view(shown, trace, stops[index], **options),
            [(f"{stop} of {len(trace) - 1}", stop) for stop in stops],
            "step",
        )
        if trace.fault and stops[-1] == len(trace) - 1:
            self.slider.index = len(stops) - 1
        self.button.on_click(lambda _: self.next_barrier())
        self.children = (ipywidgets.HBox([self.slider, self.button]), *self.children[1:])

    @property
    def step(self) -> int:
        """The trace's step that is shown."""
        return self._stops[self.index]

    def next_barrier(self) -> None:
        """Go to the first stop at or after the block's next meeting at a barrier; stay if there is none."""
        meeting = next((barrier for barrier in self.trace.barriers if barrier > self.step), None)
        if meeting is not None and self._stops[-1] >= meeting:
            self.slider.index = next(i for i, stop in enumerate(self._stops) if stop >= meeting)

    def _draw(self) -> None:
        last = max((barrier for barrier in self.trace.barriers if barrier <= self._stops[-1]), default=-1)
        self.button.disabled = last <= self.step
        super()._draw()
