"""The widgets without a browser: wherever their sliders are, what is shown is the figure drawn anew for that place."""

import json
import subprocess
import sys
from functools import cache
from typing import NamedTuple

import numpy as np
import plotly.graph_objects as go
import pytest
import torch

from tests.simulator import recorded
from twell_lab import plots, simulator
from twell_lab.course import first_kernels, packing, sentence, sweep, widgets
from twell_lab.course.first_kernels.widget import StepExplorer
from twell_lab.course.packing.widget import TileExplorer
from twell_lab.course.sentence import figures as sentence_figures
from twell_lab.course.sentence.widget import SentenceExplorer
from twell_lab.course.sparsity_map import data as weights
from twell_lab.course.sparsity_map import figures as weight_figures
from twell_lab.formats import TwELL
from twell_lab.models.tiny import LanguageModel, ModelConfig
from twell_lab.simulator.trace import Trace
from twell_lab.training.sweep import pressed

MOST = 40_000  # bytes to the page for one move: several times what the largest of these widgets sends


@cache
def recorded_sweep() -> list[dict]:
    return sweep.recorded().rows


def trace(barriers: bool = True) -> Trace:
    return (recorded.block_sum() if barriers else recorded.pack(2, -torch.ones(1, 256))).trace


def gate(dtype=torch.bfloat16) -> torch.Tensor:
    torch.manual_seed(0)
    return (torch.randn(6, 300) - torch.linspace(-1.5, 1.5, 6)[:, None]).to(dtype)


def tile_drawn(shown: TileExplorer) -> go.Figure:
    row = shown.row.value
    packed = TwELL.from_gate(shown.gate[row : row + 1], shown.tile.value, shown.words.value)
    return packing.figures.tile_view(packed, row, shown.part.value)


THRESHOLDS = [0.0, 0.1, 0.5, 3.0]


@cache
def weighed() -> weights.Weighed:
    torch.manual_seed(0)
    times = {name: [1.0, 2.0, 3.0, 4.0, 5.0] for name in ("dense", "CSR", "blocks 16", "blocks 32")}
    return weights.Weighed(torch.randn(64, 32), torch.randn(20, 32), "CPU", times=times)


@cache
def spoken() -> sentence.data.Sentence:
    torch.manual_seed(0)
    sizes = ModelConfig(d_model=16, layers=2, heads=2, d_ff=150, context=128)
    return sentence.read({"one": LanguageModel(sizes), "another": LanguageModel(sizes)}, "A short line.")


TIMED = [sentence.data.Row("here", share, 1 + share, 2.0) for share in (0.01, 0.3)]


class Case(NamedTuple):
    """make: the widget; drawn: what it should show; moves: sliders and where to."""

    make: object
    drawn: object
    moves: list


def places(*values, slider="slider") -> list:
    return [(slider, value) for value in values]


WIDGETS = {
    "recorded run": Case(
        lambda: widgets.Explorer(
            sweep.picked(recorded_sweep(), 0, "recorded somewhere"),
            lambda figure, index: sweep.pick(figure, recorded_sweep(), index, "recorded somewhere"),
            [(sweep.short(row), row["config"]["l1"]) for row in pressed(recorded_sweep())],
            "L1",
        ),
        lambda shown: sweep.picked(recorded_sweep(), shown.index, "recorded somewhere"),
        places(*[row["config"]["l1"] for row in pressed(recorded_sweep())][2::-1]),
    ),
    "steps": Case(
        lambda: StepExplorer(trace()),
        lambda shown: first_kernels.figures.step_view(shown.trace, shown.index),
        places(7, 0, len(trace()) - 1, 3),
    ),
    "steps, in pages": Case(
        lambda: StepExplorer(trace(), page=32),
        lambda shown: first_kernels.figures.step_view(shown.trace, shown.index, page=32),
        places(*[step.index for step in trace() if step.warp == 0][-3:]),
    ),
    "tile": Case(
        lambda: TileExplorer(gate()),
        tile_drawn,
        [
            *places(3, 5, slider="row"),
            *places(1, 0, slider="part"),
            *places(2, 9, 200, slider="words"),
            *places(64, 512, 32, slider="tile"),
        ],
    ),
    "weight": Case(
        lambda: widgets.Explorer(
            weight_figures.picture(weights.view(weighed(), 0.5)),
            lambda figure, index: weight_figures.move(figure, weights.view(weighed(), THRESHOLDS[index])),
            [(f"{threshold:g}", threshold) for threshold in THRESHOLDS],
            "weights below",
        ),
        lambda shown: weight_figures.picture(weights.view(weighed(), THRESHOLDS[shown.index])),
        places(0.1, 0.0, 3.0),
    ),
    "sentence": Case(
        lambda: SentenceExplorer(spoken(), TIMED),
        lambda shown: sentence_figures.picture(shown.view),
        [*places(0.9, 0.995, 0.0, slider="cut"), *places("another", slider="model"), *places(3, 12, slider="token")],
    ),
}


