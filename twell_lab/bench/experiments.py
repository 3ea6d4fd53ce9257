"""Experiments of twell_lab.sparsities as rows: switching a sparse adapter beside fusing a LoRA; dropout as 2:4; steps
of training with an operand that is made 2:4."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..core import DeviceError, TwellError
from ..models.tiny import LanguageModel, ModelConfig
from ..ops import clock
from ..sparsities.adapters import drawn, switch
from ..sparsities.checks import refusals
from ..sparsities.dropout import two_four_dropout
from ..sparsities.semi_structured import tensor_kind, usual_backend
from ..sparsities.two_four_training import OPERANDS, SIDE, TwoFourLinear, two_four
from ..training.config import TrainConfig
from . import losses, rows

SWITCH, FUSE = "switch in place", "fuse LoRA"
Product = tuple[int, int, int]  # tokens, d_ff, d_model


@dataclass(frozen=True)
class Shape:
    """model, shares: in whose matrices such shares of the weights are switched. config: of the trainings with dropout,
    one for each of `seeds` and each kind. products: those that are timed, on a GPU."""

    model: ModelConfig = ModelConfig(d_model=2048, layers=8, heads=16, d_ff=5632)
    shares: tuple[float, ...] = (0.01, 0.02)
    config: TrainConfig = TrainConfig(d_model=256, d_ff=1024, batch=32, context=256)
    seeds: tuple[int, ...] = (0, 1)
    products: tuple[Product, ...] = ((2048, 5632, 2048), (16384, 5632, 2048), (131072, 5632, 2048))
    device: str = "cuda"


SMALL = Shape(  # for a CPU: about five minutes on two cores
    ModelConfig(d_model=512, layers=4, heads=8, d_ff=2048),
    config=TrainConfig(layers=2, steps=300),
    products=(),
    device="cpu",
)


@torch.no_grad()
def adapter_rows(shape: Shape, share: float) -> list[dict]:
    """Return the rows of switching on and off once, in place, and of fusing and unfusing a LoRA of as many parameters;
    of random weights. `worst_error`: the largest difference from the weights of before, once it is off."""
    device = clock.present_device(shape.device)
    torch.manual_seed(0)
    with torch.device(device):
        model = LanguageModel(shape.model).to(clock.dtype_for(device)).requires_grad_(False)
    adapter, own = drawn(model, share), dict(model.named_parameters())
    weights = {name: own[name] for name in adapter}
    first, factors = {name: weight.clone() for name, weight in weights.items()}, {}
    for name, weight in weights.items():
        rank = max(1, round(len(adapter[name].places) / sum(weight.shape)))
        up, down = weight.new_empty(len(weight), rank), weight.new_empty(rank, weight.shape[1])
        factors[name] = up.normal_(std=0.01), down.normal_()

    def fuse(turn: int) -> None:
        for alpha in (1, -1):
            for name, weight in weights.items():
                weight.addmm_(*factors[name], alpha=alpha)

    calls, facts = {SWITCH: lambda turn: switch(model, switch(model, adapter)), FUSE: fuse}, {}
    values = [change.values for change in adapter.values()]
    trained = {SWITCH: values, FUSE: [t for pair in factors.values() for t in pair]}
    written = {SWITCH: values, FUSE: weights.values()}
    for path, call in calls.items():
        call(0)
        facts[path] = {
            "parameters": sum(t.numel() for t in trained[path]),
            "written_bytes": sum(t.nbytes for t in written[path]),
            "worst_error": max(float((weights[name] - first[name]).abs().max()) for name in weights),
        }
        for name, weight in weights.items():
            weight.copy_(first[name])
    workload = f"{share:.0%} of the weights, on and off once"
    shared = rows.about("adapters", model.head.weight, workload, share=share, **rows.sizes_of(shape.model))
    return rows.measured(shared, calls, facts=facts, base=None, rounds=10)


# ---- products with an operand that is made 2:4, on a GPU, in bfloat16


def product_rows(sizes: Product, backend: str | None = None) -> list[dict]:
    """Return the rows of y = h Wd^T with h [tokens, d_ff] dropped 2:4, with its compression and without, beside the
    dense product; of the backend of torch's that runs, cuSPARSELt if it does. Drawing the pattern is in none of them.
    clock.WrongResult where the 2:4 product is more than twice as far from float64 as the dense one."""
    if backend is None:
        try:
            return product_rows(sizes, usual_backend())
        except DeviceError:
            return product_rows(sizes, "cutlass")
    draw, (tokens, d_ff, d_model) = _drawing(), sizes
    h = two_four_dropout(torch.relu(draw(tokens, d_ff)).bfloat16(), generator=draw.keywords["generator"])
    weight = draw(d_model, d_ff).bfloat16() / d_ff**0.5
    kind = tensor_kind(h.shape, h.dtype, h.device, backend)
    with torch.no_grad(), refusals(f"torch's {backend}"):
        sparse = kind.from_dense(h)
        exact, results = h[:256].double() @ weight.double().t(), (h @ weight.t(), sparse @ weight.t())
    dense, ours = (float((y[:256].double() - exact).norm()) for y in results)
    ratio = ours / max(dense, 1e-30)
    if not ratio <= 2:
        raise clock.WrongResult(f"the 2:4 product is {ratio:.3g} times as far from float64: nothing was timed")
    calls: rows.Calls = {
        "dense product": lambda turn: h @ weight.t(),
        "compress": lambda turn: kind.from_dense(h),
        "2:4 product": lambda turn: sparse @ weight.t(),
        "compress and 2:4 product": lambda turn: kind.from_dense(h) @ weight.t(),
    }
    facts = {path: {"error_over_dense": ratio} for path in calls if path.endswith("2:4 product")}
    with torch.no_grad():
        return _beside_first("dropout", "y = h Wd^T", calls, facts, sizes, backend)


def step_rows(sizes: Product) -> list[dict]:
    """Return the rows of forward and backward of one linear layer, whose input [tokens, d_ff] is a squared ReLU, with
    weight or input made 2:4 in every step, beside the dense layer; and of choosing and packing alone. RuntimeError
    where it does not run here, so that a recording leaves it out; errors otherwise as of `checked_step`."""
    draw, (tokens, d_ff, d_model) = _drawing(), sizes
    x = torch.relu(draw(tokens, d_ff) - 1).square().bfloat16()
    dense = nn.Linear(d_ff, d_model, False, x.device, x.dtype)
    with torch.no_grad():
        dense.weight.copy_(draw(d_model, d_ff) / d_ff**0.5)
    dy = draw(tokens, d_model).bfloat16()

    def step(layer: nn.Module, turn: int) -> None:
        dense.weight.grad = None
        layer(x.detach().requires_grad_()).backward(dy)

    try:
        tensor_kind(x.shape, x.dtype, x.device)
        layers = {"dense step": dense} | {f"2:4 {operand} step": TwoFourLinear(dense, operand) for operand in OPERANDS}
        facts = {name: checked_step(layer, x[:SIDE]) for name, layer in layers.items()}
    except clock.WrongResult:
        raise
    except TwellError as error:
        raise RuntimeError(str(error)) from error
    calls: rows.Calls = {name: functools.partial(step, layer) for name, layer in layers.items()}
    calls["2:4 weight chosen"] = lambda turn: two_four(dense.weight.detach())
    calls["2:4 input chosen"] = lambda turn: two_four(x)
    return _beside_first("two_four_training", "y = h Wd^T, both ways", calls, facts, sizes, usual_backend())


@torch.no_grad()
def checked_step(layer: nn.Module, x: Tensor) -> dict[str, float]:
    """Return `error`, how far y is from float64 of the operands that were kept, as a share of its norm, and `dropped`,
    what of the operand's norm was not. clock.WrongResult for more than four units of the last place."""
    operands, lost = {"input": x, "weight": layer.weight}, 0.0
    if isinstance(layer, TwoFourLinear):
        whole = operands[layer.operand]
        rest = operands[layer.operand] = two_four(whole).to_dense()
        lost = float((whole - rest).double().norm() / whole.double().norm())
    exact = operands["input"].double() @ operands["weight"].double().t()
    error = float((layer(x).double() - exact).norm() / exact.norm())
    if not error <= 4 * torch.finfo(x.dtype).eps:
        raise clock.WrongResult(f"the {layer} is {error:.3g} of its norm off: nothing was timed")
    return {"error": error, "dropped": lost}


