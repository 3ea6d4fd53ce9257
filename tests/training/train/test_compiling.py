"""When a step is compiled as a whole, and when layer by layer."""

import json

import pytest
import torch

from twell_lab.training import compiled
from twell_lab.training.compiled import QUIET, WHOLES, WORTH, Compiled


@pytest.fixture
def make(monkeypatch):
    """A Compiled of nothing, whose calls say how they were computed."""

    class Objective:
        model, compile_loss = None, lambda self: None

    monkeypatch.setattr(compiled, "blocks", lambda model: [])
    monkeypatch.setattr(compiled.torch, "compile", lambda *_, **__: lambda *_: "whole")
    return lambda whole=True: Compiled(Objective(), lambda *_: "by layer", whole)


def test_by_layer_until_no_layer_changed_for_a_while(make):
    step = make()
    assert step() == "by layer"
    step.follow(("dense",), False, QUIET - 1, WORTH)
    assert step() == "by layer"
    step.follow(("dense",), False, QUIET, WORTH)
    assert step() == "whole"
    step.follow(("twell",), True, QUIET + 10, WORTH)
    assert step() == "by layer"
    step.follow(("twell",), False, 2 * QUIET + 9, WORTH)
    assert step() == "by layer"
    step.follow(("twell",), False, 2 * QUIET + 10, WORTH)
    assert step() == "whole"


def test_not_where_it_would_not_pay_any_more(make):
    step = make()
    step.follow(("dense",), False, QUIET, WORTH - 1)
    assert step() == "by layer"


def many(step, at=0):
    """More combinations of paths, one after another, than there may be graphs of."""
    for number in range(WHOLES + 2):
        paths = tuple("twell" if layer < number else "dense" for layer in range(9))
        step.follow(paths, True, at := at + 1, WORTH)
        step.follow(paths, False, at := at + QUIET, WORTH)
        yield number, at


def test_no_more_than_torch_compiles_of_one_function(make):
    step = make()
    assert WHOLES < torch._dynamo.config.recompile_limit
    for number, at in many(step):  # noqa: B007  (read after it)
        assert step() == ("whole" if number < WHOLES else "by layer")
    step.follow(("dense",) * 9, True, at + 1, WORTH)
    step.follow(("dense",) * 9, False, at + 1 + QUIET, WORTH)  # one of the first, whose graph is still there
    assert step() == "whole"


def test_a_resumed_run_computes_as_the_unbroken_one(make):
    step, other = make(), make()
    step.follow(("dense",), False, QUIET, WORTH)
    other.load_state_dict(json.loads(json.dumps(step.state_dict())))
    assert other() == "whole"
    other.follow(("dense",), False, QUIET + 10, WORTH - 10)  # where it would not begin any more
    assert other() == "whole"
    other.follow(("twell",), True, QUIET + 20, WORTH)
    assert other() == "by layer"
    assert other.state_dict() == {"changed_at": QUIET + 20, "whole": False, "combinations": [["dense"]]}
