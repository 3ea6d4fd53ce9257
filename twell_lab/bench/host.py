"""What a plain call costs the host: the time until it returns, beside the time until its result is there.

The GPU is idle before each call, so that a call waits for nothing but its own work. The host time (`ms`) holds what
Python, torch's dispatcher, the allocator and the driver take; the kernels count only in `wall_ms`. Where the two are
nearly equal, a faster kernel gains nothing. Paths take turns; every result is checked before any clock starts."""

from __future__ import annotations

import copy
import time

import torch

from ..layers.choice import one_of_each
from ..layers.parts import Weights
from ..layers.sparse_ffn import SparseFFN
from ..ops import train
from . import inference, training
from .rows import DENSE, Calls, check, describe, drain, over, table

D_MODEL, D_FF, NNZ = 2048, 5632, 29
TOKENS = (1, 16, 256, 2048, 16384)
HOT = 512
ROUNDS = 60


def rows(tokens: tuple[int, ...] = TOKENS) -> list[dict]:
    """Host and wall time of one gated layer, bf16, on each path and for each number of tokens: a forward pass without
    gradients, and a forward and backward pass. `ms` is the host's time, `wall_ms` the time until the GPU has finished,
    both medians; `spread` and `wall_spread` are the distances between the quartiles."""
    found = []
    for count in tokens:
        layer, inputs, _ = inference.drawn(count, D_MODEL, D_FF, NNZ)
        found += _forward_rows(layer, inputs)
        found += _training_rows(layer, inputs)
    return found


@torch.no_grad()
def _forward_rows(layer: torch.nn.Module, inputs: list[torch.Tensor]) -> list[dict]:
    choices = one_of_each(D_FF, HOT)
    calls = {DENSE: layer}  # each path has a layer of its own, whose weights lie as it reads them
    calls |= {str(choice): SparseFFN.from_module(copy.deepcopy(layer), plan=choice) for choice in choices}
    for name, call in calls.items():
        if name != DENSE:
            check(layer, call, inputs)
    return _rows(layer, inputs, "forward", {name: over(call, inputs) for name, call in calls.items()})


def _training_rows(layer: torch.nn.Module, inputs: list[torch.Tensor]) -> list[dict]:
    layer.train().requires_grad_(True)
    inputs = [x.detach().requires_grad_() for x in inputs]
    grads = [torch.randn_like(x) for x in inputs]

    def step(call, turn: int):
        turn %= len(inputs)
        y = call(inputs[turn])
        return [y, *torch.autograd.grad(y, [inputs[turn], *layer.parameters()], grads[turn])]

    learners = {path: SparseFFN.from_module(layer) for path in train.PATHS}
    for path, learner in learners.items():
        learner.learn(path)
    calls = {name: lambda turn, call=call: step(call, turn) for name, call in {DENSE: layer, **learners}.items()}
    dense = calls[DENSE](0)
    weights = Weights.of(layer.gate_proj, layer.up_proj, layer.down_proj)
    exact = training.exact(weights, inputs[0].detach(), grads[0], l1=0.0)
    for path in train.PATHS:
        training.check(calls[path](0), dense, exact)
    found = _rows(layer, inputs, "forward and backward", calls)
    layer.eval().requires_grad_(False)
    return found


def _rows(layer, inputs, what: str, calls: Calls) -> list[dict]:
    shared = describe("host", inputs, layer.gate_proj.weight, what) | {"gated": True}
    host, wall = clock(calls, ROUNDS)
    return table(shared, host, bursts={path: (host[path], wall[path]) for path in calls})


def clock(calls: Calls, rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Milliseconds until each call returned, and until its result was there, the calls in turn, `rounds` times.

    The GPU is idle before each call; a CPU has the result when the call returns. calls: each takes the number of its
    turn."""
    until_returned, until_done = ({name: [] for name in calls} for _ in range(2))
    for turn in range(rounds + 5):
        for name, call in calls.items():
            drain()
            start = time.perf_counter()
            kept = call(turn)
            returned = time.perf_counter()
            drain()
            done = time.perf_counter()
            del kept
            if turn >= 5:
                until_returned[name].append(1e3 * (returned - start))
                until_done[name].append(1e3 * (done - start))
    return until_returned, until_done
