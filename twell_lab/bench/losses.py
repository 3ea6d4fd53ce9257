"""What methods cost in the loss of models that are trained here, on the text of the standard library: pruned weights,
dropout as 2:4, and in decoding, beside the time of a step, thresholds and chosen neurons.

Whatever is compared begins with the same weights and reads the same windows. A lossy row says `loss` in nats a token of
held-out text and `loss_change`, of the change against the dense model low, mean and high."""

from __future__ import annotations

import copy
import functools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..analysis.profile import captured, profile
from ..layers.find import feed_forwards
from ..models.swap import sparsify
from ..models.thresholds import LossChange, calibrate
from ..ops import clock
from ..sparsities.blocks import block_mask, nested_mask
from ..sparsities.core_neurons import core_neurons
from ..sparsities.dropout import TwoFourDropout
from ..sparsities.few_neurons import remove
from ..sparsities.magnitude import magnitude_mask
from ..sparsities.predictors import predict
from ..sparsities.prune import proximal_step, prune
from ..sparsities.two_four import two_four_mask
from ..sparsities.weights import SparseLinear
from ..training.config import TrainConfig
from ..training.loop import autocast, initial_model, train
from ..training.objective import bits_per_byte, cross_entropy
from ..training.text import source
from ..training.text.source import load_any
from . import rows
from .causal import Causal
from .rows import DENSE
from .workloads import PLACES, Tokens, check_cut, decode, layer_errors

# ---- the models, and how they are trained: on a GPU, and small ones for a CPU, in two to six minutes on two cores ----


def _config(*sizes: float, **more: Any) -> TrainConfig:
    names = ("d_model", "layers", "heads", "d_ff", "context", "batch", "steps", "lr", "eval_windows")
    return TrainConfig(**dict(zip(names, sizes, strict=True)), **more)


PRUNED = _config(512, 6, 8, 1408, 256, 32, 500, 1e-3, 512, dtype="bfloat16")
SMALL_PRUNED = _config(128, 2, 4, 512, 64, 8, 300, 2e-3, 128)
CUT_MODEL = _config(2048, 4, 16, 5632, 512, 32, 400, 4e-4, 256, dtype="bfloat16")
CHOSEN = _config(1024, 4, 16, 4096, 256, 32, 600, 6e-4, 32, l1=3e-4, dtype="bfloat16")
SMALL_CHOSEN = _config(128, 4, 4, 512, 64, 8, 600, 2e-3, 24, l1=2e-3, warmup=50)
DROPPED = _config(256, 4, 4, 1024, 256, 32, 900, 2e-3, 128)
SMALL_DROPPED = _config(128, 2, 4, 512, 64, 8, 300, 2e-3, 128)


def _backward(model: nn.Module, windows: Tensor, dtype: str) -> Tensor:
    """Return the loss of these windows; its gradients, clipped, are in the model."""
    with autocast(dtype, windows.device):
        loss = cross_entropy(model, windows)
    model.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return loss.detach()


def _fit(model: nn.Module, seen: Tensor, config: TrainConfig, optimizer, rate: Callable[[int], float]) -> Tensor:
    """Train on random windows by config's seed, batch, context, steps and dtype; return the loss of each step. rate: by
    which a step's learning rate is multiplied."""
    slope, losses = torch.optim.lr_scheduler.LambdaLR(optimizer, rate), []
    draw, device = torch.Generator().manual_seed(config.seed), next(model.parameters()).device
    for _ in range(config.steps):
        windows = source.random_windows(seen, config.batch, config.context, draw).to(device)
        losses.append(_backward(model, windows, config.dtype))
        optimizer.step()
        slope.step()
    return torch.stack(losses)


def _loss_facts(cost: LossChange) -> dict:
    changes = (cost.low, cost.change, cost.high)
    return {"loss": round(cost.thresholded, 5), "loss_change": [round(change, 5) for change in changes]}


@torch.no_grad()
def decode_rows(
    kind: str, label: str, models: dict, facts: dict, tokens: Tokens, batch: int, *, cached: int, nnz: float, **how
) -> list[dict]:
    """Return rows of this kind of a step of decoding of models of one size that compute different things, DENSE among
    them, with what their rows say. label: with a place for the step's. nnz: the mean of the rows."""
    causal = {path: Causal(model) for path, model in models.items()}
    dense, work = models[DENSE], decode(tokens, causal[DENSE], batch, cached)
    calls: rows.Calls = {path: work.makes(model) for path, model in causal.items()}
    sizes = {"tokens": batch, **rows.sizes_of(dense.config), "nnz": round(nnz, 2), **work.says}
    sizes["parameters"] = sum(weight.numel() for weight in dense.parameters())
    shared = rows.about(kind, next(dense.parameters()), label.format(work.label), **sizes)
    return rows.measured(shared, calls, facts=facts, tokens=batch, rounds=15, **how)


