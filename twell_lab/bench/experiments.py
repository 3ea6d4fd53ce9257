"""Experiments of twell_lab.sparsities as rows: switching a sparse adapter beside fusing a LoRA; dropout as 2:4; steps
of training with an operand that is made 2:4."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from ..core import DeviceError
from ..models.tiny import LanguageModel, ModelConfig
from ..ops import clock
from ..sparsities.adapters import drawn, switch
from ..sparsities.checks import refusals
from ..sparsities.two_four import tensor_kind, usual_backend
from ..sparsities.two_four_training import OPERANDS, SIDE, TwoFourLinear, two_four, two_four_dropout
from ..training.config import TrainConfig
from . import losses, rows

SWITCH, FUSE = "switch in place", "fuse LoRA"
Product = tuple[int, int, int]  # tokens, d_ff, d_model


MODEL = ModelConfig(d_model=2048, layers=8, heads=16, d_ff=5632)  # in whose matrices weights are switched
SMALL = ModelConfig(d_model=512, layers=4, heads=8, d_ff=2048)  # for a CPU: about five minutes on two cores
SHARES = (0.01, 0.02)  # of the weights
PRODUCTS: tuple[Product, ...] = ((2048, 5632, 2048), (16384, 5632, 2048), (131072, 5632, 2048))  # on a GPU


@torch.no_grad()
def adapter_rows(config: ModelConfig, share: float) -> list[dict]:
    """Return the rows of switching on and off once, in place, and of fusing and unfusing a LoRA of as many parameters;
    of random weights. `worst_error`: the largest difference from the weights of before, once it is off."""
    device = clock.present_device(None)
    torch.manual_seed(0)
    with torch.device(device):
        model = LanguageModel(config).to(clock.dtype_for(device)).requires_grad_(False)
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
    shared = rows.about("adapters", model.head.weight, workload, share=share, **rows.sizes_of(config))
    return rows.measured(shared, calls, facts=facts, base=None, rounds=10)


# ---- products with an operand that is made 2:4, on a GPU, in bfloat16


def product_rows(sizes: Product, backend: str | None = None) -> list[dict]:
    """Return the rows of y = h Wd^T with h [tokens, d_ff] dropped 2:4, with its compression and without, beside the
    dense product. Drawing the pattern is in none of them. clock.WrongResult where the 2:4 product is more than twice as
    far from float64 as the dense one. backend: of torch's, by default cuSPARSELt where it runs."""
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
    ratio = rows.hold("the 2:4 product, beside the dense one", ours / max(dense, 1e-30), 2.0)
    calls: rows.Calls = {
        "dense product": lambda turn: h @ weight.t(),
        "compress": lambda turn: kind.from_dense(h),
        "2:4 product": lambda turn: sparse @ weight.t(),
        "compress and 2:4 product": lambda turn: kind.from_dense(h) @ weight.t(),
    }
    facts = {path: {"error_over_dense": ratio} for path in calls if path.endswith("2:4 product")}
    with torch.no_grad():
        return _beside_first("dropout", "y = h Wd^T", calls, facts, sizes, backend)


def step_rows(sizes: Product, left_out: dict[str, str]) -> list[dict]:
    """Return the rows of forward and backward of one linear layer, whose input [tokens, d_ff] is a squared ReLU, with
    weight or input made 2:4 in every step, beside the dense layer; and of choosing and packing alone. left_out: takes
    what does not run here, or computes something else, and why."""
    draw, (tokens, d_ff, d_model) = _drawing(), sizes
    x = torch.relu(draw(tokens, d_ff) - 1).square().bfloat16()
    dense = nn.Linear(d_ff, d_model, False, x.device, x.dtype)
    with torch.no_grad():
        dense.weight.copy_(draw(d_model, d_ff) / d_ff**0.5)
    dy = draw(tokens, d_model).bfloat16()

    def entry(operand: str) -> rows.Entry:
        layer = TwoFourLinear(dense, operand) if operand else dense

        def step(turn: int) -> None:
            dense.weight.grad = None
            layer(x.detach().requires_grad_()).backward(dy)

        return step, checked_step(layer, x[:SIDE])

    def chosen(matrix: Tensor) -> rows.Entry:
        two_four(matrix)
        return lambda turn: two_four(matrix), {}

    ways = {f"2:4 {operand} step" if operand else "dense step": partial(entry, operand) for operand in ("", *OPERANDS)}
    for operand, matrix in (("weight", dense.weight.detach()), ("input", x)):
        ways[f"2:4 {operand} chosen"] = partial(chosen, matrix)
    calls, facts = rows.admit(ways, left_out)
    if len(calls) == 1:  # the dense step alone
        return []
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
    rows.hold(f"the {layer}", error, 4 * torch.finfo(x.dtype).eps)
    return {"error": error, "dropped": lost}


def _drawing() -> partial:
    """Return a function that draws normal values of given sizes, on the GPU where there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return partial(torch.randn, device=device, generator=torch.Generator(device).manual_seed(0))


def _beside_first(kind: str, workload: str, calls: rows.Calls, facts: dict, sizes: Product, backend: str) -> list[dict]:
    here = torch.empty(0, dtype=torch.bfloat16, device=clock.present_device(None))
    shared = rows.about(kind, here, workload, **dict(zip(("tokens", "d_ff", "d_model"), sizes)), backend=backend)
    return rows.measured(shared, calls, facts=facts, base=next(iter(calls)), rounds=15)


def dropout_rows(config: TrainConfig, seed: int) -> list[dict]:
    """Return a row of each kind of dropout (losses.dropout_row); weights, windows and schedule are the same."""
    return [losses.dropout_row(replace(config, seed=seed), kind) for kind in losses.DROPOUTS]


def sections(
    left_out: dict[str, str], model: ModelConfig | None = None, config: TrainConfig | None = None
) -> rows.Sections:
    """Return the steps of the record. model: for adapters; config: of the trainings with dropout."""
    on_gpu = torch.cuda.is_available()
    model = model or (MODEL if on_gpu else SMALL)
    config = config or (losses.DROPPED if on_gpu else losses.SMALL_DROPPED)
    products = PRODUCTS if on_gpu else ()
    return {
        "adapters": rows.steps(adapter_rows, [model], SHARES),
        "products": rows.steps(product_rows, products),
        "2:4 in training": rows.steps(step_rows, products, [left_out]),
        "dropout": rows.steps(dropout_rows, [config], losses.SEEDS),
    }
