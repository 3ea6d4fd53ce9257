"""What pruning costs: a small language model of the course, its weights pruned in each way that twell_lab.sparsities
has, in bits a byte of held-out text before and after the model is trained on.

All linear layers but the head are pruned. Each way begins with the same trained weights and is trained on for as many
steps on the same windows; so is the dense model, which is what the others are held against."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from ..core import InputError
from ..ops import clock
from ..sparsities.blocks import block_mask, nested_mask
from ..sparsities.magnitude import magnitude_mask
from ..sparsities.prune import proximal_step, prune, table
from ..sparsities.two_four import two_four_mask
from ..training.config import TrainConfig
from ..training.loop import autocast, train
from ..training.objective import bits_per_byte, cross_entropy
from ..training.text import source
from ..training.text.load import load_any
from . import rows

KIND = "pruning"
DENSE = "dense"


@dataclass(frozen=True)
class Way:
    """One way of pruning.

    name: of the rows. how: "mask" (pruned at once, what is left trains on), "gradual" (more and more in the first two
    thirds of the training, all weights learning), "proximal" (zeros are trained in by the proximal step of L1 in the
    first half, and stay), or "none". mask: from a weight and a sparsity to what is kept. sparsity: that is asked for.
    l1: of "proximal"."""

    name: str
    how: str = "none"
    mask: Callable[[Tensor, float], Tensor] | None = None
    sparsity: float = 0.0
    l1: float = 0.0

    def __post_init__(self) -> None:
        if self.how not in ("none", "mask", "gradual", "proximal"):
            raise InputError(f"how is {self.how!r:.80}; accepted: 'none', 'mask', 'gradual' and 'proximal'")


def _blocks(size: int) -> Callable[[Tensor, float], Tensor]:
    return lambda weight, sparsity: block_mask(weight, sparsity, size)


WAYS = (
    Way(DENSE),
    Way("magnitude, 50%", "mask", magnitude_mask, 0.5),
    Way("2:4", "mask", lambda weight, _: two_four_mask(weight), 0.5),
    Way("blocks of 16, 50%", "mask", _blocks(16), 0.5),
    Way("blocks of 32, 50%", "mask", _blocks(32), 0.5),
    Way("magnitude, 90%", "mask", magnitude_mask, 0.9),
    Way("blocks of 16, 90%", "mask", _blocks(16), 0.9),
    Way("blocks of 32, 90%", "mask", _blocks(32), 0.9),
    Way("2:4 in blocks of 32, 90%", "mask", lambda weight, share: nested_mask(weight, 2 * share - 1, 32), 0.9),
    Way("blocks of 32, 90%, gradually", "gradual", _blocks(32), 0.9),
    Way("proximal L1, 1", "proximal", l1=1.0),
    Way("proximal L1, 4", "proximal", l1=4.0),
)


@dataclass(frozen=True)
class Shape:
    """The model and how it is trained (config, whose seed is each of `seeds`), and for how many steps each way is
    trained on, at what learning rate. windows: of held-out text, on which bits are measured."""

    config: TrainConfig = field(
        default_factory=lambda: TrainConfig(
            d_model=512, layers=6, heads=8, d_ff=1408, context=256, batch=32, steps=500, lr=1e-3, dtype="bfloat16"
        )
    )
    steps: int = 150
    lr: float = 5e-4
    seeds: tuple[int, ...] = (0, 1)
    ways: tuple[Way, ...] = WAYS
    windows: int = 512

    def __post_init__(self) -> None:
        if type(self.steps) is not int or self.steps < 3:
            raise InputError(f"steps is {self.steps!r:.80}; a whole number from 3 up is accepted")


def small() -> Shape:
    """For a CPU: two to six minutes on two cores."""
    config = TrainConfig(d_model=128, layers=2, heads=4, d_ff=512, context=64, batch=8, steps=300, lr=2e-3)
    return Shape(config, steps=90, lr=1e-3, windows=128)


class Trained:
    """A model trained with one seed, and the text: `held_out` windows, and `windows()`, which gives those of each
    further step, the same in each way."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape, self.seed = shape, seed
        config = replace(shape.config, seed=seed)
        result = train(config, progress=False)
        self.model = result.model
        self.device = next(self.model.parameters()).device
        self.text = load_any(config.text)
        self.seen, held_out = (part.tokens for part in self.text.split())
        self.held_out = source.spread_windows(held_out, shape.windows, config.context).to(self.device)

    def windows(self) -> Iterator[Tensor]:
        draw = torch.Generator().manual_seed(1_000_000 + self.seed)
        config = self.shape.config
        for _ in range(self.shape.steps):
            yield source.random_windows(self.seen, config.batch, config.context, draw).to(self.device)

    def bits(self, model: nn.Module) -> float:
        """Bits a byte of held-out text."""
        training = model.training
        found = bits_per_byte(model.eval(), self.held_out)
        model.train(training)
        return found


