"""Interactive figures: ipywidgets controls above plotly figures, which change in place (plotly's FigureWidget) where
the notebook can show one. Elsewhere, as on Colab or without anywidget, they are drawn anew at each move."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import plotly.graph_objects as go

from ..core import StackError
from .notebook import on_colab

try:
    import ipywidgets
    from IPython.display import display
except ImportError:
    raise StackError("widgets need ipywidgets, which is not installed: pip install ipywidgets") from None


# Plotly draws such a figure before the page has given it a place, 700 pixels wide, and looks again only when the window
# changes. This tells it so when there is a place, or another one, and when it has drawn for the first time.
_FIT = """
export default { render({ el }) {
    el.style.width = "100%";
    const fit = () => window.dispatchEvent(new Event("resize"));
    const drawn = event => el.parentElement?.contains(event.detail.element) && fit();
    document.addEventListener("plotlywidget-after-render", drawn);
    const watching = new ResizeObserver(fit);
    watching.observe(el);
    return () => { watching.disconnect(); document.removeEventListener("plotlywidget-after-render", drawn); };
} }
"""


def _fitted(figure: go.FigureWidget) -> list[ipywidgets.Widget]:
    """Return what stands in a box so that this figure in it is as wide as the box."""
    try:
        import anywidget
    except ImportError:  # plotly before 6, whose figures see to it themselves
        return [figure]
    figure._config = {**figure._config, "responsive": True}
    return [figure, anywidget.AnyWidget(_esm=_FIT)]


def _light(figure: go.Figure) -> go.Figure:
    """The figure, without what plotly would measure anew at each move: whether numbers beside an axis overlap, leave
    the figure or need a wider margin. Axes with names, which are longer, keep that."""
    named = set()
    for trace in figure.data:
        for letter in "xy":
            if any(isinstance(each, str) for each in (() if trace[letter] is None else trace[letter])):
                named.add((trace[f"{letter}axis"] or letter).replace(letter, f"{letter}axis"))
    for axis in (*figure.select_xaxes(), *figure.select_yaxes()):
        if axis.plotly_name not in named and axis.ticktext is None:
            axis.update(automargin=False, ticklabeloverflow="allow", tickangle=0)
    return figure


class Drawn(ipywidgets.VBox):
    """Controls above a figure, which is `.figure` and as wide as the notebook."""

    def __init__(self, controls: list, figure: go.Figure) -> None:
        self.figure = _light(figure)
        if not on_colab():  # there a FigureWidget needs a third-party widget manager, and loses updates
            with suppress(ImportError):  # plotly needs anywidget for it, and does not install it
                self.figure = go.FigureWidget(figure)
        self._canvas = None if isinstance(self.figure, ipywidgets.Widget) else ipywidgets.Output()
        super().__init__([*controls, *(_fitted(self.figure) if self._canvas is None else [self._canvas])])

    def redraw(self, change: Callable[[], None]) -> None:
        """Call `change`, which updates the figure, and show it: in place where that works, otherwise drawn anew."""
        if self._canvas is None:
            with self.figure.batch_update():
                change()
            return
        change()
        with self._canvas:
            self._canvas.clear_output(wait=True)
            display(self.figure)


class Explorer(Drawn):
    """A slider, `.slider`, above a figure, `.figure`; `.index` is the choice. change: a function of (figure, index)
    that updates the figure in place. choices: the slider's (label, value) pairs."""

    def __init__(self, figure: go.Figure, change: Callable[[go.Figure, int], None], choices: list, label: str) -> None:
        self._change = change
        self.slider = ipywidgets.SelectionSlider(
            options=choices,
            description=label,
            continuous_update=True,
            style={"description_width": "initial"},
            layout={"width": "560px", "max_width": "100%"},
        )
        super().__init__([self.slider], figure)
        self.slider.observe(lambda _: self._draw(), names="index")
        self._draw()

    @property
    def index(self) -> int:
        """Return which of the slider's choices is shown, from 0."""
        return self.slider.index

    def _draw(self) -> None:
        self.redraw(lambda: self._change(self.figure, self.index))
