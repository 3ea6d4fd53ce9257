"""What a plain call costs the host: the time until it returns, beside the time until its result is there.

The GPU is idle before each call, so that nothing is waited for but what the call itself waits for. Python, torch's
dispatcher, the allocator and the driver are in these times; the kernels only in `wall_ms`. Where the host time is the
longer of the two, a faster kernel gains nothing. Paths take turns; every result is checked before any clock starts."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ..layers.choice import Choice
from ..layers.sparse_ffn import SparseFFN
from ..ops import measure
from . import inference

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
    ways = {"dense": Choice("dense"), "twell": Choice("twell"), f"hot_cold {HOT}": Choice("hot_cold", HOT)}
    calls = {"dense eager": layer} | {name: SparseFFN.from_module(layer, plan=choice) for name, choice in ways.items()}
    for name, call in calls.items():
        if name != "dense eager":
            inference.check(layer, call, inputs)
    return _rows(
        layer,
        inputs,
        "forward",
        {name: lambda turn, call=call: call(inputs[turn % len(inputs)]) for name, call in calls.items()},
    )


def _training_rows(layer: torch.nn.Module, inputs: list[torch.Tensor]) -> list[dict]:
    layer.requires_grad_(True)
    sparse = SparseFFN.from_module(layer)
    inputs = [x.detach().requires_grad_() for x in inputs]
    grads = [torch.randn_like(x) for x in inputs]

    def step(call, turn: int, learning: str | None = None):
        if learning:
            sparse.learn(learning)
        turn %= len(inputs)
        asked = [inputs[turn], *layer.parameters()]
        return torch.autograd.grad(call(inputs[turn]), asked, grads[turn])

    calls = {
        "dense eager": lambda turn: step(layer, turn),
        "dense": lambda turn: step(sparse, turn, "dense"),
        "twell": lambda turn: step(sparse, turn, "twell"),
    }
    wanted = calls["dense eager"](0)
    for name in ("dense", "twell"):
        for got, want in zip(calls[name](0), wanted, strict=True):
            off = float((got - want).float().norm() / want.float().norm().clamp(min=1e-30))
            if not off <= 0.05:
                raise measure.WrongResult(f"{name}: a gradient is off by {off:.3g} of its norm: nothing was timed")
    found = _rows(layer, inputs, "forward and backward", calls)
    layer.requires_grad_(False)
    return found


def _rows(layer, inputs, what: str, calls: dict[str, Callable[[int], object]]) -> list[dict]:
    shared = inference._describe(layer, [x.detach() for x in inputs], what) | {"kind": "host"}
    samples = _time(calls)
    medians = {name: [measure.quartiles(values) for values in both] for name, both in samples.items()}
    dense = medians["dense eager"][0][0]
    return [
        {
            **shared,
            "path": name,
            "ms": host[0],
            "spread": host[1],
            "wall_ms": wall[0],
            "wall_spread": wall[1],
            "dense_ms": dense,
            "x_dense": dense / host[0],
            "samples": [round(ms, 5) for ms in samples[name][0]],
        }
        for name, (host, wall) in medians.items()
    ]


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