def _drawing() -> functools.partial:
    """Return a function that draws normal values of given sizes, on the GPU where there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return functools.partial(torch.randn, device=device, generator=torch.Generator(device).manual_seed(0))


def _beside_first(kind: str, workload: str, calls: rows.Calls, facts: dict, sizes: Product, backend: str) -> list[dict]:
    here = torch.empty(0, dtype=torch.bfloat16, device=clock.present_device(None))
    shared = rows.about(kind, here, workload, **dict(zip(("tokens", "d_ff", "d_model"), sizes)), backend=backend)
    return rows.table(shared, clock.time_cuda(calls, 15), facts, base=next(iter(calls)))


def dropout_rows(shape: Shape, seed: int) -> list[dict]:
    """Return a row of each kind of dropout (losses.dropout_row); weights, windows and schedule are the same."""
    return [losses.dropout_row(replace(shape.config, seed=seed), kind) for kind in losses.DROPOUTS]


def sections(left_out: dict | None = None, shape: Shape | None = None) -> rows.Sections:
    """Return the steps of the record."""
    shape = shape or (Shape() if torch.cuda.is_available() else SMALL)
    return {
        "adapters": [functools.partial(adapter_rows, shape, share) for share in shape.shares],
        "products": [functools.partial(product_rows, sizes) for sizes in shape.products],
        "2:4 in training": [functools.partial(step_rows, sizes) for sizes in shape.products],
        "dropout": [functools.partial(dropout_rows, shape, seed) for seed in shape.seeds],
    }
