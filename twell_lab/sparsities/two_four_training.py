"""2:4 chosen anew in every step of training: of weights, or of activations after a squared ReLU.

    layer.up_proj = TwoFourLinear(layer.up_proj)                # weights; the same Parameters
    layer.down_proj = TwoFourLinear(layer.down_proj, "input")   # activations

Of each 4 x 4 values at most two in each row and each column stay, the largest in magnitude first, so that both products
that they are an operand of skip the zeros (`two_four.bound`). The gradient passes straight through, as if all
had stayed, so what was dropped can come back.

- "weight": y = x W^T and dx = dy W gain, dW is dense (torch's way; Hu et al., arXiv 2404.01847, have variants).
- "input": y = x W^T and dW = dy^T x gain, where x [tokens, d_ff] enters the down projection. After a squared ReLU large
  values are few, so little is lost (Haziza et al., arXiv 2503.16672). A tile holds four neighbouring tokens.

On a GPU the choice is torch's (the kernel behind `prune_dense_static_sort`), the products are cuSPARSELt's or
CUTLASS's. For cuSPARSELt that kernel packs in the layout of GPUs of 8.x alone; here cuSPARSELt packs itself, in two
passes more. On a CPU the same is computed densely, which is the reference. On an H100 packing in
each step took longer than the products gained."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core import InputError
from .checks import checked_linear, refusals
from .semi_structured import tensor_kind, usual_backend
from .two_four import two_four_mask

OPERANDS = ("weight", "input")
ALGORITHM = "largest_abs_values_greedy"  # of torch._sparse_semi_structured_tile; its default ranks signed values
SIDE = 64  # on a GPU rows and columns of what becomes 2:4 are multiples of it; tokens are filled up with zeros


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
    """y = x W^T + b of which one operand, "weight" or "input", is made 2:4 in every forward, also in evaluation. Under
    autocast both are cast first, as nn.Linear's are.

    linear: a plain nn.Linear, whose Parameters are taken over. backend: as of `two_four`, whose errors forward raises:
    the operand's widths are multiples of 4, on a GPU of SIDE."""

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
                missing = -len(rows) % side if len(rows) else side
                filled = F.pad(rows, (0, 0, 0, missing)) if missing else rows
                y = (two_four(filled, backend=self.backend) @ weight.t())[: len(rows)]
            y = y if bias is None else y + bias
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, 2:4 {self.operand}"
