"""Experiments of twell_lab.sparsities as rows: switching a sparse adapter beside fusing a LoRA; dropout as 2:4; steps
of training with an operand that is made 2:4."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..core import DeviceError, TwellError
from ..models.tiny import LanguageModel, ModelConfig
from ..ops import clock
from ..sparsities.adapters import switching
from ..sparsities.dropout import loss_effect, product_times, verdict
from ..sparsities.two_four_training import step_times
from ..training.config import TrainConfig
from . import rows


@dataclass(frozen=True)
class Shape:
    """model, shares: in whose matrices such shares of the weights are switched. config: of the trainings with dropout,
    one for each of `seeds` and each kind. products: (tokens, d_ff, d_model) of those that are timed, on a GPU."""

    model: ModelConfig = field(default_factory=lambda: ModelConfig(d_model=2048, layers=8, heads=16, d_ff=5632))
    shares: tuple[float, ...] = (0.01, 0.02)
    config: TrainConfig = field(default_factory=lambda: TrainConfig(d_model=256, d_ff=1024, batch=32, context=256))
    seeds: tuple[int, ...] = (0, 1)
    products: tuple[tuple[int, int, int], ...] = ((2048, 5632, 2048), (16384, 5632, 2048), (131072, 5632, 2048))
    device: str = "cuda"


def small() -> Shape:
    """For a CPU: about five minutes on two cores."""
    sizes = ModelConfig(d_model=512, layers=4, heads=8, d_ff=2048)
    return Shape(sizes, config=TrainConfig(layers=2, steps=300), products=(), device="cpu")


def adapter_rows(shape: Shape, share: float) -> list[dict]:
    """Switching on and off once, in place, and fusing and unfusing a LoRA of as many parameters; of random weights.

    `worst_error`: the largest difference from the weights of before, once it is off again."""
    device = clock.present_device(shape.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    with torch.device(device):
        model = LanguageModel(shape.model).to(dtype).requires_grad_(False)
    shared = {
        "kind": "adapters",
        "device": clock.device_name(device),
        "dtype": str(dtype).removeprefix("torch."),
        "d_model": shape.model.d_model,
        "d_ff": shape.model.d_ff,
        "layers": shape.model.layers,
        "workload": f"{share:.0%} of the weights, on and off once",
        "share": share,
    }
    return [shared | row for row in switching(model, share)]


def loss_rows(shape: Shape, seed: int) -> list[dict]:
    """Return what each kind of dropout makes of a small model (sparsities.dropout.loss_effect)."""
    found = loss_effect(shape.config, seeds=(seed,))
    return [{"dropout": row.pop("kind"), **row} for row in found]


def product_rows(shape: Shape, sizes: tuple[int, int, int]) -> list[dict]:
    """The product of activations that were dropped 2:4, with its compression and without, beside the dense product; of
    the backend of torch's that runs, cuSPARSELt if it does."""
    tokens, d_ff, d_model = sizes
    try:
        found = product_times(tokens, d_ff, d_model)
    except DeviceError:
        found = product_times(tokens, d_ff, d_model, backend="cutlass")
    dense = found[0]["ms"]
    shared = {"kind": "dropout", "device": torch.cuda.get_device_name(), "dtype": "bfloat16", "workload": "y = h Wd^T"}
    return [shared | row | {"dense_ms": dense, "x_dense": dense / row["ms"]} for row in found]


def step_rows(sizes: tuple[int, int, int]) -> list[dict]:
    """Forward and backward of one linear layer with weight or input made 2:4 in every step, beside the dense layer
    (sparsities.two_four_training). RuntimeError where it does not run here, so that a recording leaves it out."""
    try:
        found = step_times(*sizes)
    except TwellError as error:
        raise RuntimeError(str(error)) from error
    dense = found[0]["ms"]
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    shared = {"kind": "two_four_training", "device": name, "dtype": "bfloat16", "workload": "y = h Wd^T, both ways"}
    return [shared | row | {"dense_ms": dense, "x_dense": dense / row["ms"]} for row in found]


def verdicts(made: list[dict]) -> dict:
    """By number of tokens, what the rows say of dropout as 2:4 (sparsities.dropout.verdict); under "loss" what they say
    without times. {} where there are fewer than two seeds."""
    losses = [{**row, "kind": row["dropout"]} for row in made if "dropout" in row]
    if len({row["seed"] for row in losses}) < 2:
        return {}
    timed: dict[int, list[dict]] = {}
    for row in made:
        if row.get("kind") == "dropout":
            timed.setdefault(row["tokens"], []).append(row)
    return {"loss": verdict(losses), **{f"{tokens} tokens": verdict(losses, each) for tokens, each in timed.items()}}


def sections(shape: Shape) -> rows.Sections:
    """The steps of the record, as in bench.inference."""
    return {
        "adapters": [lambda share=share: adapter_rows(shape, share) for share in shape.shares],
        "products": [lambda sizes=sizes: product_rows(shape, sizes) for sizes in shape.products],
        "2:4 in training": [lambda sizes=sizes: step_rows(sizes) for sizes in shape.products],
        "dropout": [lambda seed=seed: loss_rows(shape, seed) for seed in shape.seeds],
    }
