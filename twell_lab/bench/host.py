"""What a plain call costs the host: the time until it returns, beside the time until its result is there.

The GPU is idle before each call, so that nothing is waited for but what the call itself waits for. Python, torch's
dispatcher, the allocator and the driver are in these times; the kernels only in `wall_ms`. Where the host time is the
longer of the two, a faster kernel gains nothing. Paths take turns; every result is checked before any clock starts."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ..layers.choice import one_of_each
from ..layers.sparse_ffn import SparseFFN
from ..layers.weights import Weights
from ..ops import differentiable, measure
from . import inference, training
from .rows import DENSE, check, describe, over, row

D_MODEL, D_FF, NNZ = 2048, 5632, 29
TOKENS = (1, 16, 256, 2048, 16384)
HOT = 512
ROUNDS = 60


def rows(tokens: tuple[int, ...] = TOKENS) -> list[dict]:
    """Host and wall time of one gated layer, bf16, on each path at each of these token counts: a forward without
    gradients, and a forward and backward pass. `ms` is the host's time, `wall_ms` until the GPU has finished; medians,
    spread between quartiles."""
    found = []
    for count in tokens:
        layer, inputs, _ = inference.drawn(count, D_MODEL, D_FF, NNZ)
        found += _forward_rows(layer, inputs)
        found += _training_rows(layer, inputs)
    return found


@torch.no_grad()
def _forward_rows(layer: torch.nn.Module, inputs: list[torch.Tensor]) -> list[dict]:
    choices = one_of_each(D_FF, HOT)
    calls = {DENSE: layer} | {str(choice): SparseFFN.from_module(layer, plan=choice) for choice in choices}
    for name, call in calls.items():
        if name != DENSE:
            check(layer, call, inputs)
    return _rows(layer, inputs, "forward", {name: over(call, inputs) for name, call in calls.items()})


def _training_rows(layer: torch.nn.Module, inputs: list[torch.Tensor]) -> list[dict]:
    layer.requires_grad_(True)
    sparse = SparseFFN.from_module(layer)
    inputs = [x.detach().requires_grad_() for x in inputs]
    grads = [torch.randn_like(x) for x in inputs]

    def step(call, turn: int, learning: str | None = None):
        if learning:
            sparse.learn(learning)
        turn %= len(inputs)
        y = call(inputs[turn])
        return [y, *torch.autograd.grad(y, [inputs[turn], *layer.parameters()], grads[turn])]

    calls = {DENSE: lambda turn: step(layer, turn)}
    calls |= {path: lambda turn, path=path: step(sparse, turn, path) for path in differentiable.PATHS}
    dense = calls[DENSE](0)
    weights = Weights.of(layer.gate_proj, layer.up_proj, layer.down_proj)
    exact = training.exact(weights, inputs[0].detach(), grads[0], l1=0.0)
    for path in differentiable.PATHS:
        training.check(calls[path](0), dense, exact)
    found = _rows(layer, inputs, "forward and backward", calls)
    layer.requires_grad_(False)
    return found


def _rows(layer, inputs, what: str, calls: dict[str, Callable[[int], object]]) -> list[dict]:
    shared = describe("host", inputs, layer.gate_proj.weight, what) | {"gated": True}
    samples = _time(calls)
    dense = measure.quartiles(samples[DENSE][0])[0]
    found = []
    for path, (host, wall) in samples.items():
        wall_ms, wall_spread = measure.quartiles(wall)
        found.append(row(shared, path, host, dense, wall_ms=wall_ms, wall_spread=wall_spread))
    return found


def _time(calls: dict[str, Callable[[int], object]]) -> dict[str, tuple[list[float], list[float]]]:
    """For each call, milliseconds until it returned and until the GPU had finished, an idle GPU before each."""
    samples = {name: ([], []) for name in calls}
    for turn in range(ROUNDS + 5):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            kept = call(turn)
            host = time.perf_counter()
            torch.cuda.synchronize()
            wall = time.perf_counter()
            del kept
            if turn >= 5:
                samples[name][0].append(1e3 * (host - start))
                samples[name][1].append(1e3 * (wall - start))
    return samples
