"""A layer by torch's operations, and its gradients: what the kernels' are held against. Tensors come in this order: x
[..., d_model], gate, up, down and their biases, None for what is not there; without a gate the layer is plain."""

import torch
from torch import Tensor
from torch.nn.functional import linear


def first(x, gate=None, up=None, down=None, gate_bias=None, up_bias=None, down_bias=None) -> Tensor:
    """Return what decides which neurons fire: the gate, or up in a plain layer."""
    return linear(x, up, up_bias) if gate is None else linear(x, gate, gate_bias)


def step(*tensors: Tensor | None, keep: Tensor | None = None, rounded: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (y, the sum of |h| of each token). keep: which neurons fire, boolean [..., d_ff]; by default those whose gate
    is above zero. rounded: the values that `first` is to have."""
    x, gate, up, down, _, up_bias, down_bias = tensors
    value = first(*tensors)
    value = value if rounded is None else value + (rounded - value).detach()
    fired = torch.relu(value) if keep is None else torch.where(keep, value, 0.0)
    h = fired if gate is None else fired * linear(x, up, up_bias)
    return linear(h, down, down_bias), h.abs().sum(-1, dtype=torch.promote_types(h.dtype, torch.float32))


def gradients(function, tensors, dy: Tensor, dl1: Tensor, **how) -> list[Tensor | None]:
    """Return y, the sums of |h|, and the gradients of all tensors. function: tensors -> (y, sums of |h|, ...), as `step`.
    dy, dl1: the gradients of these two."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in tensors]
    with torch.enable_grad():
        y, l1, *_ = function(*leaves, **how)
        found = iter(torch.autograd.grad([y, l1], [t for t in leaves if t is not None], [dy, dl1]))
    return [y.detach(), l1.detach(), *(None if t is None else next(found) for t in leaves)]


def exact_gradients(tensors, dy: Tensor, dl1: Tensor, **how) -> list[Tensor | None]:
    """Return the same of `step` in float64. how: its options."""
    wide = [None if t is None else t.double() for t in tensors]
    return gradients(step, wide, dy.double(), dl1.double(), **how)
