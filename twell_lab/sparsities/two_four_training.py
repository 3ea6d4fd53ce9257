"""2:4 chosen anew in every step of training: of weights, of activations after a squared ReLU, or as dropout.

    layer.up_proj = TwoFourLinear(layer.up_proj)                # weights; the same Parameters
    layer.down_proj = TwoFourLinear(layer.down_proj, "input")   # activations
    layer.dropout = TwoFourDropout()                            # in the place of nn.Dropout(0.5)

Of each 4 x 4 values at most two in each row and each column stay, the largest in magnitude first, so that both products
that they are an operand of skip the zeros. The gradient passes straight through, as if all had stayed, so what was
dropped can come back. Of a "weight" y = x W^T and dx = dy W gain (torch's way; Hu et al., arXiv 2404.01847), of an
"input" [tokens, d_ff] y and dW = dy^T x: after a squared ReLU large values are few, so little is lost (Haziza et al.,
arXiv 2503.16672).

On a GPU the choice is torch's (the kernel behind `prune_dense_static_sort`), which packs for cuSPARSELt in the layout
of GPUs of 8.x alone; here cuSPARSELt packs itself, in two passes more. On a CPU the same is computed densely, which is
the reference. On an H100 packing in each step took longer than the products gained."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core import InputError
from .checks import checked_linear, refusals, shown
from .two_four import tensor_kind, two_four_mask, usual_backend

OPERANDS = ("weight", "input")
ALGORITHM = "largest_abs_values_greedy"  # of torch._sparse_semi_structured_tile; its default ranks signed values
SIDE = 64  # on a GPU rows and columns of what becomes 2:4 are multiples of it; tokens are filled up with zeros
_PAIRS = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))  # what may stay of four in dropout


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values: Tensor, backend: str | None) -> Tensor:
        if not values.is_cuda:
            return values.masked_fill(~two_four_mask(values, transposable=True), 0)
        return _packed(values, backend or usual_backend())

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient, None


def two_four(values: Tensor, *, backend: str | None = None) -> Tensor:
    """Keep at most two of each four neighbours of a row, and of a column; the gradient is that of all values.

    values: [rows, columns], multiples of 4; on a GPU bfloat16 or float16, multiples of SIDE. Returns on a GPU torch's
    2:4 tensor of this backend, on a CPU a dense one. InputError for others; DeviceError as `tensor_kind`."""
    return _StraightThrough.apply(values, backend)


def _packed(values: Tensor, backend: str) -> Tensor:
    if any(n % SIDE or not n for n in values.shape):
        raise InputError(f"the values have shape {list(values.shape)}; multiples of {SIDE} are accepted on a GPU")
    kind = tensor_kind(values.shape, values.dtype, values.device, backend)
    values = values.contiguous()
    with refusals(f"torch's {backend}"):
        if backend == "cutlass":
            return kind.prune_dense_static_sort(values, algorithm=ALGORITHM)
        masks = torch._sparse_semi_structured_tile(values, algorithm=ALGORITHM, use_cutlass=True)[4]
        kept = torch._sparse_semi_structured_apply_dense(values, masks)
        packed, packed_t = (torch._cslt_compress(t) for t in (kept, kept.t().contiguous()))
    fused = True  # y is written as it is wanted and not as y^T; newer releases always do
    return kind(kept.shape, packed, None, packed_t, None, None, fused)


class TwoFourLinear(nn.Linear):
    """y = x W^T + b of which one operand, "weight" or "input", is made 2:4 in every forward, also in evaluation.
    linear: a plain nn.Linear, whose Parameters are taken over. backend, and the errors of forward: as of `two_four`."""

    def __init__(self, linear: nn.Linear, operand: str = "weight", *, backend: str | None = None) -> None:
        if operand not in OPERANDS:
            raise InputError(f"operand is {operand!r:.80}; accepted: {', '.join(map(repr, OPERANDS))}")
        weight = checked_linear(linear).weight
        super().__init__(linear.in_features, linear.out_features, False, "meta", weight.dtype)
        self.weight, self.bias = weight, linear.bias
        self.operand, self.backend = operand, backend
        self.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        device, weight, bias = x.device.type, self.weight, self.bias
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        rows = x.reshape(-1, x.shape[-1])
        with torch.autocast(device, enabled=False):
            if self.operand == "weight":
                y = F.linear(rows, two_four(weight, backend=self.backend))
            else:
                side = SIDE if x.is_cuda else 4
                filled = F.pad(rows, (0, 0, 0, -len(rows) % side if len(rows) else side))
                y = (two_four(filled, backend=self.backend) @ weight.t())[: len(rows)]
            y = y if bias is None else y + bias
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, 2:4 {self.operand}"


def two_four_dropout(h: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """Keep two of each four neighbours in the last dimension, each of the six pairs equally likely, doubled; the others
    become +0. Gradients go through what stays, doubled. InputError for a last dimension that is no multiple of 4, and
    for values that are not floating-point.

    As in dropout at one half (Srivastava et al., JMLR 2014) every value is kept with probability 1/2, but of four
    exactly two are: for a sum over four terms s = w_i h_i the variance is 4/3 sum s_i^2 - 1/3 (sum s_i)^2 and not sum
    s_i^2, which is the same on average where signs are independent."""
    if not isinstance(h, Tensor) or not h.is_floating_point() or not h.dim() or h.shape[-1] % 4:
        raise InputError(f"h is {shown(h)}; floating-point values, a multiple of 4 in the last dimension, are accepted")
    stays = torch.zeros(6, 4, dtype=torch.bool).scatter_(1, torch.tensor(_PAIRS), True).to(h.device)
    pairs = torch.randint(6, (*h.shape[:-1], h.shape[-1] // 4), device=h.device, generator=generator)
    return torch.where(stays[pairs].view(h.shape), 2 * h, 0)


class TwoFourDropout(nn.Module):
    """`two_four_dropout` in training, and nothing in evaluation."""

    def forward(self, h: Tensor) -> Tensor:
        return two_four_dropout(h) if self.training else h
