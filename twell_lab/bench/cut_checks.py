"""Checks, before any clock starts, that layers with thresholds are computed right.

Two right computations add in another order, so a value at a threshold may be kept by one and dropped by the other.
Therefore each layer, on the inputs that it is given in the model, is compared row by row with float64, where a value
within rounding of the threshold counts as the layer that is judged kept it; its error may be what is allowed everywhere
(ops.accuracy). In a whole model such differences add up, so its results may be off by more (workloads.CUT_SLACK)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..layers.activations import is_threshold
from ..layers.find import FeedForward
from ..layers.lossy import ThresholdedActivation
from ..layers.sparse_ffn import SparseFFN
from ..ops import accuracy, clock, reference

_ROWS = 64  # tokens of an input that a layer is judged by
_SLOPE = 1.13  # the steepest that a SiLU or GELU is; a ReLU is less
_SUMS = torch.finfo(torch.float32).eps  # an addition's rounding: sums are float32, at worst


def has_thresholds(layer: FeedForward) -> bool:
    """Return whether a layer's values are kept or dropped by a threshold at which its result jumps."""
    return bool(layer.cut) or layer.acts is not None and is_threshold(layer.acts)


@torch.no_grad()
def worst_layer(layers: list[FeedForward], model: nn.Module, run: Callable[[], object]) -> float | None:
    """Return the worst error of the swapped layers of `model`, over what is allowed, on what enters the dense layers
    while run() calls theirs, and on `hard_inputs` like that. None where no layer could be compared.

    layers: those of the dense model with thresholds. Raises clock.WrongResult for a layer whose ratio is above 1."""
    swapped = {name: module for name, module in model.named_modules() if isinstance(module, SparseFFN)}
    hooks: dict = {}
    worst: float | None = None

    def enters(_, args: tuple, layer: FeedForward) -> None:
        nonlocal worst
        hooks[layer.name].remove()  # judging runs the layer, too
        for x in (args[0], *hard_inputs(layer, args[0])):
            ratio = layer_ratio(layer, swapped[layer.name], x)
            if not ratio <= 1.0:
                raise clock.WrongResult(f"{layer.name} is off by {ratio:.3g} times what is allowed: nothing was timed")
            worst = max(worst or 0.0, ratio)

    for layer in layers:
        if layer.name in swapped and swapped[layer.name].registered:  # which can be called by itself
            hooks[layer.name] = layer.module.register_forward_pre_hook(functools.partial(enters, layer=layer))
    try:
        run()
    finally:
        for hook in hooks.values():
            hook.remove()
    return worst


def hard_inputs(layer: FeedForward, x: Tensor) -> list[Tensor]:
    """Return two more inputs like this one [..., d_model]: with values at the threshold of inputs (0 if the layer has
    none), and with one that is no number."""
    at = layer.cut.input if layer.cut else 0.0
    tied, spoilt = (x.clone(memory_format=torch.contiguous_format) for _ in range(2))
    tied[..., ::3], tied[..., 1::5] = at, -at
    spoilt.view(-1, x.shape[-1])[:1, -1] = math.nan
    return [tied, spoilt]


@torch.no_grad()
def layer_ratio(layer: FeedForward, sparse: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Return the worst error of a row of sparse(x), over what is allowed: at most 1.0 where it is right. x: [...,
    d_model], of which _ROWS rows are looked at. Rows of x with NaN have to give NaN where the dense layer does."""
    rows = [t.reshape(-1, t.shape[-1]) for t in (x, sparse(x), layer.module(x))]
    some = torch.linspace(0, len(rows[0]) - 1, min(_ROWS, len(rows[0])), device=x.device).long()
    x, y, dense = (t[some] for t in rows)
    if not torch.equal(y.isnan(), dense.isnan()):
        return math.inf
    x, y, dense = (t[x.isfinite().all(1)] for t in (x, y, dense))
    worth, keep, doubtful = _hidden(layer, x)
    down, bias = _wide(layer.down)
    ours, theirs = (_nearest(t.double(), worth, keep, doubtful, down, bias) for t in (y, dense))
    return accuracy.worst_row(y, ours + (dense - theirs), ours)[0]


def _wide(part) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of a projection in float64."""
    return part.weight.double(), None if part.bias is None else part.bias.double()


def _hidden(layer: FeedForward, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each neuron [tokens, d_ff] its hidden value in float64, whether it is kept, and whether roundings may
    decide that: where what its threshold looks at is within rounding of it.

    A projection is off by the roundings of its sums and its own one; behind the activation by _SLOPE times that and
    another one; a product of two by each times the other, and another one."""
    acts, cut, one = layer.acts, layer.cut, torch.finfo(x.dtype).eps
    ours = isinstance(acts, ThresholdedActivation)
    act = acts.activation if ours else acts if cut and acts is not None else reference.relu
    threshold = torch.tensor(cut.hidden if cut else acts.threshold, dtype=x.dtype).item()  # as torch compares it
    inputs = (cut.of_input(x) if cut else x).double()

    def projected(part) -> tuple[Tensor, Tensor]:
        weight, bias = _wide(part)
        value, size = (
            linear(inputs, weight, bias),
            linear(inputs.abs(), weight.abs(), bias if bias is None else bias.abs()),
        )
        return value, weight.shape[1] * _SUMS * size + one * value.abs()

    first, off = projected(layer.pattern)
    worth = decides = act(first.clone())
    off = _SLOPE * off + one * worth.abs()
    if layer.gate is not None:
        up, of_up = projected(layer.up)
        worth = decides * up
        if cut:
            off = off * up.abs() + decides.abs() * of_up + one * worth.abs()
            decides = worth
    doubtful = (decides.abs() - threshold).abs() <= off
    return worth, ~(decides.abs() < threshold), doubtful


def _nearest(y: Tensor, worth: Tensor, keep: Tensor, doubtful: Tensor, down: Tensor, bias: Tensor | None) -> Tensor:
    """Return the exact result [tokens, d_model] plus what those doubtful values add that y seems to contain: y without
    the others is a sum of some of them, and least squares say which, as there are fewer than d_model."""
    exact = linear(torch.where(keep & ~doubtful, worth, 0.0), down, bias)
    for row, unsure in enumerate(doubtful):
        if not len(which := unsure.nonzero()[:, 0]):
            continue
        adds = worth[row, which, None] * down.t()[which]
        squares = adds @ adds.t()
        squares.diagonal().add_(1e-12 * squares.diagonal().sum() + 1e-300)
        shares = torch.linalg.solve(squares, adds @ (y[row] - exact[row]))
        exact[row] += (shares > 0.5).double() @ adds
    return exact
