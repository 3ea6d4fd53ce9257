"""What two methods cost in the loss of models that are trained here, on the text of the standard library: pruned
weights, in bits a byte, and thresholds, beside the time of a step of decoding.

Whatever is compared begins with the same weights and reads the same windows."""

from __future__ import annotations

import copy
import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from torch import Tensor, nn

from ..analysis.profile import captured
from ..layers.find import feed_forwards
from ..models.swap import sparsify
from ..models.thresholds import calibrate
from ..ops import clock
from ..sparsities.blocks import block_mask, nested_mask
from ..sparsities.magnitude import magnitude_mask, proximal_step, prune
from ..sparsities.two_four import two_four_mask
from ..sparsities.weights import SparseLinear
from ..training.config import TrainConfig
from ..training.loop import autocast, initial_model, train
from ..training.objective import bits_per_byte, cross_entropy
from ..training.text import source
from ..training.text.source import load
from . import rows
from .rows import DENSE
from .workloads import PLACES, Causal, Workload, check_cut, layer_errors

_PRUNED = {"d_model": 128, "layers": 2, "heads": 4, "d_ff": 512, "context": 64, "batch": 8, "steps": 300, "lr": 2e-3}
PRUNED = TrainConfig(**_PRUNED, eval_windows=128)  # for a CPU: two minutes on two cores
_CUT = {"d_model": 2048, "layers": 4, "heads": 16, "d_ff": 5632, "context": 512, "batch": 32, "steps": 400, "lr": 4e-4}
CUT_MODEL = TrainConfig(**_CUT, eval_windows=256, dtype="bfloat16")


def _backward(model: nn.Module, windows: Tensor, dtype: str) -> None:
    """Put the gradients of the loss of these windows, clipped, into the model."""
    with autocast(dtype, windows.device):
        loss = cross_entropy(model, windows)
    model.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


# ---- pruned weights, in bits a byte before and after the model is trained on ----


@dataclass(frozen=True)
class Way:
    """One way of pruning, by default none. mask: from a weight and a sparsity to what stays; it is pruned at once, and
    what is left trains on. gradual: more and more goes in the first two thirds of the training, all weights learning.
    l1: instead of a mask, zeros are trained in by the proximal step of L1 in the first half, and stay."""

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


# For what share of its steps, and at what share of its learning rate, a model is trained on with each of the seeds.
SEEDS, TRAINED_ON, SLOWER = (0, 1), 0.3, 0.5


class Trained:
    """A model trained by a config, the text that it has read, and held-out windows."""

    def __init__(self, config: TrainConfig) -> None:
        self.config, self.model = config, train(config, progress=False).model
        self.device, self.text = next(self.model.parameters()).device, load(config.text)
        self.seen, held_out = (part.tokens for part in self.text.split())
        self.held_out = source.spread_windows(held_out, config.eval_windows, config.context).to(self.device)

    def bits(self, model: nn.Module) -> float:
        """Return bits a byte of held-out text."""
        bits = bits_per_byte(model.eval(), self.held_out)
        model.train()
        return round(bits, 5)


