"""Experiments of twell_lab.sparsities as rows: switching a sparse adapter beside fusing a LoRA; dropout as 2:4; steps
of training with an operand that is made 2:4."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from ..core import DeviceError, TwellError
from ..models.tiny import LanguageModel, ModelConfig
from ..ops import clock
from ..sparsities.adapters import switching
from ..sparsities.dropout import loss_effect, product_times
from ..sparsities.two_four_training import step_times
from ..training.config import TrainConfig
from . import rows


@dataclass(frozen=True)
class Shape:
    """model, shares: in whose matrices such shares of the weights are switched. config: of the trainings with dropout,
    one for each of `seeds` and each kind. products: (tokens, d_ff, d_model) of those that are timed, on a GPU."""

    model: ModelConfig = ModelConfig(d_model=2048, layers=8, heads=16, d_ff=5632)
    shares: tuple[float, ...] = (0.01, 0.02)
    config: TrainConfig = TrainConfig(d_model=256, d_ff=1024, batch=32, context=256)
    seeds: tuple[int, ...] = (0, 1)
    products: tuple[tuple[int, int, int], ...] = ((2048, 5632, 2048), (16384, 5632, 2048), (131072, 5632, 2048))
    device: str = "cuda"


def small() -> Shape:
    """Return the shape for a CPU: about five minutes on two cores."""
    sizes = ModelConfig(d_model=512, layers=4, heads=8, d_ff=2048)
    return Shape(sizes, config=TrainConfig(layers=2, steps=300), products=(), device="cpu")


def adapter_rows(shape: Shape, share: float) -> list[dict]:
    """Return the rows of switching on and off once, in place, and of fusing and unfusing a LoRA of as many parameters;
    of random weights. `worst_error`: the largest difference from the weights of before, once it is off."""
    device = clock.present_device(shape.device)
    torch.manual_seed(0)
    with torch.device(device):
        model = LanguageModel(shape.model).to(clock.dtype_for(device)).requires_grad_(False)
    workload = f"{share:.0%} of the weights, on and off once"
    shared = rows.about("adapters", model.head.weight, workload, share=share, **rows.sizes_of(shape.model))
    return [shared | row for row in switching(model, share)]


def loss_rows(shape: Shape, seed: int) -> list[dict]:
    """Return what each kind of dropout makes of a small model (sparsities.dropout.loss_effect)."""
    return [{"dropout": row.pop("kind"), **row} for row in loss_effect(shape.config, seeds=(seed,))]


def product_rows(sizes: tuple[int, int, int]) -> list[dict]:
    """Return the rows of the product of activations that were dropped 2:4, with its compression and without, beside the
    dense product; of the backend of torch's that runs, cuSPARSELt if it does."""
    try:
        made = product_times(*sizes)
    except DeviceError:
        made = product_times(*sizes, backend="cutlass")
    return _beside_first("dropout", "y = h Wd^T", made)


def step_rows(sizes: tuple[int, int, int]) -> list[dict]:
    """Return the rows of forward and backward of one linear layer with weight or input made 2:4 in every step, beside
    the dense layer. RuntimeError where it does not run here, so that a recording leaves it out."""
    try:
        return _beside_first("two_four_training", "y = h Wd^T, both ways", step_times(*sizes))
    except TwellError as error:
        raise RuntimeError(str(error)) from error


def _beside_first(kind: str, workload: str, made: list[dict]) -> list[dict]:
    here, dense = torch.empty(0, dtype=torch.bfloat16, device=clock.present_device(None)), made[0]["ms"]
    shared = rows.about(kind, here, workload)
    return [shared | row | {"dense_ms": dense, "x_dense": dense / row["ms"]} for row in made]


def sections(shape: Shape) -> rows.Sections:
    """Return the steps of the record."""
    return {
        "adapters": [partial(adapter_rows, shape, share) for share in shape.shares],
        "products": [partial(product_rows, sizes) for sizes in shape.products],
        "2:4 in training": [partial(step_rows, sizes) for sizes in shape.products],
        "dropout": [partial(loss_rows, shape, seed) for seed in shape.seeds],
    }
