"""What notebook 05 computes: points of density and loss of models that were cut, converted or trained.

A point is a dict: `way` ("cut", "convert" or "train"), `model` (what it was made of), `what` (in a word), `density`
(the share of neurons that fire for a token, mean over layers), `change`, `low`, `high` (of the loss, in percent of that
of the model it is held against, with its 95% interval; `low` and `high` are None where a record has none) and `where`
(here, or recorded)."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ... import records
from ...analysis.profile import profile
from ...layers.find import feed_forwards
from ...layers.terms import LayerTerm, layer_terms
from ...models.relufy import relufy
from ...models.thresholds import Calibration, LossChange, calibrate, losses
from ...models.tiny import LanguageModel, ModelConfig
from ...training.config import TrainConfig, learning_rate
from ...training.objective import l1_coefficient
from ...training.sweep import pressed
from ...training.text.source import Text, random_windows
from ..own_model.data import read, windows
from ..sweep.data import folder, where
from ..training.data import SMALL

HERE = "here, now"
# The SiLU model, and how its copies are trained on: half of the first peak, and L1 grown after a delay, as
# twell_lab.models.relufy says.
MODEL = replace(SMALL, steps=150)
ON = replace(SMALL, steps=60, lr=5e-3, warmup=10, l1_delay=10, l1_warmup=20, seed=1)


@dataclass(frozen=True, eq=False)
class Judged:
    """A model, what its layers did on some windows, and its loss on others.

    model: left as it is. windows: int64 [n, context], of held-out text. alone: the loss of each, nats a token, float64
    [n]."""

    what: str
    model: nn.Module
    calibration: Calibration
    windows: Tensor
    alone: Tensor

    @property
    def density(self) -> float:
        """The share of values that are not zero without a threshold."""
        return _left(self.calibration, 0.0)

    @property
    def bits_per_byte(self) -> float:
        """The loss of a model whose tokens are bytes, mean over windows."""
        return self.alone.mean().item() / math.log(2)


def judge(what: str, model: nn.Module, seen: Tensor, held_out: Tensor) -> Judged:
    """Calibrate a model on some windows and measure its loss on others. what: its name in figures."""
    return Judged(what, model, calibrate(model, seen.split(16), method="cats"), held_out, losses(model, held_out))


def shipped(name: str, text: str, device: str = "cpu") -> Judged:
    """One of data/checkpoints, judged on a text that it has not read."""
    own = read(name, device)
    return judge(name, own.model, *windows(own, text))


# ---- cut ----


def cut(judged: Judged, sparsities: Sequence[float]) -> list[dict]:
    """Points: thresholds (CATS) of these sparsities on all layers, held against the model without any. Lossy."""
    points = []
    for sparsity in sparsities:
        found = judged.calibration.at(sparsity)
        found.apply(judged.model)
        try:
            after = losses(judged.model, judged.windows)
        finally:
            found.remove(judged.model)
        left = _left(judged.calibration, sparsity)
        change = LossChange.of(judged.alone, after)
        points.append(_point("cut", judged.what, f"cut {sparsity:.0%}", left, change))
    return points


def cut_to(judged: Judged, density: float) -> dict:
    """The point at which thresholds leave this share of the neurons, at most what fires by itself."""
    low, high = 0.0, 1.0  # of sparsities: what is left only falls
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if _left(judged.calibration, middle) > density else (low, middle)
    return cut(judged, [low])[0]


def by_layer(calibration: Calibration, sparsity: float) -> list[float]:
    """The share of neurons that fire in each layer after a cut: what the sparsity leaves, or less where a layer fires
    less by itself."""
    sites = [layer.sites["activation"] for layer in calibration.layers]
    return [site.density(site.threshold(sparsity)) for site in sites]


def _left(calibration: Calibration, sparsity: float) -> float:
    left = by_layer(calibration, sparsity)
    return sum(left) / len(left)


def _point(way: str, model: str, what: str, density: float, change: LossChange) -> dict:
    percent = {name: 100 * getattr(change, name) / change.dense for name in ("change", "low", "high")}
    return {"way": way, "model": model, "what": what, "density": density, "where": HERE} | percent


# ---- convert ----


def smooth(text: Text, config: TrainConfig = MODEL, device: str = "cpu") -> LanguageModel:
    """A model whose feed-forward layers have a SiLU, trained on this text by `further`."""
    torch.manual_seed(config.seed)
    sizes = {name: getattr(config, name) for name in ("d_model", "layers", "heads", "d_ff", "context")}
    model = LanguageModel(ModelConfig(**sizes)).to(device)
    for layer in feed_forwards(model):
        layer.module.act_fn = nn.SiLU()
    further(model, text, config)
    return model


def to_relu(model: LanguageModel) -> LanguageModel:
    """A copy with a ReLU in the place of each activation, and the same weights: `twell_lab.relufy`."""
    # The configuration of such a model says ReLU already, whatever was put in, and relufy warns of that.
    with warnings.catch_warnings(action="ignore"):
        return relufy(copy.deepcopy(model), only=lambda name, layer: True)


def further(model: LanguageModel, text: Text, config: TrainConfig, held_out: Tensor | None = None) -> list[dict]:
    """Train a model on, in place, as the config says, and leave it in evaluation mode.

    TrainConfig's own loop counts who fires, which a SiLU does not let it do; this one needs the steps alone. With
    L1 the model has to be a ReLU's.

    Returns:
        {step, bits (the loss in bits per byte, for tokens that are bytes)} on the windows `held_out`, before the first
        step and after every tenth; none without windows.
    """
    device, draw = next(model.parameters()).device, torch.Generator().manual_seed(config.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=config.weight_decay, betas=(0.9, 0.95))
    data, history = text.split()[0].tokens, []
    for step in range(1, config.steps + 1):
        if held_out is not None and step % 10 == 1:
            history.append({"step": step - 1, "bits": _bits(model, held_out)})
        model.train()
        tokens = random_windows(data, config.batch, config.context, draw).long().to(device)
        asked: AbstractContextManager[Sequence[LayerTerm]] = layer_terms(model) if config.l1 else nullcontext(())
        with asked as terms:
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        if config.l1:
            coefficient = l1_coefficient(config.l1, config.l1_delay, config.l1_warmup, step)
            loss = loss + coefficient * sum(term.l1 for term in terms) / len(terms)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        optimizer.step()
    model.eval()
    if held_out is not None:
        history.append({"step": config.steps, "bits": _bits(model, held_out)})
    return history


def _bits(model: nn.Module, held_out: Tensor) -> float:
    return losses(model, held_out).mean().item() / math.log(2)


def converted(models: dict[str, nn.Module], against: Judged) -> list[dict]:
    """Points of ReLU models, by name, that were converted and perhaps trained on, held against a SiLU model that read
    as much."""
    points = []
    for what, model in models.items():
        change = LossChange.of(against.alone, losses(model, against.windows))
        layers = profile(model, [against.windows]).layers
        density = sum(layer.density for layer in layers) / len(layers)
        points.append(_point("convert", against.what, what, density, change))
    return points


# ---- train ----


def trained(l1_free: Judged, text: str, device: str = "cpu") -> list[dict]:
    """The point of the shipped model "sparse", which was trained with L1, held against "l1-free" on the same windows,
    and that of a cut of it to half as many neurons. None for another model than "l1-free"."""
    if l1_free.what != "l1-free":
        return []
    sparse = replace(shipped("sparse", text, device), what=l1_free.what, alone=l1_free.alone)
    (point,), halved = cut(sparse, [0.0]), cut_to(sparse, sparse.density / 2)
    return [point | {"way": "train", "what": "with L1"}, halved | {"way": "train", "what": "with L1, then cut"}]


def recorded() -> list[dict]:
    """Points of the recorded sweeps, each run held against its twin without L1.

    `model` is "l1-free" for the sweep in which that model was trained, where it is here (`folder`), and the number of
    weights for the other."""
    points, newest = [], {record.name: record for record in records.load_all()}
    for name, here in (("sweep-small", folder("l1-free").name == "l1-free"), ("sweep", False)):
        rows = newest[name].rows
        first, *_ = runs = rows if name == "sweep-small" else pressed(rows)
        for row in runs:
            point = {"way": "train", "model": "l1-free" if here else f"{row['parameters'] / 1e6:.0f}M weights"}
            more = row["validation_bits_per_byte"] / first["validation_bits_per_byte"] - 1
            point |= {"what": f"L1 {row['config']['l1']:g}", "density": 1 - row["zeros"], "change": 100 * more}
            points.append(point | {"low": None, "high": None, "where": where(newest[name])})
    return points


# ---- what it comes to ----


def nearest(point: dict, cuts: Sequence[dict]) -> dict | None:
    """The cut of the same model that leaves about as many neurons."""
    off = lambda cut: abs(cut["density"] / point["density"] - 1)
    near = [cut for cut in cuts if cut["model"] == point["model"] and off(cut) < 0.05]
    return min(near, key=off, default=None)


def better(point: dict, other: dict) -> str:
    """The way that costs less: which of two points' intervals lies lower; "unclear" where they overlap."""
    if point["high"] < other["low"]:
        return point["way"]
    return other["way"] if point["low"] > other["high"] else "unclear"


def span(point: dict) -> str:
    """The interval of what a point costs."""
    return f"{point['low']:+.1f}..{point['high']:+.1f}%"
