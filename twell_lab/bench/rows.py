"""What all benchmarks do alike: say which layer and inputs are timed, check results before any clock starts, and make
rows of the samples (see twell_lab.records)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..formats import twell
from ..layers.anatomy import feed_forwards
from ..ops import measure

DENSE, COMPILED = "dense eager", "dense compiled"  # the paths that every other one stands beside


def describe(kind: str, inputs: list[Tensor], first: Tensor, label: str, bias: Tensor | None = None) -> dict:
    """What all rows of one comparison share: device, dtype and sizes, and how many neurons fire at a token on average.

    inputs: [tokens, d_model] each; first, bias: of the projection whose positive outputs fire, [d_ff, d_model], [d_ff].
    label: what the workload is called."""
    x = inputs[0]
    with torch.no_grad():
        fired = [twell.fires(linear(each, first, bias)).sum(1).double().mean() for each in inputs]
    return {
        "kind": kind,
        "device": torch.cuda.get_device_name(x.device) if x.is_cuda else "CPU",
        "dtype": str(x.dtype).removeprefix("torch."),
        "tokens": x.shape[0],
        "d_model": x.shape[1],
        "d_ff": first.shape[0],
        "nnz": round(float(sum(fired) / len(fired)), 2),
        "workload": label,
    }


def row(
    shared: dict,
    path: str,
    samples: list[float],
    dense_ms: float | None = None,
    compiled_ms: float | None = None,
    **facts,
) -> dict:
    """One row: median and spread of the samples, in milliseconds, and how many times as fast as the dense layer that
    is."""
    ms, spread = measure.quartiles(samples)
    beside = {"dense_ms": dense_ms, "x_dense": None if dense_ms is None else dense_ms / ms}
    if compiled_ms is not None:
        beside["x_compiled"] = compiled_ms / ms
    taken = {"path": path, "ms": ms, "spread": spread, **beside}
    return {**shared, **taken, **facts, "samples": [round(each, 6) for each in samples]}


def table(shared: dict, samples: dict[str, list[float]], facts: dict[str, dict] | None = None) -> list[dict]:
    """A row for each path. What was run in another way, as "twell (graph)", stands beside the dense layer that was run
    so too; a part of a layer stands beside nothing. facts: what else to say of a path, however it was run."""
    medians = {path: measure.quartiles(values)[0] for path, values in samples.items()}
    made = []
    for path, values in samples.items():
        name = path.partition(" (graph")[0].partition(" (cold")[0]
        how = path[len(name) :]
        dense = None if path.startswith("part: ") else medians[DENSE + how]
        compiled = None if how or dense is None else medians.get(COMPILED)
        made.append(row(shared, path, values, dense, compiled, **(facts or {}).get(name, {})))
    return made


def over(call: Callable[[Tensor], object], inputs: list[Tensor]) -> Callable[[int], object]:
    """The call as the clocks take it: the inputs in turn."""
    return lambda turn: call(inputs[turn % len(inputs)])


@torch.no_grad()
def check(layer: nn.Module, call: Callable[[Tensor], Tensor], inputs: list[Tensor], *, every_row: bool = True) -> float:
    """The worst ratio of error to what is allowed: 64 rows of each input against float64 (measure.check), and, where
    asked for, every row of the first beside the dense layer's. layer: the dense feed-forward layer that `call` is to
    compute. Raises measure.WrongResult where the ratio is above 1, or a row differs by 5% of its norm."""
    judge = measure.As(feed_forwards(layer)[0], call)
    worst = max(measure.check(layer, judge, each) for each in inputs)
    if every_row:
        y, dense = call(inputs[0]).float(), layer(inputs[0]).float()
        there = dense.isfinite().all(1)
        off = float(((y - dense)[there].norm(dim=1) / dense[there].norm(dim=1).clamp(min=1e-3)).max())
        if not off <= 0.05:
            raise measure.WrongResult(
                f"a row differs from the dense layer's by {off:.3g} of its norm: nothing was timed"
            )
    return worst


def exact_gradients(tensors: Sequence[Tensor | None], keep: Tensor, dy: Tensor, dl1: Tensor) -> list[Tensor | None]:
    """y and the gradients of all tensors in float64, with the neurons that fire given.

    tensors: x [tokens, d_model], gate, up, down and their biases, None for what is not there. keep: bool [tokens,
    d_ff]. dy: [tokens, d_model]. dl1: [tokens], the gradient of each token's sum of |h|."""
    x, gate, up, down, gate_bias, up_bias, down_bias, dy, dl1 = (
        None if t is None else t.double() for t in (*tensors, dy, dl1)
    )
    g = torch.where(keep, linear(x, up if gate is None else gate, up_bias if gate is None else gate_bias), 0.0)
    u = None if gate is None else linear(x, up, up_bias)
    h = g if u is None else g * u
    y, dh = linear(h, down, down_bias), dy @ down + dl1[:, None] * h.sign()
    dg = torch.where(keep, dh if u is None else dh * u, 0.0)
    if u is None:
        return [y, dg @ up, None, dg.t() @ x, dy.t() @ h, None, dg.sum(0), dy.sum(0)]
    du = dh * g
    return [y, dg @ gate + du @ up, dg.t() @ x, du.t() @ x, dy.t() @ h, dg.sum(0), du.sum(0), dy.sum(0)]
