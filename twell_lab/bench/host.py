"""Time what a plain call costs the host: the time until it returns, beside the time until its result is there.

The GPU is idle before each call, so that a call waits for nothing but its own work. The host time (`ms`) holds what
Python, torch's dispatcher, the allocator and the driver take; the kernels count only in `wall_ms`. Where the two are
nearly equal, a faster kernel gains nothing. Paths take turns; every result is checked before any clock starts."""

from __future__ import annotations

import copy

import torch
from torch import nn

from ..layers.choice import one_of_each
from ..layers.sparse_ffn import SparseFFN
from ..ops import clock, train
from . import training
from .forward import Case
from .rows import DENSE, Calls, check, describe, drain, over, table

TOKENS = (1, 16, 256, 2048, 16384)
HOT = 512
ROUNDS = 60


def rows(case: Case) -> list[dict]:
    """Return host time (`ms`) and time until the GPU has finished (`wall_ms`) of a gated layer on each path: a forward
    pass without gradients, and a forward and backward pass."""
    layer, inputs, _ = case.draw()
    with torch.no_grad():  # each path has a layer of its own, whose weights lie as it reads them
        sparse = {
            str(choice): SparseFFN.from_module(copy.deepcopy(layer), plan=choice)
            for choice in one_of_each(case.d_ff, HOT)
        }
        for call in sparse.values():
            check(layer, call, inputs)
        calls = {name: over(call, inputs) for name, call in {DENSE: layer, **sparse}.items()}
        made = _rows(layer, inputs, "forward", calls)
    return made + _training_rows(layer, inputs)


def _training_rows(layer: nn.Module, inputs: list[torch.Tensor]) -> list[dict]:
    layer.train().requires_grad_(True)
    inputs = [x.detach().requires_grad_() for x in inputs]
    grads = [torch.randn_like(x) for x in inputs]

    def step_of(call):
        def step(turn: int):
            x, dy = inputs[turn % len(inputs)], grads[turn % len(inputs)]
            y = call(x)
            return [y, *torch.autograd.grad(y, [x, *layer.parameters()], dy)]

        return step

    learners = {path: SparseFFN.from_module(layer) for path in train.PATHS}
    for path, learner in learners.items():
        learner.learn(path)
    calls = {name: step_of(call) for name, call in {DENSE: layer, **learners}.items()}
    weights = [projection.weight for projection in (layer.gate_proj, layer.up_proj, layer.down_proj)]
    dense, exact = calls[DENSE](0), training.exact(weights, inputs[0].detach(), grads[0], l1=0.0)
    for path in train.PATHS:
        training.check(calls[path](0), dense, exact)
    return _rows(layer, inputs, "forward and backward", calls)


def _rows(layer: nn.Module, inputs: list[torch.Tensor], what: str, calls: Calls) -> list[dict]:
    for call in calls.values():
        for turn in range(5):
            call(turn)
    bursts = clock.time_bursts(calls, drain, rounds=ROUNDS, count=1, warm=0)
    shared = describe("host", inputs, layer.gate_proj.weight, what) | {"gated": True}
    return table(shared, {path: host for path, (host, _) in bursts.items()}, bursts=bursts)


SECTIONS = {"host": [lambda count=count: rows(Case(count)) for count in TOKENS]}
