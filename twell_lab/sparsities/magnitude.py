"""Magnitude pruning: the smallest weights become zero, once or again and again while a model trains.

    kept = magnitude_mask(weight, 0.9)          # bool [out, in]: a tenth of the weights
    kept = threshold_mask(weight, 0.01)         # those above a threshold
    model = prune(model, 0.9)                   # every nn.Linear becomes a SparseLinear with 90% of its weights zero
    model = to_linears(model)                   # nn.Linear again, with zeros in them
    proximal_step(optimizer, 1e-3, weights)     # L1 by soft-thresholding, which trains zeros in

Exactly as many weights go as were asked for, and of equal magnitudes the first in row order stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from math import inf

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core import InputError
from ..layers.find import Only, check_model, replaced, selected
from ..layers.probe import raise_all, title
from .checks import check_number, checked_linear, checked_weight
from .weights import SparseLinear

Mask = Callable[[Tensor], Tensor]  # from a weight [out, in] to bool [out, in], True for what is kept


def kept_of(count: int, sparsity: float) -> int:
    """Return how many of `count` values stay; round(sparsity * count) go. InputError for a sparsity that is no number
    from 0 up to, but not, 1."""
    accepted = "a share of the weights, from 0 up to, but not, 1,"
    return count - round(check_number("sparsity", sparsity, lambda share: 0 <= share < 1, accepted) * count)


def largest(sizes: Tensor, count: int) -> Tensor:
    """Return which values of `sizes`, finite, are the `count` largest: bool, of its shape, exactly `count` of them
    True; of equal ones the first in row order, on every device. count: 0 to sizes.numel()."""
    flat = sizes.reshape(-1)
    if count in (0, flat.numel()):
        return torch.full_like(sizes, count > 0, dtype=torch.bool)
    threshold = flat.topk(count, sorted=False).values.min()
    above, equal = flat > threshold, flat == threshold
    return (above | equal & (equal.cumsum(0) <= count - above.sum())).view(sizes.shape)


def magnitude_mask(weight: Tensor, sparsity: float) -> Tensor:
    """Keep the weights of largest magnitude: bool [out, in], True for what is kept; exactly round(sparsity * out * in)
    go. weight: [out, in], finite floating-point values of 16 bits or more. InputError for others."""
    weight = checked_weight(weight)
    return largest(weight.abs(), kept_of(weight.numel(), sparsity))


def threshold_mask(weight: Tensor, threshold: float) -> Tensor:
    """Keep the weights above a threshold in magnitude: bool [out, in]; how many stay depends on the weights. InputError
    for a threshold that is no finite number from 0 up, and for weights as `magnitude_mask`."""
    threshold = check_number("threshold", threshold, lambda bound: 0 <= bound < inf, "a finite number from 0 up")
    return checked_weight(weight).abs().double() > threshold  # compared in 16 bits, the threshold would be rounded


def prune(
    model: nn.Module,
    sparsity: float | None = None,
    *,
    mask: Mask | None = None,
    only: Only | None = None,
    gradient: str = "masked",
) -> nn.Module:
    """Make the nn.Linear layers of a model SparseLinear, in place; those that are already are updated. Returns the
    model, or of an nn.Linear itself the SparseLinear. Make the optimizer afterwards.

    sparsity: the share of each layer's weights that go (`magnitude.magnitude_mask`). mask: in its stead, a function
    from a weight to what is kept. only: the layers for which only(name, module) is true. gradient: of new
    SparseLinears. InputError, with nothing changed, for a model without such layers, and by name for layers that are no
    plain nn.Linear, share their weight, or are not finite."""
    check_model(model)
    if (sparsity is None) == (mask is None) or not (mask is None or callable(mask)):
        raise InputError(f"sparsity is {sparsity!r:.80} and mask {mask!r:.80}; a share or a function, one, is accepted")
    if mask is None:
        kept_of(0, sparsity)  # refused here, not by the name of each layer
        mask = partial(magnitude_mask, sparsity=sparsity)
    changed, updated, reasons = {}, [], []
    holders = Counter(id(p) for module in model.modules() for p in module._parameters.values())
    for name, layer in model.named_modules():
        if not isinstance(layer, (nn.Linear, SparseLinear)) or not selected(only, name, layer):
            continue
        try:
            if isinstance(layer, SparseLinear):
                updated.append((layer, mask(checked_weight(layer.every()))))
            elif holders[id(checked_linear(layer).weight)] > 1:
                raise InputError("its weight is another module's, too; accepted: an `only` that leaves it out")
            else:
                changed[layer] = SparseLinear.from_linear(layer, mask(checked_weight(layer.weight)), gradient=gradient)
        except InputError as error:
            reasons.append(f"{title(name, layer)}: {error}")
    raise_all(reasons)
    if not changed and not updated:
        raise InputError(f"no nn.Linear to prune in {type(model).__name__}; accepted: one that `only` takes, or more")
    for layer, chosen in updated:
        layer.update(chosen)
    return replaced(model, changed)


def to_linears(model: nn.Module) -> nn.Module:
    """Make the SparseLinear layers of a model nn.Linear again, in place, with zeros for what was pruned; returns it."""
    check_model(model)
    return replaced(model, {layer: layer.to_linear() for layer in model.modules() if isinstance(layer, SparseLinear)})


@torch.no_grad()
def proximal_step(optimizer: torch.optim.Optimizer, l1: float, weights: Iterable[nn.Parameter]) -> None:
    """Take one step of the optimizer, then the proximal step of l1 * sum |w|: w <- sign(w) max(|w| - lr * l1, 0), which
    gives exact zeros (ISTA; Daubechies et al., arXiv math/0307152). weights: parameters of the optimizer that are
    shrunk, in float32, by the rates of their groups. InputError, before the step, for an l1 that is not from 0 up and
    weights that the optimizer does not have."""
    l1 = check_number("l1", l1, lambda value: 0 <= value < inf, "a finite number from 0 up")
    rates = {p: group for group in optimizer.param_groups for p in group["params"]}
    shrunk = dict.fromkeys(weights)  # each once
    if strange := [p for p in shrunk if p not in rates]:
        which = f"{len(strange)} of {len(shrunk)} weights, the first of shape {list(strange[0].shape)},"
        raise InputError(f"{which} are none of the optimizer's; its own parameters are accepted")
    optimizer.step()
    for weight in shrunk:
        weight.copy_(F.softshrink(weight, float(rates[weight]["lr"]) * l1))
