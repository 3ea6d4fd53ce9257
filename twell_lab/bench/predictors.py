"""Chosen neurons in decoding, lossy: what a step takes and what the loss becomes, for predictors (Deja Vu), core
neurons (CoreInfer), thresholds (CATS, TEAL), and a model trained with L1, which loses nothing when it is swapped.

One ReLU model is trained here twice, without L1 and with it. The lossy ones are made of the first. Losses are of the
second halves of held-out windows, whose first halves are the prompts of the core neurons."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..analysis.profile import profile
from ..layers.choice import Choice
from ..models.swap import sparsify
from ..models.thresholds import LossChange, calibrate
from ..ops import clock
from ..sparsities.core_neurons import core_neurons, remove
from ..sparsities.predictors import predict
from ..training.config import TrainConfig
from ..training.loop import train
from ..training.text import source
from . import rows
from .causal import Causal
from .rows import DENSE
from .workloads import Clocks, Tokens, decode

KIND = "chosen_neurons"
LOSSLESS = "trained with L1, forced twell"


@dataclass(frozen=True)
class Shape:
    """The models and what is made of them.

    config: of the training without L1; l1: of the other. windows: of held-out text. recalls: of predictors, of this
    rank. shares: of core neurons. sparsities: of thresholds."""

    config: TrainConfig = field(
        default_factory=lambda: TrainConfig(
            d_model=1024, layers=4, heads=16, d_ff=4096, context=256, batch=32, steps=600, lr=6e-4, dtype="bfloat16"
        )
    )
    l1: float = 3e-4
    windows: int = 32
    rank: int = 64
    recalls: tuple[float, ...] = (0.8, 0.9, 0.95, 0.99)
    shares: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4)
    sparsities: tuple[float, ...] = (0.5, 0.7, 0.9)
    seconds: float = 1.0  # of each timing on a CPU


def small() -> Shape:
    """For a CPU: two to four minutes on two cores."""
    config = TrainConfig(d_model=128, layers=4, heads=4, d_ff=512, context=64, batch=8, steps=600, lr=2e-3, warmup=50)
    return Shape(config, l1=2e-3, windows=24, rank=16, seconds=6.0)


class Trained:
    """Both models, in evaluation mode, float32, and text that neither was trained on: windows int64 [n, context]."""

    def __init__(self, shape: Shape) -> None:
        self.shape, config = shape, shape.config
        self.plain, self.sparse = (self._train(l1) for l1 in (0.0, shape.l1))
        self.device = next(self.plain.parameters()).device
        self.text = source.standard_library()
        seen, self.held_out = (part.tokens for part in self.text.split())
        cut = lambda tokens, count: source.spread_windows(tokens, count, config.context)[:, :-1].to(self.device)
        self.windows = cut(self.held_out, shape.windows)
        self.batches = cut(seen, max(8, 8192 // config.context)).split(16)

    def _train(self, l1: float) -> nn.Module:
        result = train(replace(self.shape.config, l1=l1), progress=False)
        return result.model.eval().requires_grad_(False)


@torch.no_grad()
def second_halves(model: nn.Module, windows: Tensor, at: Callable[[Tensor], object] | None = None) -> Tensor:
    """The mean loss of the second half of each window, in nats a token, float64 [n], given the first half.

    at: called with the first half [1, length] of each window before the model reads it."""
    found = []
    for window in windows.split(1):
        half = window.shape[1] // 2
        if at is not None:
            at(window[:, :half])
        scores = model(window[:, :-1])[0, half - 1 :]
        found.append(F.cross_entropy(scores.float(), window[0, half:]).double().cpu())
    return torch.stack(found)


def _lossy(trained: Trained) -> dict[str, tuple[float, Callable[[nn.Module], nn.Module], Callable | None]]:
    """By path: the share of neurons, or of multiplications for TEAL, that is spared; what makes a model lossy; and what
    to do at each prompt, if so."""
    shape, model, made = trained.shape, trained.plain, {}
    predictors = predict(model, trained.batches, rank=shape.rank)
    for recall in shape.recalls:
        at = predictors.at(recall)
        made[f"lossy: predicted, recall {recall:.0%}"] = at.sparsity, at.apply, None
    prompt = trained.windows[:1, : trained.windows.shape[1] // 2]
    for share in shape.shares:
        core = core_neurons(model, prompt, share)
        again = lambda held, first, share=share: core_neurons(remove(held), first, share).apply(held)
        made[f"lossy: core neurons, {share:.0%}"] = core.sparsity, core.apply, again
    for method in ("cats", "teal"):
        calibration = calibrate(model, trained.batches, method=method)
        for sparsity in shape.sparsities:
            found = calibration.at(sparsity)
            spared = (
                found.spared
                if method == "teal"
                else 1 - sum(layer.density["activation"] for layer in found.layers) / len(found.layers)
            )
            made[f"lossy: {method.upper()} {sparsity:.0%}, computed densely"] = spared, found.apply, None
            if method == "teal":
                swapped = lambda held, found=found: sparsify(found.apply(held), Choice("kept_inputs"))
                made[f"lossy: TEAL {sparsity:.0%}, forced kept_inputs"] = spared, swapped, None
    return made


@torch.no_grad()
def chosen_rows(trained: Trained) -> list[dict]:
    """A step of decoding at batch 1 on every path. Each row has the `loss`, its `loss_change` against the dense model
    without L1 (low, mean, high; nats a token), and `sparsity`, the share that is not computed.

    Raises clock.WrongResult where the lossless path gives other logits than the model it was made of."""
    shape, windows = trained.shape, trained.windows
    base = second_halves(trained.plain, windows)
    dtype = torch.bfloat16 if trained.device.type == "cuda" else torch.float32
    plain = copy.deepcopy(trained.plain).to(dtype)
    models, facts = {DENSE: plain}, {DENSE: _says(base, base, windows, 0.0)}
    for path, (sparsity, apply, at) in _lossy(trained).items():
        model = apply(copy.deepcopy(trained.plain))
        losses = second_halves(model, windows, None if at is None else functools.partial(at, model))
        facts[path] = _says(base, losses, windows, sparsity)
        models[path] = apply(copy.deepcopy(plain))
    quiet = second_halves(trained.sparse, windows)
    density = _density(trained.sparse, trained.batches)
    models["trained with L1, dense"] = copy.deepcopy(trained.sparse).to(dtype)
    models[LOSSLESS] = sparsify(copy.deepcopy(models["trained with L1, dense"]), Choice("twell"))
    facts["trained with L1, dense"] = facts[LOSSLESS] = _says(base, quiet, windows, 1 - density)
    causal = {path: Causal(model) for path, model in models.items()}
    tokens = Tokens(plain.config.vocabulary, trained.device, trained.held_out.long())
    (work,) = decode(tokens, causal[DENSE], 1, windows.shape[1], (True,))
    calls = {path: work.makes(model, False) for path, model in causal.items()}
    dense, sparse = (calls[path](0).float() for path in ("trained with L1, dense", LOSSLESS))
    if not (dense - sparse).norm() <= (0.02 if dtype == torch.bfloat16 else 1e-3) * dense.norm():
        raise clock.WrongResult(f"{LOSSLESS}: other logits than the dense model's: nothing was timed")
    timed = (
        rows.clock_cpu(calls, shape.seconds)
        if trained.device.type == "cpu"
        else Clocks(trained.device, graphs=True).time(calls, 1, "", None)
    )
    sizes = plain.config
    shared = {
        "kind": KIND,
        "device": clock.device_name(trained.device),
        "dtype": str(dtype).removeprefix("torch."),
        "tokens": 1,
        "d_model": sizes.d_model,
        "d_ff": sizes.d_ff,
        "layers": sizes.layers,
        "nnz": round(sizes.d_ff * _density(trained.plain, trained.batches), 2),
        "workload": f"{work.label}, ReLU trained on {trained.text.name}",
    }
    return [row | work.says for row in rows.table(shared, timed[0], facts, timed[1])]


def _says(base: Tensor, losses: Tensor, windows: Tensor, sparsity: float) -> dict:
    cost = LossChange.of(base, losses, windows.shape[1] - windows.shape[1] // 2)
    change = [round(each, 5) for each in (cost.low, cost.change, cost.high)]
    return {"sparsity": round(sparsity, 5), "loss": round(cost.thresholded, 5), "loss_change": change}


def _density(model: nn.Module, batches) -> float:
    layers = profile(model, batches).layers
    return sum(layer.density for layer in layers) / len(layers)


def sections(shape: Shape) -> rows.Sections:
    """The steps of the record, as in bench.inference: one."""
    return {"chosen neurons": [lambda: chosen_rows(Trained(shape))]}
