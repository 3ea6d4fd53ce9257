"""The widget of a sentence: type one, cut neurons, choose a model, walk from token to token."""

from __future__ import annotations

from ...core import InputError
from ..widgets import Drawn, ipywidgets
from . import figures
from .data import CUTS, Row, Sentence, percent, read, view


class SentenceExplorer(Drawn):
    """A field for a sentence and three sliders above the figure of it (figures.picture): `.cut`, `.model`, `.token`.
    Moving one only looks up what was computed when the sentence was read. Enter in `.text` has the models read another
    sentence; `.note` says in a line what is wrong with it, and then the one before stays."""

    def __init__(self, sentence: Sentence, rows: list[Row], cut: float = 0.0) -> None:
        self.sentence, self.rows = sentence, rows
        wide = {"width": "100%"}
        self.text = ipywidgets.Text(
            sentence.tokens.decode("utf-8", "replace"), description="sentence", continuous_update=False, layout=wide
        )
        self.note = ipywidgets.HTML(sentence.note or "Type a sentence of your own, then Enter.")
        slider = {"layout": {"width": "48%"}, "continuous_update": True}
        self.cut = ipywidgets.SelectionSlider(
            options=[(percent(cut), cut) for cut in CUTS], value=cut, description="cut", **slider
        )
        self.model = ipywidgets.SelectionSlider(options=[*sentence.models], description="training", **slider)
        self.token = ipywidgets.IntSlider(max=len(sentence.tokens) - 1, description="token", **slider)
        self.play = ipywidgets.Play(max=self.token.max, interval=250, layout={"width": "48%"})
        ipywidgets.jslink((self.play, "value"), (self.token, "value"))
        rows_of = [ipywidgets.HBox(pair, layout=wide) for pair in ((self.cut, self.model), (self.token, self.play))]
        super().__init__([self.text, *rows_of, self.note], figures.picture(self.view))
        self.text.observe(lambda _: self._read(), names="value")
        for control in (self.cut, self.model, self.token):
            control.observe(lambda _: self._draw(), names="value")
        self._draw()

    @property
    def view(self) -> dict:
        """Return the data behind the figure."""
        token = min(self.token.value, len(self.sentence.tokens) - 1)
        return view(self.sentence, self.rows, self.model.value, self.cut.value, token)

    def _read(self) -> None:
        try:
            self.sentence = read(self.sentence.readers, self.text.value)
        except InputError as error:
            self.note.value = f"{error}"
            return
        self.note.value = self.sentence.note or f"Read {len(self.sentence.tokens)} tokens."
        self.token.max = self.play.max = len(self.sentence.tokens) - 1
        self._draw()

    def _draw(self) -> None:
        self.redraw(lambda: figures.move(self.figure, self.view))
