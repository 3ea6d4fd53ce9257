"""2:4 chosen anew in every step of training: of weights, or of activations after a squared ReLU.

    train_two_four(model)                                        # weights: every nn.Linear
    train_two_four(model, "input", only=lambda name, module: name.endswith("down_proj"))    # its activations
    model = to_linears(model)                                    # nn.Linear again; weights as they were trained

Of each 4 x 4 values at most two in each row and each column stay, the largest in magnitude first, so that the values
and their transpose are 2:4, and both products that they are an operand of skip the zeros (sparsities.two_four writes
the three products of a layer out). The gradient passes straight through, as if all had stayed, so what was dropped can
come back.

- "weight": y = x W^T and dx = dy W gain, dW is dense (torch's way; Hu et al., arXiv 2404.01847, have variants).
- "input": y = x W^T and dW = dy^T x gain, where x [tokens, d_ff] enters the down projection. After a squared ReLU most
  of x is zero already and large values are few, so little is lost (Haziza et al., arXiv 2503.16672): `dropped` says how
  much. A tile holds four neighbouring tokens, so what stays of one depends on the others.

On a GPU the choice is torch's (the kernel behind `prune_dense_static_sort` of its 2:4 tensors), the products are
cuSPARSELt's or CUTLASS's. That kernel packs both forms in the same pass, for cuSPARSELt in the layout that it has for
GPUs of 8.x and multiples of 128 alone; here cuSPARSELt packs its two forms itself, which takes two passes more and
holds for every GPU that it knows. `step_times` says whether the products gain what choosing and packing take.
torchao's `SemiSparseLinear` rests on the same kernel, but chooses the largest values with their sign, so that it drops
large negative weights; here magnitudes count. On a CPU the same is computed densely, which is the reference; where
values tie a GPU may keep others."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core import DeviceError, InputError
from ..layers.anatomy import Only, check_model, raise_all, replaced
from ..ops import clock
from .two_four import tensor_kind, two_four_mask, usual_backend
from .weights import checked_linear, prunable

OPERANDS = ("weight", "input")
ALGORITHM = "largest_abs_values_greedy"  # of torch._sparse_semi_structured_tile; its default ranks signed values
SIDE = 64  # on a GPU rows and columns of what becomes 2:4 are multiples of it; tokens are filled up with zeros


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values: Tensor, backend: str | None) -> Tensor:
        if backend is None:
            return values.masked_fill(~two_four_mask(values, transposable=True), 0)
        return _packed(values, backend)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient, None


def two_four(values: Tensor, *, backend: str | None = None) -> Tensor:
    """The values with at most two of each four neighbours of a row, and of a column, kept; the gradient is that of all.

    Args:
        values: [rows, columns], multiples of 4; on a GPU bfloat16 or float16, multiples of SIDE.
        backend: of torch's 2:4 tensor on a GPU, "cutlass" or "cusparselt"; None takes cuSPARSELt where torch has it.

    Returns:
        On a GPU torch's 2:4 tensor, which matrix products take as one of their operands; on a CPU a dense one.

    Raises:
        InputError: for other sizes and dtypes, and on a CPU for values that are not finite.
        DeviceError: for a GPU before sm_80, without the backend, or one that its kernels refuse.
    """
    return _StraightThrough.apply(values, backend or usual_backend() if values.is_cuda else None)


def _packed(values: Tensor, backend: str) -> Tensor:
    if any(each % SIDE or not each for each in values.shape):
        raise InputError(f"the values have shape {list(values.shape)}; multiples of {SIDE} are accepted on a GPU")
    kind = tensor_kind(values.shape, values.dtype, values.device, backend)
    values = values.contiguous()
    try:
        if backend == "cutlass":
            return kind.prune_dense_static_sort(values, algorithm=ALGORITHM)
        masks = torch._sparse_semi_structured_tile(values, algorithm=ALGORITHM, use_cutlass=True)[4]
        kept = torch._sparse_semi_structured_apply_dense(values, masks)
        packed, packed_t = (torch._cslt_compress(each) for each in (kept, kept.t().contiguous()))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise DeviceError(
            f"torch's {backend} does not pack 2:4 values here: {str(error).splitlines()[0]:.200}; accepted: a backend "
            "and a GPU that it runs on"
        ) from error
    fused = True  # y is written as it is wanted and not as y^T; newer releases always do
    return kind(kept.shape, packed, None, packed_t, None, None, fused)


@torch.no_grad()
def dropped(values: Tensor) -> float:
    """What `two_four` would lose of these values [..., columns], as a share of their norm; rows are filled up with
    zeros to a multiple of 4. InputError for columns that are none, and for values that are not finite."""
    rows = _filled(values.reshape(-1, values.shape[-1]), 4)
    lost, norm = rows.masked_fill(two_four_mask(rows, transposable=True), 0).double().norm(), rows.double().norm()
    return float(lost / norm) if norm else 0.0


def _filled(rows: Tensor, multiple: int) -> Tensor:
    missing = -len(rows) % multiple
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


class TwoFourLinear(nn.Linear):
    """y = x W^T + b of which one operand is made 2:4 in every forward, in training and in evaluation: x [...,
    in_features], y [..., out_features].

    Under autocast both operands are cast first, as nn.Linear's are. Weight and bias are those of the nn.Linear that it
    was made of, the same Parameters.

    Args:
        linear: an nn.Linear whose widths are multiples of 4, on a GPU of SIDE.
        operand: "weight" or "input".
        backend: as of `two_four`.

    Raises:
        InputError: for another operand or backend, other widths, and a module that is not exactly an nn.Linear, or has
            hooks. A forward raises what `two_four` does.
    """

    def __init__(self, linear: nn.Linear, operand: str = "weight", *, backend: str | None = None) -> None:
        if operand not in OPERANDS:
            raise InputError(f"operand is {operand!r:.80}; accepted: {', '.join(map(repr, OPERANDS))}")
        if backend not in (None, "cutlass", "cusparselt"):
            raise InputError(f"backend is {backend!r:.80}; accepted: 'cutlass', 'cusparselt' and None")
        weight = checked_linear(linear).weight
        by = SIDE if weight.is_cuda else 4
        sizes = weight.shape if operand == "weight" else weight.shape[1:]
        if any(each % by or not each for each in sizes):
            raise InputError(
                f"the {operand} is [..., {linear.in_features}] of a layer with the weight "
                f"{list(weight.shape)}; multiples of {by} are accepted"
            )
        super().__init__(linear.in_features, linear.out_features, False, "meta", weight.dtype)
        self.weight, self.bias = weight, linear.bias
        self.operand, self.backend = operand, backend
        self.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        weight, bias = self.weight, self.bias
        if dtype is not None:
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        rows = x.reshape(-1, x.shape[-1])
        with torch.autocast(device, enabled=False):
            if self.operand == "weight":
                y = F.linear(rows, two_four(weight, backend=self.backend))
            elif len(rows):
                y = two_four(_filled(rows, SIDE if x.is_cuda else 4), backend=self.backend) @ weight.t()
                y = y[: len(rows)]
            else:
                y = F.linear(rows, weight)
            y = y if bias is None else y + bias
        return y.view(*x.shape[:-1], self.out_features)

    def to_linear(self) -> nn.Linear:
        """An nn.Linear with the same Parameters: all weights, also those that `two_four` would drop."""
        linear = nn.Linear(self.in_features, self.out_features, False, "meta", self.weight.dtype)
        linear.weight, linear.bias = self.weight, self.bias
        return linear.train(self.training)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, 2:4 {self.operand}"


def train_two_four(
    model: nn.Module, operand: str = "weight", *, only: Only | None = None, backend: str | None = None
) -> nn.Module:
    """Make the nn.Linear layers of a model TwoFourLinear, in place; returns the model. Optimizers stay as they are.

    Args:
        model: any module. An nn.Linear itself is returned as a TwoFourLinear.
        operand, backend: of the layers.
        only: the layers for which only(name, module) is true.

    Raises:
        InputError: with nothing changed, for a model without such layers, and for layers that TwoFourLinear or
            `weights.prune` refuses.
    """
    check_model(model)
    made, reasons = {}, []
    for name, module in prunable(model, only).items():
        try:
            made[module] = TwoFourLinear(module, operand, backend=backend)
        except InputError as error:
            reasons.append(f"{name or 'the model'}: {error}")
    raise_all(reasons)
    return replaced(model, made)


def to_linears(model: nn.Module) -> nn.Module:
    """Make the TwoFourLinear layers of a model nn.Linear again, in place (`TwoFourLinear.to_linear`); returns it."""
    check_model(model)
    return replaced(model, {each: each.to_linear() for each in model.modules() if isinstance(each, TwoFourLinear)})


# ---- whether it is faster ----


def step_times(
    tokens: int, in_features: int, out_features: int, *, dtype: torch.dtype = torch.bfloat16, backend: str | None = None
) -> list[dict]:
    """Time forward and backward of one linear layer whose input is a squared ReLU, on a GPU, by device events.

    Returns:
        Rows, JSON-able: path ("dense step", "2:4 weight step", "2:4 input step", and what choosing and packing takes of
        them: "2:4 weight chosen", "2:4 input chosen"), ms, spread, samples, the sizes and the backend; of the steps
        `error`, how far y is from float64 of the operands that were kept, as a share of its norm, and `dropped`, what
        of the operand's norm was not.

    Raises:
        InputError, DeviceError: as `two_four`.
        clock.WrongResult: where y is further off than four units of dtype's last place.
    """
    backend, device = backend or usual_backend(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tensor_kind((tokens, in_features), dtype, device, backend)
    draw = torch.Generator(device).manual_seed(0)
    drawn = lambda *sizes: torch.randn(*sizes, device=device, generator=draw)  # noqa: E731
    x = torch.relu(drawn(tokens, in_features) - 1).square().to(dtype)
    dense = nn.Linear(in_features, out_features, False, device, dtype)
    with torch.no_grad():
        dense.weight.copy_(drawn(out_features, in_features) / in_features**0.5)
    dy = drawn(tokens, out_features).to(dtype)
    layers = {"dense step": dense} | {
        f"2:4 {each} step": TwoFourLinear(dense, each, backend=backend) for each in OPERANDS
    }
    facts = {name: _checked(layer, x, dtype, backend) for name, layer in layers.items()}

    def step(layer: nn.Module):
        def run(turn: int) -> None:
            given = x.detach().requires_grad_()
            dense.weight.grad = None
            layer(given).backward(dy)

        return run

    calls = {name: step(layer) for name, layer in layers.items()}
    calls["2:4 weight chosen"] = lambda turn: two_four(dense.weight.detach(), backend=backend)
    calls["2:4 input chosen"] = lambda turn: two_four(x, backend=backend)
    sizes = {"tokens": tokens, "d_ff": in_features, "d_model": out_features, "backend": backend}
    found = []
    for path, samples in clock.time_cuda(calls, 15).items():
        ms, spread = clock.quartiles(samples)
        found.append({"path": path, "ms": ms, "spread": spread, **sizes, **facts.get(path, {}), "samples": samples})
    return found


@torch.no_grad()
def _checked(layer: nn.Module, x: Tensor, dtype: torch.dtype, backend: str) -> dict[str, float]:
    """How far the first rows of y are off, and what was dropped of the operand. Raises clock.WrongResult."""
    some = x[:SIDE]
    left, right, lost = some, layer.weight, 0.0
    if isinstance(layer, TwoFourLinear):
        whole = right if layer.operand == "weight" else some
        kept = two_four(whole, backend=backend).to_dense()
        lost = float((whole - kept).double().norm() / whole.double().norm())
        left, right = (left, kept) if layer.operand == "weight" else (kept, right)
    exact = left.double() @ right.double().t()
    error = float((layer(some).double() - exact).norm() / exact.norm())
    if not error <= 4 * torch.finfo(dtype).eps:
        raise clock.WrongResult(f"the {layer} is {error:.3g} of its norm off: nothing was timed")
    return {"error": error, "dropped": lost}