def _pruned(name: str, module: nn.Module) -> bool:
    return name != "head"


def way_rows(trained: Trained, way: Way) -> list[dict]:
    """One row: `bits_before` and `bits_after` the training, the dense model's `dense_bits` before it, `sparsity` of the
    pruned layers afterwards, `seed` and `steps`; ms: the median wall time of a training step.

    Of "gradual" bits_before is that of as many zeros put in at once, of "proximal" that when the zeros are in place,
    half of the steps being done."""
    model = copy.deepcopy(trained.model).train().requires_grad_(True)
    if way.how in ("mask", "gradual"):
        whole = copy.deepcopy(model)
        prune(model, mask=lambda weight: way.mask(weight, way.sparsity), only=_pruned)
    before = trained.bits(model)
    if way.how == "gradual":
        model = whole
    samples, middle = _train_on(trained, model, way)
    found = [row for row in table(model) if row["layer"] != "head"]
    zeros = sum(row["sparsity"] * row["shape"][0] * row["shape"][1] for row in found)
    sizes = trained.shape.config
    shared = {
        "kind": KIND,
        "device": clock.device_name(trained.device),
        "dtype": sizes.dtype,
        "tokens": sizes.batch * sizes.context,
        "d_model": sizes.d_model,
        "d_ff": sizes.d_ff,
        "layers": sizes.layers,
        "workload": f"training step, trained on {trained.text.name}",
    }
    facts = {
        "seed": trained.seed,
        "steps": trained.shape.steps,
        "sparsity": round(zeros / sum(row["shape"][0] * row["shape"][1] for row in found), 6),
        "dense_bits": round(trained.bits(trained.model), 5),
        "bits_before": round(before if middle is None else middle, 5),
        "bits_after": round(trained.bits(model), 5),
    }
    return [rows.row(shared, way.name, samples, **facts)]


def _train_on(trained: Trained, model: nn.Module, way: Way) -> tuple[list[float], float | None]:
    """Train the model on; returns the milliseconds of each step, and for "proximal" the bits when the zeros are in
    place."""
    shape, steps, samples = trained.shape, trained.shape.steps, []
    optimizer, middle, ramp = _optimizer(model, shape.lr), None, max(1, 2 * steps // 3)
    kept = {id(each.weight) for name, each in model.named_modules() if isinstance(each, nn.Linear) and name != "head"}
    for step, windows in enumerate(trained.windows()):
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = shape.lr * (1 - 0.9 * step / steps)
        if way.how == "gradual" and (step == ramp or step < ramp and step % max(1, ramp // 8) == 0):
            share = way.sparsity * (1 - (1 - step / ramp) ** 3)  # Zhu and Gupta, arXiv 1710.01878
            fresh = any(type(each) is nn.Linear for name, each in model.named_modules() if name != "head")
            prune(model, mask=lambda weight: way.mask(weight, share), gradient="dense", only=_pruned)
            optimizer = _optimizer(model, shape.lr) if fresh else optimizer
        if way.how == "proximal" and step == steps // 2:
            middle = trained.bits(model)
            prune(model, mask=lambda weight: weight != 0, only=_pruned)
            optimizer = _optimizer(model, shape.lr)
        with autocast(shape.config.dtype, trained.device):
            loss = cross_entropy(model, windows)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if way.how == "proximal" and step < steps // 2:
            proximal_step(optimizer, way.l1, [each for each in model.parameters() if id(each) in kept])
        else:
            optimizer.step()
        rows.drain()
        samples.append(1e3 * (time.perf_counter() - start))
    return samples, middle


def _optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr, (0.9, 0.95), weight_decay=0.0)


def sections(shape: Shape) -> rows.Sections:
    """The steps of the record, as in bench.inference: one for each seed and way. A model is trained when its first way
    needs it."""

    def steps(seed: int) -> list[Callable[[], list[dict]]]:
        trained = functools.cache(lambda: Trained(shape, seed))
        return [functools.partial(lambda way: way_rows(trained(), way), way) for way in shape.ways]

    return {f"seed {seed}": steps(seed) for seed in shape.seeds}
