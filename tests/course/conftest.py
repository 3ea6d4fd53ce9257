"""What the tests of several subjects share."""

import json

import plotly.graph_objects as go
import pytest
import torch

from twell_lab import core
from twell_lab.course import widgets


@pytest.fixture(params=["in place", "drawn anew"])
def draws(request, monkeypatch) -> str:
    """Both ways of drawing; the explorer made afterwards takes this one."""
    if request.param == "drawn anew":
        monkeypatch.setattr(widgets, "on_colab", lambda: True)
    else:
        pytest.importorskip("anywidget")
    return request.param


@pytest.fixture
def keep(tmp_path, monkeypatch):
    """A function that saves these records as the only ones of the project."""
    monkeypatch.setattr(core, "records_dir", lambda: tmp_path / "records")

    def keep(*made):
        for old in (tmp_path / "records").glob("*.json"):
            old.unlink()
        for each in made:
            each.save()

    return keep


@pytest.fixture
def my_gpu(monkeypatch) -> str:
    """The name of a GPU that torch says is here; nothing can run on it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "My GPU")
    return "My GPU"


MOST = 40_000  # bytes to the page for one move: several times what the largest of these widgets sends


@pytest.fixture
def light(monkeypatch):
    """light(explorer, moves) fails unless each move sends the page one message of at most MOST bytes and makes no figure.

    Times are for `twell-lab record widgets`, in a browser; this is the work behind them, which no busy machine changes.
    A figure made at each move was what took most of it.
    """
    pytest.importorskip("anywidget")

    def check(explorer, moves):
        sent = []
        explorer.figure.observe(lambda change: sent.append(change.new), ["_py2js_update", "_py2js_restyle"])
        explorer.figure.observe(lambda change: sent.append(change.new), ["_py2js_relayout"])
        with monkeypatch.context() as patch:
            patch.setattr(go.Figure, "__init__", lambda *_, **__: pytest.fail("a move makes a figure"))
            for move in moves:
                sent.clear()
                move()
                messages = [each for each in sent if each is not None]
                assert len(messages) == 1
                # Arrays; and plotly's mark for what stays as it was, an object of no kind.
                said = json.dumps(messages, default=lambda each: each.tolist() if hasattr(each, "tolist") else "")
                assert len(said) < MOST

    return check
