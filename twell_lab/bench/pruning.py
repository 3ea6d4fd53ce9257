"""Measure what pruning costs: a small language model of the course, its weights pruned in each way that
twell_lab.sparsities has, in bits a byte of held-out text before and after the model is trained on.

All linear layers but the head are pruned. Each way begins with the same trained weights and is trained on for as many
steps on the same windows; so is the dense model, which is what the others are held against."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..sparsities.blocks import block_mask, nested_mask
from ..sparsities.magnitude import magnitude_mask
from ..sparsities.prune import proximal_step, prune
from ..sparsities.two_four import two_four_mask
from ..sparsities.weights import SparseLinear
from ..training.config import TrainConfig
from ..training.loop import autocast, train
from ..training.objective import bits_per_byte, cross_entropy
from ..training.text import source
from ..training.text.prepared import load_any
from . import rows


@dataclass(frozen=True)
class Way:
    """One way of pruning, by default none.

    name: of the rows. mask: from a weight and a sparsity to what stays; it is pruned at once, and what is left trains
    on. gradual: more and more goes in the first two thirds of the training, all weights learning. l1: instead of a
    mask, zeros are trained in by the proximal step of L1 in the first half, and stay."""

    name: str
    mask: Callable[[Tensor, float], Tensor] | None = None
    sparsity: float = 0.0
    gradual: bool = False
    l1: float = 0.0


_16, _32 = (functools.partial(block_mask, size=size) for size in (16, 32))
WAYS = (
    Way("dense"),
    Way("magnitude, 50%", magnitude_mask, 0.5),
    Way("2:4", lambda weight, _: two_four_mask(weight), 0.5),
    Way("blocks of 16, 50%", _16, 0.5),
    Way("blocks of 32, 50%", _32, 0.5),
    Way("magnitude, 90%", magnitude_mask, 0.9),
    Way("blocks of 16, 90%", _16, 0.9),
    Way("blocks of 32, 90%", _32, 0.9),
    Way("2:4 in blocks of 32, 90%", lambda weight, share: nested_mask(weight, 2 * share - 1, 32), 0.9),
    Way("blocks of 32, 90%, gradually", _32, 0.9, gradual=True),
    Way("proximal L1, 1", l1=1.0),
    Way("proximal L1, 4", l1=4.0),
)


@dataclass(frozen=True)
class Shape:
    """The model and how it is trained (config, whose seed is each of `seeds`), and for how many steps, from 3 up, each
    way is trained on, at what learning rate. windows: of held-out text, on which bits are measured."""

    config: TrainConfig = TrainConfig(
        d_model=512, layers=6, heads=8, d_ff=1408, context=256, batch=32, steps=500, lr=1e-3, dtype="bfloat16"
    )
    steps: int = 150
    lr: float = 5e-4
    seeds: tuple[int, ...] = (0, 1)
    windows: int = 512


def small() -> Shape:
    """Return the shape for a CPU: two to six minutes on two cores."""
    config = TrainConfig(d_model=128, layers=2, heads=4, d_ff=512, context=64, batch=8, steps=300, lr=2e-3)
    return Shape(config, steps=90, lr=1e-3, windows=128)


class Trained:
    """A model trained with one seed, and the text: what it has read, and `held_out` windows."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape, self.config = shape, replace(shape.config, seed=seed)
        self.model = train(self.config, progress=False).model
        self.device, self.text = next(self.model.parameters()).device, load_any(self.config.text)
        self.seen, held_out = (part.tokens for part in self.text.split())
        self.held_out = source.spread_windows(held_out, shape.windows, self.config.context).to(self.device)

    def bits(self, model: nn.Module) -> float:
        """Return bits a byte of held-out text."""
        bits = bits_per_byte(model.eval(), self.held_out)
        model.train()
        return bits


def way_rows(trained: Trained, way: Way) -> list[dict]:
    """Return one row: `bits_before` and `bits_after` the training, `sparsity` of the pruned layers afterwards, `seed`
    and `steps`; ms: the median wall time of a training step.

    Of a gradual way bits_before is that of as many zeros put in at once, of one with L1 that when the zeros are in
    place, half of the steps being done."""
    shape, steps, samples, config = trained.shape, trained.shape.steps, [], trained.config
    model = copy.deepcopy(trained.model).train().requires_grad_(True)
    pruned = copy.deepcopy(model) if way.gradual else model
    if way.mask is not None:
        _prune(pruned, lambda weight: way.mask(weight, way.sparsity))
    before = trained.bits(pruned)
    draw, ramp, half = torch.Generator().manual_seed(1_000_000 + config.seed), 2 * steps // 3, steps // 2
    make = functools.partial(torch.optim.AdamW, lr=shape.lr, betas=(0.9, 0.95), weight_decay=0.0)
    optimizer, weights = make(model.parameters()), [layer.weight for layer in _layers(model)]
    for step in range(steps):
        windows = source.random_windows(trained.seen, config.batch, config.context, draw).to(trained.device)
        start = time.perf_counter()
        if way.gradual and (step == ramp or step < ramp and step % max(1, ramp // 8) == 0):
            share = way.sparsity * (1 - (1 - step / ramp) ** 3)  # Zhu and Gupta, arXiv 1710.01878
            _prune(model, lambda weight: way.mask(weight, share), gradient="dense")
            optimizer = optimizer if step else make(model.parameters())  # its parameters are others from then on
        if way.l1 and step == half:
            before = trained.bits(model)
            _prune(model, lambda weight: weight != 0)
            optimizer = make(model.parameters())
        for group in optimizer.param_groups:
            group["lr"] = shape.lr * (1 - 0.9 * step / steps)
        with autocast(config.dtype, trained.device):
            loss = cross_entropy(model, windows)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if way.l1 and step < half:
            proximal_step(optimizer, way.l1, weights)
        else:
            optimizer.step()
        rows.drain()
        samples.append(1e3 * (time.perf_counter() - start))
    masks = [layer.mask if isinstance(layer, SparseLinear) else layer.weight != 0 for layer in _layers(model)]
    workload = f"training step, trained on {trained.text.name}"
    shared = rows.about("pruning", weights[0], workload, tokens=config.batch * config.context, **rows.sizes_of(config))
    facts = {
        "dtype": config.dtype,
        "seed": config.seed,
        "steps": steps,
        "sparsity": round(1 - sum(int(mask.sum()) for mask in masks) / sum(mask.numel() for mask in masks), 6),
        "bits_before": round(before, 5),
        "bits_after": round(trained.bits(model), 5),
    }
    return [rows.row(shared | facts, way.name, samples)]


def _prune(model: nn.Module, mask: Callable[[Tensor], Tensor], **how: str) -> None:
    prune(model, mask=mask, only=lambda name, module: name != "head", **how)


def _layers(model: nn.Module) -> list[nn.Module]:
    linear = (nn.Linear, SparseLinear)
    return [layer for name, layer in model.named_modules() if isinstance(layer, linear) and name != "head"]


def sections(shape: Shape) -> rows.Sections:
    """Return the steps of the record, one for each seed and way. A model is trained when its first way needs it."""

    def steps(seed: int) -> list[Callable[[], list[dict]]]:
        trained = functools.cache(lambda: Trained(shape, seed))
        return [functools.partial(lambda way: way_rows(trained(), way), way) for way in WAYS]

    return {f"seed {seed}": steps(seed) for seed in shape.seeds}