# ---- pruned weights, in bits a byte before and after the model is trained on ----


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


# For what share of its steps, and at what share of its learning rate, a model is trained on with each of the seeds.
SEEDS, TRAINED_ON, SLOWER = (0, 1), 0.3, 0.5


class Trained:
    """A model trained by a config, the text that it has read, and held-out windows."""

    def __init__(self, config: TrainConfig) -> None:
        self.config, self.model = config, train(config, progress=False).model
        self.device, self.text = next(self.model.parameters()).device, load_any(config.text)
        self.seen, held_out = (part.tokens for part in self.text.split())
        self.held_out = source.spread_windows(held_out, config.eval_windows, config.context).to(self.device)

    def bits(self, model: nn.Module) -> float:
        """Return bits a byte of held-out text."""
        bits = bits_per_byte(model.eval(), self.held_out)
        model.train()
        return bits


def way_rows(trained: Trained, way: Way) -> list[dict]:
    """Return one row: `bits_before` and `bits_after` the training, `sparsity` of the pruned layers (all but the head)
    afterwards; ms: the wall time of a training step. Of a gradual way bits_before is that of as many zeros put in at
    once, of one with L1 that when the zeros are in place, half of the steps being done."""
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
    facts = {
        "dtype": config.dtype,
        "seed": config.seed,
        "steps": steps,
        "sparsity": round(1 - sum(int(mask.sum()) for mask in masks) / sum(mask.numel() for mask in masks), 6),
        "bits_before": round(before, 5),
        "bits_after": round(trained.bits(model), 5),
    }
    return rows.table(shared | facts, {way.name: samples}, base=None)


def _prune(model: nn.Module, mask: Callable[[Tensor], Tensor], **how: str) -> None:
    prune(model, mask=mask, only=lambda name, module: name != "head", **how)


def _linear(model: nn.Module) -> list[nn.Module]:
    linear = (nn.Linear, SparseLinear)
    return [layer for name, layer in model.named_modules() if isinstance(layer, linear) and name != "head"]


def pruning(left_out: dict | None = None, config: TrainConfig | None = None) -> rows.Sections:
    """Return the steps of the record, one for each seed and way. A model is trained when its first way needs it."""
    config = config or (PRUNED if torch.cuda.is_available() else SMALL_PRUNED)
    trained = functools.cache(lambda seed: Trained(replace(config, seed=seed)))
    step = lambda seed, way: way_rows(trained(seed), way)  # noqa: E731
    return {f"seed {seed}": rows.steps(step, [seed], WAYS) for seed in SEEDS}


# ---- dropout as 2:4 ----

DROPOUTS = {"none": nn.Identity, "Bernoulli 1/2": lambda: nn.Dropout(0.5), "2:4": TwoFourDropout}