def way_rows(trained: Trained, way: Way) -> list[dict]:
    """Return one row: `bits_before` and `bits_after` the training, `sparsity` of the pruned layers (all but the head)
    afterwards; ms: the wall time of a step. Of a gradual way bits_before is that of as many zeros put in at once, of
    one with L1 that when the zeros are in place, half of the steps being done."""
    config, samples = trained.config, list[float]()
    steps, lr = round(TRAINED_ON * config.steps), SLOWER * config.lr
    model = copy.deepcopy(trained.model).train().requires_grad_(True)
    pruned = copy.deepcopy(model) if way.gradual else model
    if way.mask is not None:
        _prune(pruned, lambda weight: way.mask(weight, way.sparsity))
    before = trained.bits(pruned)
    draw, ramp, half = torch.Generator().manual_seed(1_000_000 + config.seed), 2 * steps // 3, steps // 2
    make = functools.partial(torch.optim.AdamW, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    optimizer, weights = make(model.parameters()), [layer.weight for layer in _linear(model)]
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
            group["lr"] = lr * (1 - 0.9 * step / steps)
        _backward(model, windows, config.dtype)
        if way.l1 and step < half:
            proximal_step(optimizer, way.l1, weights)
        else:
            optimizer.step()
        rows.drain()
        samples.append(1e3 * (time.perf_counter() - start))
    masks = [layer.mask if isinstance(layer, SparseLinear) else layer.weight != 0 for layer in _linear(model)]
    workload = f"training step, trained on {trained.text.name}"
    shared = rows.about("pruning", weights[0], workload, tokens=config.batch * config.context, **rows.sizes_of(config))
    zeros = 1 - sum(int(mask.sum()) for mask in masks) / sum(mask.numel() for mask in masks)
    shared |= {"dtype": config.dtype, "seed": config.seed, "steps": steps, "sparsity": round(zeros, 6)}
    shared |= {"bits_before": before, "bits_after": trained.bits(model)}
    return rows.table(shared, {way.name: samples}, base=None)


def _prune(model: nn.Module, mask: Callable[[Tensor], Tensor], **how: str) -> None:
    prune(model, mask=mask, only=lambda name, module: name != "head", **how)


def _linear(model: nn.Module) -> list[nn.Module]:
    linear = (nn.Linear, SparseLinear)
    return [layer for name, layer in model.named_modules() if isinstance(layer, linear) and name != "head"]


def pruning(left_out: dict | None = None, config: TrainConfig = PRUNED) -> rows.Sections:
    """Return the steps of the record, one for each seed and way. A model is trained when its first way needs it."""
    trained = functools.cache(lambda seed: Trained(replace(config, seed=seed)))
    step = lambda seed, way: way_rows(trained(seed), way)  # noqa: E731
    return {f"seed {seed}": rows.steps(step, [seed], WAYS) for seed in SEEDS}


# ---- a model with SiLU layers, cut by CATS, TEAL and WINA ----

PATHS = {"cats": "twell", **dict.fromkeys(("teal", "teal attention", "wina"), "kept_inputs")}
CUT, SPARSE = "thresholds, dense", {method: f"thresholds, forced {path}" for method, path in PATHS.items()}
CUT_SPARSITIES = (0.3, 0.5, 0.7, 0.9)  # of what each method cuts


class Calibrated:
    """A model with SiLU layers (TrainConfig's have a ReLU), trained with a linear warm-up and a cosine after it, in
    evaluation mode; held-out windows; and by method what its layers did on some of the text that it has read."""

    def __init__(self, config: TrainConfig) -> None:
        self.config, self.text, context = config, source.standard_library(), config.context
        device, draw = clock.present_device(config.device), torch.Generator().manual_seed(config.seed)
        seen, held_out = (part.tokens.to(device) for part in self.text.split())
        self.windows = source.spread_windows(held_out, config.eval_windows, context)[:, :-1]
        self.model = initial_model(config).to(device)
        for layer in feed_forwards(self.model):
            layer.module.act_fn = nn.SiLU()
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.lr, betas=(0.9, 0.95))
        steps = config.steps
        rate = lambda step: min(10 * (step + 1) / steps, 0.5 + 0.5 * math.cos(math.pi * step / steps))  # noqa: E731
        slope = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        for _ in range(steps):
            windows = source.random_windows(seen, config.batch, context, draw).to(device)
            _backward(self.model, windows, config.dtype)
            optimizer.step()
            slope.step()
        self.model.eval().requires_grad_(False)
        batches = source.spread_windows(seen, max(1, config.eval_windows // 8), context)[:, :-1].split(8)
        self.calibration = {
            way: calibrate(self.model, batches, method=way.split()[0], attention="attention" in way) for way in PATHS
        }


@torch.no_grad()
def cut_rows(trained: Calibrated, method: str, sparsity: float) -> list[dict]:
    """Return the rows of a step of decoding one sequence in bfloat16, behind half a context: the model with thresholds
    of this sparsity, dense and on kernels, beside the one without. They say `loss` in nats a token of held-out text and
    `loss_change`, of the change against the dense model low, mean and high. WrongResult where the kernels compute
    something else than the dense layers."""
    config, path = trained.config, SPARSE[method]
    chosen = trained.calibration[method].at(sparsity)
    cost = chosen.loss(trained.model, trained.windows)
    plain = copy.deepcopy(trained.model).bfloat16()
    cut = chosen.apply(copy.deepcopy(plain))
    models = {DENSE: plain, CUT: cut, path: sparsify(copy.deepcopy(cut), PATHS[method])}
    layers = feed_forwards(cut)
    inputs = captured(cut, trained.windows.split(8), [layer.name for layer in layers], PLACES)
    worst = check_cut(layer_errors(layers, models[path], inputs, 1), path)
    density = [layer.density["activation" if method == "cats" else "hidden"] for layer in chosen.layers]
    says = {"sparsity": sparsity, "density": [round(share, 4) for share in density], "spared": round(chosen.spared, 5)}
    says |= {"dense_loss": round(cost.dense, 5), "loss": round(cost.thresholded, 5)}
    says["loss_change"] = [round(change, 5) for change in (cost.low, cost.change, cost.high)]
    causal = {name: Causal(model) for name, model in models.items()}
    ids = trained.windows[:1, : (cached := config.context // 2)]
    work = Workload(ids[None], kept=causal[DENSE].keep(ids[:, :-1]))
    sizes = {"tokens": 1, **rows.sizes_of(plain.config), "nnz": round(config.d_ff * fmean(density), 2)}
    sizes |= {"cached": cached, "parameters": sum(weight.numel() for weight in plain.parameters())}
    label = f"{method.upper()} {sparsity:.0%}, decode step, batch 1, SiLU trained on {trained.text.name}"
    shared = rows.about("thresholds", next(plain.parameters()), label, **sizes)
    calls: rows.Calls = {name: work.makes(model) for name, model in causal.items()}
    facts = {CUT: says, path: says | {"layer_over_allowed": worst}}
    return rows.measured(shared, calls, facts, 1.0, tokens=1, rounds=15)


def thresholds(left_out: dict | None = None, config: TrainConfig = CUT_MODEL) -> rows.Sections:
    """Return the steps of the record: one for each method and sparsity. The first one trains the model."""
    trained = functools.cache(lambda: Calibrated(config))
    return {"thresholds": rows.steps(lambda *how: cut_rows(trained(), *how), PATHS, CUT_SPARSITIES)}
