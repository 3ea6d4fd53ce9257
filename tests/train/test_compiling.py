"""When a step is compiled as a whole, and when layer by layer."""

import pytest
import torch
from torch import nn

from twell_lab import compiling
from twell_lab.compiling import QUIET, WHOLES, WORTH, Compiled

STEPS = QUIET + WORTH


@pytest.fixture
def make(monkeypatch):
    """A Compiled of nothing, whose calls say how they were computed."""
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(1, 1)])

    class Objective:
        model, compile_loss = Model(), lambda self: None

    monkeypatch.setattr(compiling.torch, "compile", lambda *_, **__: lambda *_: "whole")
    return lambda whole=True: Compiled(Objective(), lambda *_: "by layer", whole)


def test_by_layer_until_no_layer_changed_for_a_while(make):
    step = make()
    assert step() == "by layer"
    step.follow(("dense",), False, QUIET - 1, STEPS)
    assert step() == "by layer"
    step.follow(("dense",), False, QUIET, STEPS)
    assert step() == "whole"
    step.follow(("twell",), True, QUIET + 10, STEPS + QUIET)
    assert step() == "by layer"
    step.follow(("twell",), False, 2 * QUIET + 9, 2 * STEPS)
    assert step() == "by layer"
    step.follow(("twell",), False, 2 * QUIET + 10, 2 * STEPS)
    assert step() == "whole"


def test_not_where_it_would_not_pay_any_more(make):
    step = make()
    step.follow(("dense",), False, QUIET, STEPS - 1)
    assert step() == "by layer"


def test_never_where_the_whole_is_no_graph(make):
    step = make(whole=False)
    step.follow(("dense",), False, QUIET, STEPS)
    assert step() == "by layer" and not step.state_dict()["whole"]


def test_no_more_than_torch_compiles_of_one_function(make):
    step, at = make(), 0
    assert WHOLES < torch._dynamo.config.recompile_limit
    for number in range(WHOLES + 2):
        paths = tuple("twell" if layer < number else "dense" for layer in range(9))
        step.follow(paths, True, at := at + 1, 10 * STEPS)
        step.follow(paths, False, at := at + QUIET, 10 * STEPS)
        assert step() == ("whole" if number < WHOLES else "by layer")
    step.follow(paths, True, at := at + 1, 10 * STEPS)
    step.follow(("dense",) * 9, False, at := at + QUIET, 10 * STEPS)  # one of the first, whose graph is still there
    assert step() == "whole"


def test_a_resumed_run_computes_as_the_unbroken_one(make):
    step, other = make(), make()
    step.follow(("dense",), False, QUIET, STEPS)
    other.load_state_dict(step.state_dict())
    assert other() == "whole"
    other.follow(("dense",), False, QUIET + 10, STEPS)  # where it would not begin any more
    assert other() == "whole"
    other.follow(("twell",), True, QUIET + 20, STEPS)
    assert other() == "by layer" and other.state_dict() == {"changed_at": QUIET + 20, "whole": False}