def shows(figure: go.Figure) -> dict:
    """What a figure says: its traces, title, shapes and texts, but for names that plotly gives."""
    said = json.loads(go.Figure(figure).to_json())
    layout = {name: said["layout"].get(name) for name in ("title", "shapes", "annotations")}
    return layout | {"data": [{key: each[key] for key in each if key != "uid"} for each in said["data"]]}


@pytest.mark.parametrize("way", ["in place", "drawn anew"])
@pytest.mark.parametrize("name", WIDGETS)
def test_the_figure_follows_the_sliders(name, way, monkeypatch):
    if way == "drawn anew":
        monkeypatch.setattr(widgets, "on_colab", lambda: True)
    else:
        pytest.importorskip("anywidget")
    case = WIDGETS[name]
    shown = case.make()
    assert isinstance(shown.figure, go.FigureWidget) == (way == "in place") == (shown._canvas is None)
    for slider, value in case.moves:
        getattr(shown, slider).value = value
        assert shows(shown.figure) == shows(case.drawn(shown)), (slider, value)


@pytest.mark.parametrize("name", WIDGETS)
def test_a_move_is_light(name, monkeypatch):
    """One message of at most MOST bytes to the page, and no figure made: what took most of a move's time."""
    pytest.importorskip("anywidget")
    shown, sent = WIDGETS[name].make(), []
    shown.figure.observe(lambda change: sent.append(change.new), ["_py2js_update", "_py2js_restyle", "_py2js_relayout"])
    monkeypatch.setattr(go.Figure, "__init__", lambda *_, **__: pytest.fail("a move makes a figure"))
    for slider, value in WIDGETS[name].moves:
        sent.clear()
        getattr(shown, slider).value = value
        messages = [message for message in sent if message is not None]
        # Arrays; and plotly's mark for what stays as it was, an object of no kind.
        said = json.dumps(messages, default=lambda value: value.tolist() if hasattr(value, "tolist") else "")
        assert len(messages) == 1 and len(said) < MOST


def test_without_anywidget_the_figure_is_drawn_anew(monkeypatch):
    def refuse(*_):
        raise ImportError("Please install anywidget to use the FigureWidget class")

    monkeypatch.setattr(go, "FigureWidget", refuse)
    shown = WIDGETS["recorded run"].make()
    shown.slider.value = 1e-3
    assert shown._canvas is not None and "L1 1e-3" in shown.figure.layout.title.text


def test_without_ipywidgets_a_sentence_says_what_to_install():
    hide = "import sys; sys.modules['ipywidgets'] = None; from twell_lab.course import widgets"
    done = subprocess.run([sys.executable, "-c", hide], capture_output=True, text=True)
    assert done.returncode and "StackError: widgets need ipywidgets" in done.stderr


def test_the_button_goes_from_barrier_to_barrier():
    shown = StepExplorer(trace())
    for barrier in shown.trace.barriers:
        assert not shown.button.disabled
        shown.button.click()
        assert shown.index == barrier
    assert shown.button.disabled
    shown.slider.index = 0
    assert not shown.button.disabled
    assert StepExplorer(trace(barriers=False)).button.disabled


@pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")
def test_steps_end_at_the_fault_with_the_two_accesses_that_collide(tmp_path):
    (tmp_path / "k.cu").write_text(
        'extern "C" __global__ void k(float* a, const float* x) {\n    __shared__ float s[64];\n'
        "    s[threadIdx.x] = x[threadIdx.x];\n    a[64 * blockIdx.x + threadIdx.x] = s[63 - threadIdx.x];\n}"
    )
    a, x = np.zeros(128, np.float32), np.ones(64, np.float32)
    reversed_too_early = simulator.step(simulator.compile(tmp_path / "k.cu"), "k", 2, 64, (a, x))
    shown = StepExplorer(reversed_too_early)
    title = shown.figure.layout.title.text
    assert shown.index == len(reversed_too_early) - 1 and not a.any()
    assert "k.cu:3" in title and "and thread 31 of the same block reads it: k.cu:4" in title
    red = first_kernels.figures.STEP_COLOURS.index(plots.RED)
    places = [
        (line, place)
        for cells in shown.figure.data
        for line, row in enumerate(cells.z)
        for place in np.flatnonzero(np.array(row) == red)
    ]
    assert places == [(0, 0), (1, 0)]  # lane 0 of the warp, and s[32]


def test_sliders_of_a_tile_that_do_not_go_together_are_brought_along():
    shown = TileExplorer(gate(), tile=32, words=8, part=9)
    assert shown.part.max == 9 and shown.words.max == 33
    shown.words.value = 33
    shown.tile.value = 512  # one tile is left
    assert (shown.part.value, shown.part.max, shown.words.max) == (0, 0, 513)
    shown.words.value = 300
    shown.tile.value = 64
    assert shown.words.value == 65 and shows(shown.figure) == shows(tile_drawn(shown))


def test_odd_gates_have_their_tile():
    nothing_finite = TileExplorer(torch.full((2, 40), torch.nan, dtype=torch.bfloat16), tile=32, words=4)
    assert list(nothing_finite.figure.data[0].y) == [3, 3] and list(nothing_finite.figure.data[1].y) == [29, 5]
    silent = TileExplorer(torch.full((1, 40), -1.0, dtype=torch.bfloat16))
    assert sum(silent.figure.data[0].y) == 0
    trained = gate().requires_grad_()
    assert not TileExplorer(trained).gate.requires_grad and trained.grad is None


def test_a_drag_runs_no_model_and_another_sentence_has_each_read_it(monkeypatch):
    shown, ran = SentenceExplorer(spoken(), TIMED), []
    forward = LanguageModel.forward
    monkeypatch.setattr(LanguageModel, "forward", lambda model, ids: ran.append(model) or forward(model, ids))
    for slider, value in WIDGETS["sentence"].moves:
        getattr(shown, slider).value = value
    assert not ran
    shown.text.value = "Two."
    assert ran and shown.view["sentence"] == "Two." and shown.view["token"] == shown.token.max == shown.play.max == 3
    assert list(shown.figure.layout.xaxis3.ticktext) == ["T", "w", "o", "."]
    assert shows(shown.figure) == shows(sentence_figures.picture(shown.view))


@pytest.mark.parametrize(
    ("text", "said", "tokens"),
    [
        ("", "two or more", 13),
        (" \n ", "two or more", 13),
        ("\udc80 half", "half a character", 13),
        ("été", "é is read as 2", 5),
        ("word " * 300, "first 64 of 1,499", 64),
    ],
)
def test_what_is_odd_about_a_sentence_is_said_in_a_line(text, said, tokens):
    shown = SentenceExplorer(spoken(), TIMED)
    shown.text.value = text
    assert said in shown.note.value and "\n" not in shown.note.value
    assert len(shown.sentence.tokens) == tokens == len(shown.view["fires"])
