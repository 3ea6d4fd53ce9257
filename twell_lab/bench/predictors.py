"""Chosen neurons in decoding, lossy: what a step takes and what the loss becomes, for predictors (Deja Vu), core
neurons (CoreInfer), thresholds (CATS, TEAL), and a model trained with L1, which loses nothing when it is swapped.

One ReLU model is trained here twice, without L1 and with it. The lossy ones are made of the first. Losses are of the
second halves of held-out windows, whose first halves are the prompts of the core neurons."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..analysis.profile import profile
from ..models.swap import sparsify
from ..models.thresholds import LossChange, calibrate
from ..ops import clock
from ..sparsities.core_neurons import core_neurons
from ..sparsities.few_neurons import remove
from ..sparsities.predictors import predict
from ..training.config import TrainConfig
from ..training.loop import train
from ..training.text import source
from . import rows
from .causal import Causal
from .rows import DENSE
from .thresholds import loss_facts
from .workloads import Tokens, variant_rows

KIND = "chosen_neurons"
QUIET, LOSSLESS = "trained with L1, dense", "trained with L1, forced twell"
Apply = Callable[[nn.Module], nn.Module]


@dataclass(frozen=True)
class Shape:
    """The models and what is made of them.

    config: of the training without L1; l1: of the other. windows: of held-out text. recalls: of predictors, of this
    rank. shares: of core neurons. sparsities: of thresholds. seconds: that a CPU is timed."""

    config: TrainConfig = TrainConfig(
        d_model=1024, layers=4, heads=16, d_ff=4096, context=256, batch=32, steps=600, lr=6e-4, dtype="bfloat16"
    )
    l1: float = 3e-4
    windows: int = 32
    rank: int = 64
    recalls: tuple[float, ...] = (0.8, 0.9, 0.95, 0.99)
    shares: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4)
    sparsities: tuple[float, ...] = (0.5, 0.7, 0.9)
    seconds: float = 1.0


def small() -> Shape:
    """Return a shape for a CPU: two to four minutes on two cores."""
    config = TrainConfig(d_model=128, layers=4, heads=4, d_ff=512, context=64, batch=8, steps=600, lr=2e-3, warmup=50)
    return Shape(config, l1=2e-3, windows=24, rank=16, seconds=6.0)


@torch.no_grad()
def second_halves(model: nn.Module, windows: Tensor, at: Callable[[Tensor], object] | None = None) -> Tensor:
    """Return the mean loss of the second half of each window, in nats a token, float64 [n]. at: called with the first
    half [1, length] of each window before the model reads it."""
    losses = []
    for window in windows.split(1):
        half = window.shape[1] // 2
        if at is not None:
            at(window[:, :half])
        scores = model(window[:, :-1])[0, half - 1 :]
        losses.append(F.cross_entropy(scores.float(), window[0, half:]).double().cpu())
    return torch.stack(losses)


def _lossy(
    shape: Shape, model: nn.Module, batches: tuple[Tensor, ...], prompt: Tensor
) -> Iterator[tuple[str, float, Apply, Callable | None]]:
    """Yield a path, the share of neurons, or of multiplications for TEAL, that is spared; what makes a model lossy; and
    what to do with such a model at each prompt, if so."""
    predictors = predict(model, batches, rank=shape.rank)
    for recall in shape.recalls:
        at = predictors.at(recall)
        yield f"predicted, recall {recall:.0%}", at.sparsity, at.apply, None
    for share in shape.shares:
        core = core_neurons(model, prompt, share)
        anew = lambda own, first, share=share: core_neurons(remove(own), first, share).apply(own)
        yield f"core neurons, {share:.0%}", core.sparsity, core.apply, anew
    for method in ("cats", "teal"):
        calibration = calibrate(model, batches, method=method)
        for sparsity in shape.sparsities:
            chosen, name = calibration.at(sparsity), f"{method.upper()} {sparsity:.0%}"
            spared = chosen.spared
            if method == "cats":
                spared = 1 - fmean(layer.density["activation"] for layer in chosen.layers)
            yield f"{name}, computed densely", spared, chosen.apply, None
            if method == "teal":
                swapped = lambda own, chosen=chosen: sparsify(chosen.apply(own), "kept_inputs")
                yield f"{name}, forced kept_inputs", spared, swapped, None


def chosen_rows(shape: Shape) -> list[dict]:
    """Return a step of decoding at batch 1 on every path. Each row has the `loss`, its `loss_change` against the dense
    model without L1 (low, mean, high; nats a token), and `sparsity`, the share that is not computed.

    Raises clock.WrongResult where the lossless path gives other logits than the model it was made of."""
    configs = (replace(shape.config, l1=l1) for l1 in (0.0, shape.l1))
    plain, quiet = (train(config, progress=False).model.eval().requires_grad_(False) for config in configs)
    device, context, text = next(plain.parameters()).device, shape.config.context, source.standard_library()
    seen, held_out = (part.tokens.to(device) for part in text.split())
    windows = source.spread_windows(held_out, shape.windows, context)[:, :-1]
    batches = source.spread_windows(seen, max(8, 8192 // context), context)[:, :-1].split(16)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    base = second_halves(plain, windows)

    def says(losses: Tensor, sparsity: float) -> dict:
        return {"sparsity": round(sparsity, 5), **loss_facts(LossChange.of(base, losses, context - context // 2))}

    models, facts = {DENSE: copy.deepcopy(plain).to(dtype)}, {DENSE: says(base, 0.0)}
    for path, sparsity, apply, at in _lossy(shape, plain, batches, windows[:1, : context // 2]):
        model = apply(copy.deepcopy(plain))
        losses = second_halves(model, windows, None if at is None else functools.partial(at, model))
        facts[f"lossy: {path}"], models[f"lossy: {path}"] = says(losses, sparsity), apply(copy.deepcopy(models[DENSE]))
    profiles = [profile(model, batches).layers for model in (plain, quiet)]
    density, quiet_density = (fmean(layer.density for layer in layers) for layers in profiles)
    facts[QUIET] = facts[LOSSLESS] = says(second_halves(quiet, windows), 1 - quiet_density)
    models[QUIET] = quiet.to(dtype)
    models[LOSSLESS] = sparsify(copy.deepcopy(quiet), "twell")
    dense, sparse = (models[path](windows[:4]).float() for path in (QUIET, LOSSLESS))
    if not (dense - sparse).norm() <= (0.02 if dtype == torch.bfloat16 else 1e-3) * dense.norm():
        raise clock.WrongResult(f"{LOSSLESS}: other logits than the dense model's: nothing was timed")
    causal = {path: Causal(model) for path, model in models.items()}
    tokens = Tokens(plain.config.vocabulary, device, held_out.long())
    how = {"cached": context, "nnz": plain.config.d_ff * density, "seconds": shape.seconds}
    return variant_rows(KIND, f"{{}}, ReLU trained on {text.name}", causal, facts, tokens, 1, **how)


def sections(shape: Shape) -> rows.Sections:
    """Return the steps of the record: one."""
    return {"chosen neurons": [lambda: chosen_rows(shape)]}