def dropout_row(config: TrainConfig, kind: str) -> dict:
    """Train a small language model with this dropout before its down projections; return its bits_per_byte on held-out
    text without dropout, and train_loss: the mean of the last tenth of the steps, in nats, with dropout."""
    device, text = clock.present_device(config.device), load_any(config.text)
    seen, held_out = (part.tokens for part in text.split())
    model, drop = initial_model(config, text.vocabulary).to(device).train(), DROPOUTS[kind]()
    downs = [layer.down for layer in feed_forwards(model)]
    hooks = [down.register_forward_pre_hook(lambda module, args: (drop(args[0]),)) for down in downs]
    optimizer = torch.optim.AdamW(model.parameters(), config.lr, (0.9, 0.95), weight_decay=config.weight_decay)
    rate = lambda step: min(1.0, (step + 1) / max(1, config.warmup))  # noqa: E731
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(config.seed)
        losses = _fit(model, seen, config, optimizer, rate)
    for hook in hooks:
        hook.remove()
    bits = bits_per_byte(model.eval(), source.spread_windows(held_out, config.eval_windows, config.context).to(device))
    train_loss = float(losses[-max(1, config.steps // 10) :].mean())
    facts = {"dropout": kind, "seed": config.seed, "steps": config.steps}
    return facts | {"bits_per_byte": bits, "train_loss": train_loss}


# ---- a model with SiLU layers, cut by CATS, TEAL and WINA ----

PATHS = {"cats": "twell", **dict.fromkeys(("teal", "teal attention", "wina"), "kept_inputs")}
CUT, SPARSE = "thresholds, dense", {method: f"thresholds, forced {path}" for method, path in PATHS.items()}


CUT_SPARSITIES = (0.3, 0.5, 0.7, 0.9)  # of what each method cuts
BATCHES = (1, 4, 16)  # sequences in a step of decoding, behind half a context


class Calibrated:
    """A model with SiLU layers that a config trained, float32, in evaluation mode; held-out windows, int64
    [eval_windows, context]; and by method what its layers did on some of the text that it was trained on."""

    def __init__(self, config: TrainConfig) -> None:
        self.config, self.text, context = config, source.standard_library(), config.context
        device = clock.present_device(config.device)
        seen, self.held_out = (part.tokens.to(device) for part in self.text.split())
        self.windows = source.spread_windows(self.held_out, config.eval_windows, context)[:, :-1]
        self.model = _with_silu(config, seen)
        batches = source.spread_windows(seen, max(1, config.eval_windows // 8), context)[:, :-1].split(8)
        self.calibration = {
            way: calibrate(self.model, batches, method=way.split()[0], attention="attention" in way) for way in PATHS
        }


def _with_silu(config: TrainConfig, text: Tensor) -> nn.Module:
    """Return a SiLU model trained with a linear warm-up and a cosine after it; TrainConfig's models have a ReLU."""
    model = initial_model(config).to(text.device)
    for layer in feed_forwards(model):
        layer.module.act_fn = nn.SiLU()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.95))
    rise = lambda step: min(10 * (step + 1) / config.steps, 0.5 + 0.5 * math.cos(math.pi * step / config.steps))  # noqa: E731
    _fit(model, text, config, optimizer, rise)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def cut_rows(trained: Calibrated, method: str, sparsity: float) -> list[dict]:
    """Return a step of decoding in bfloat16 for each batch size, the model with thresholds of this sparsity beside the
    one without. WrongResult where the kernels compute something else than the dense layers."""
    config, path = trained.config, SPARSE[method]
    chosen = trained.calibration[method].at(sparsity)
    cost = chosen.loss(trained.model, trained.windows)
    plain = copy.deepcopy(trained.model).bfloat16()
    cut = chosen.apply(copy.deepcopy(plain))
    models = {DENSE: plain, CUT: cut, path: sparsify(copy.deepcopy(cut), PATHS[method])}
    tokens = Tokens(plain.config.vocabulary, trained.windows.device, trained.held_out.long())
    density = [layer.density["activation" if method == "cats" else "hidden"] for layer in chosen.layers]
    says = {"sparsity": sparsity, "density": [round(share, 4) for share in density], **_loss_facts(cost)}
    says |= {"spared": round(chosen.spared, 5), "dense_loss": round(cost.dense, 5)}
    label = f"{method.upper()} {sparsity:.0%}, {{}}, SiLU trained on {trained.text.name}"
    made, layers = list[dict](), feed_forwards(cut)
    inputs = captured(cut, trained.windows.split(8), [layer.name for layer in layers], PLACES)
    for batch in BATCHES:
        worst = check_cut(layer_errors(layers, models[path], inputs, batch), path)
        facts = {CUT: says, path: says | {"layer_over_allowed": worst}}
        how = {"cached": config.context // 2, "nnz": config.d_ff * fmean(density), "seconds": 1.0}
        made += decode_rows("thresholds", label, models, facts, tokens, batch, **how)
    return made


def thresholds(left_out: dict | None = None, config: TrainConfig = CUT_MODEL) -> rows.Sections:
    """Return the steps of the record: one for each method and sparsity. The first one trains the model."""
    trained = functools.cache(lambda: Calibrated(config))
    return {"thresholds": rows.steps(lambda *how: cut_rows(trained(), *how), PATHS, CUT_SPARSITIES)}


# ---- chosen neurons: predictors (Deja Vu), core neurons (CoreInfer), thresholds, and L1, which loses nothing ----

QUIET, LOSSLESS = "trained with L1, dense", "trained with L1, forced twell"


RECALLS, SHARES = (0.8, 0.9, 0.95, 0.99), (0.05, 0.1, 0.2, 0.4)  # of predictors, and of core neurons
SPARSITIES = (0.5, 0.7, 0.9)  # of thresholds
SECONDS = 6.0  # that a CPU is timed


@torch.no_grad()
def second_halves(model: nn.Module, windows: Tensor, at: Callable[[Tensor], object] | None = None) -> Tensor:
    """Return the mean loss of the second half of each window, in nats a token, float64 [n]. at: called with the first
    half [1, length] of each window, the prompt of core neurons, before the model reads it."""
    losses = []
    for window in windows.split(1):
        half = window.shape[1] // 2
        if at is not None:
            at(window[:, :half])
        scores = model(window[:, :-1])[0, half - 1 :]
        losses.append(F.cross_entropy(scores.float(), window[0, half:]).double().cpu())
    return torch.stack(losses)


def _lossy(model: nn.Module, batches: tuple[Tensor, ...], prompt: Tensor) -> Iterator[tuple]:
    """Yield a path, the share of neurons, or of multiplications for TEAL, that is spared; what makes a model lossy; and
    what to do with such a model at each prompt, if so."""
    predictors = predict(model, batches, rank=max(16, model.config.d_model // 16))
    for recall in RECALLS:
        at = predictors.at(recall)
        yield f"predicted, recall {recall:.0%}", at.sparsity, at.apply, None
    for share in SHARES:
        core = core_neurons(model, prompt, share)
        anew = lambda own, first, share=share: core_neurons(remove(own), first, share).apply(own)
        yield f"core neurons, {share:.0%}", core.sparsity, core.apply, anew
    for method in ("cats", "teal"):
        calibration = calibrate(model, batches, method=method)
        for sparsity in SPARSITIES:
            chosen, name = calibration.at(sparsity), f"{method.upper()} {sparsity:.0%}"
            spared = chosen.spared
            if method == "cats":
                spared = 1 - fmean(layer.density["activation"] for layer in chosen.layers)
            yield f"{name}, computed densely", spared, chosen.apply, None
            if method == "teal":
                swapped = lambda own, chosen=chosen: sparsify(chosen.apply(own), "kept_inputs")
                yield f"{name}, forced kept_inputs", spared, swapped, None


def chosen_rows(config: TrainConfig) -> list[dict]:
    """Return a step of decoding at batch 1 on every path, with the loss of second halves and `sparsity`, the share that
    is not computed. WrongResult where the lossless path gives other logits than the model it was made of."""
    configs = replace(config, l1=0.0), config
    plain, quiet = (train(own, progress=False).model.eval().requires_grad_(False) for own in configs)
    device, context, text = next(plain.parameters()).device, config.context, source.standard_library()
    seen, held_out = (part.tokens.to(device) for part in text.split())
    windows = source.spread_windows(held_out, config.eval_windows, context)[:, :-1]
    batches = source.spread_windows(seen, max(8, 8192 // context), context)[:, :-1].split(16)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    base = second_halves(plain, windows)

    def says(losses: Tensor, sparsity: float) -> dict:
        cost = LossChange.of(base, losses, context - context // 2)
        return {"sparsity": round(sparsity, 5), **_loss_facts(cost)}

    models, facts = {DENSE: copy.deepcopy(plain).to(dtype)}, {DENSE: says(base, 0.0)}
    for path, sparsity, apply, at in _lossy(plain, batches, windows[:1, : context // 2]):
        model = apply(copy.deepcopy(plain))
        losses = second_halves(model, windows, None if at is None else functools.partial(at, model))
        facts[f"lossy: {path}"], models[f"lossy: {path}"] = says(losses, sparsity), apply(copy.deepcopy(models[DENSE]))
    density, quiet_density = (
        fmean(layer.density for layer in profile(model, batches).layers) for model in (plain, quiet)
    )
    facts[QUIET] = facts[LOSSLESS] = says(second_halves(quiet, windows), 1 - quiet_density)
    models[QUIET] = quiet.to(dtype)
    models[LOSSLESS] = sparsify(copy.deepcopy(quiet), "twell")
    dense, sparse = (models[path](windows[:4]).float() for path in (QUIET, LOSSLESS))
    rows.hold(LOSSLESS, float((dense - sparse).norm() / dense.norm()), 0.02 if dtype == torch.bfloat16 else 1e-3)
    tokens = Tokens(plain.config.vocabulary, device, held_out.long())
    how = {"cached": context, "nnz": config.d_ff * density, "seconds": SECONDS}
    return decode_rows("chosen_neurons", f"{{}}, ReLU trained on {text.name}", models, facts, tokens, 1, **how)


def predictors(left_out: dict | None = None, config: TrainConfig | None = None) -> rows.Sections:
    """Return the steps of the record: one."""
    config = config or (CHOSEN if torch.cuda.is_available() else SMALL_CHOSEN)
    return {"chosen neurons": [lambda: chosen_rows(config)]}
