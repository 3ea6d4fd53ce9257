"""What notebook 05 computes: points of density and loss of models that were cut, converted or trained.

A point is a dict: `way` ("cut", "convert" or "train"), `model` (what it was made of), `what` (in a word), `density`
(the share of neurons that fire for a token, mean over layers), `change`, `low`, `high` (of the loss, in percent of that
of the model it is held against, with its 95% interval; `low` and `high` are None where a record has none), `steps` (of
training, with the new activation or penalty) and `where` (here, or recorded)."""

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

from ... import core, records
from ...analysis.profile import profile
from ...layers.find import feed_forwards
from ...layers.terms import LayerTerm, layer_terms
from ...models.relufy import relufy
from ...models.thresholds import Calibration, LossChange, calibrate, losses
from ...models.tiny import LanguageModel, ModelConfig
from ...training.config import TrainConfig, l1_coefficient, learning_rate
from ...training.sweep import cost, pressed
from ...training.text.source import Text, random_windows
from ..own_model.data import Own, read, windows
from ..sweep.data import folder, where
from ..training.data import SMALL

HERE = "here, now"
SAME = 0.01  # of the logits' size: kernels add in another order, and a value at its threshold may fall on either side
THEN_CUT = "with L1, then cut"
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
    own: Own = read(name, device)
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
        change = LossChange.of(judged.alone, after, judged.windows.shape[1] - 1)
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


def _point(way: str, model: str, what: str, density: float, change: LossChange, steps: int = 0) -> dict:
    percent = {name: 100 * getattr(change, name) / change.dense for name in ("change", "low", "high")}
    told = {"way": way, "model": model, "what": what, "density": density, "steps": steps, "where": HERE}
    return told | percent


# ---- convert ----


def smooth(text: Text, config: TrainConfig = MODEL, device: str = "cpu") -> LanguageModel:
    """A model whose feed-forward layers have a SiLU, trained on this text by `further`."""
    torch.manual_seed(config.seed)
    sizes = ModelConfig(
        d_model=config.d_model, layers=config.layers, heads=config.heads, d_ff=config.d_ff, context=config.context
    )
    model = LanguageModel(sizes).to(device)
    for layer in feed_forwards(model):
        layer.module.act_fn = nn.SiLU()
    further(model, text, config)
    return model


def to_relu(model: LanguageModel) -> LanguageModel:
    """A copy with a ReLU in the place of each activation, and the same weights: `twell_lab.relufy`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the configuration of such a model says ReLU already, whatever was put in
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


def converted(models: dict[str, nn.Module], against: Judged, steps: int) -> list[dict]:
    """Points of ReLU models, by name, that were converted and trained on for `steps`, held against a SiLU model that
    read as much."""
    points = []
    for what, model in models.items():
        change = LossChange.of(against.alone, losses(model, against.windows), against.windows.shape[1] - 1)
        points.append(_point("convert", against.what, what, _density(model, against.windows), change, steps))
    return points


def _density(model: nn.Module, tokens: Tensor) -> float:
    layers = profile(model, [tokens]).layers
    return sum(layer.mean_nnz / layer.d_ff for layer in layers) / len(layers)


# ---- train ----


def trained(l1_free: Judged, text: str, device: str = "cpu") -> list[dict]:
    """The point of the shipped model "sparse", which was trained with L1, held against "l1-free" on the same windows,
    and that of a cut of it to half as many neurons. None for another model than "l1-free"."""
    if l1_free.what != "l1-free":
        return []
    sparse = replace(shipped("sparse", text, device), what=l1_free.what, alone=l1_free.alone)
    made = core.read_json(folder("sparse") / "made.json", "the model's card")
    takes = {"way": "train", "steps": made["config"]["steps"]}
    (point,), halved = cut(sparse, [0.0]), cut_to(sparse, sparse.density / 2)
    return [point | takes | {"what": "with L1"}, halved | takes | {"what": THEN_CUT}]


def recorded() -> list[dict]:
    """Points of the recorded sweeps, each run held against its twin without L1; none where no sweep is recorded.

    `model` is "l1-free" for the sweep in which that model was trained, where it is here (`folder`), and the number of
    weights for the other."""
    points, here = [], folder("l1-free").name == "l1-free"
    for record in filter(None, (_newest("sweep-small"), _newest("sweep"))):
        rows = [row | {"label": _named(row)} for row in record.rows]
        for row in pressed(rows):
            trained_there = here and record.name == "sweep-small"
            points.append(
                {
                    "way": "train",
                    "model": "l1-free" if trained_there else f"{row['parameters'] / 1e6:.0f}M weights",
                    "what": f"L1 {row['config']['l1']:g}",
                    "density": 1 - row["zeros"],
                    "change": 100 * cost(row, rows),
                    "low": None,
                    "high": None,
                    "steps": row["config"]["steps"],
                    "where": where(record),
                }
            )
    return points


def _named(row: dict) -> str:
    """The label of a run as `twell_lab.training.sweep` reads it; the small sweep's say "small" first."""
    said, l1 = row["label"].removeprefix("small, "), row["config"]["l1"]
    return f"lr {row['config']['lr']:g}" if said != row["label"] and not l1 else said


def _newest(name: str) -> records.Record | None:
    found = [record for record in records.load_all() if record.name == name]
    return found[-1] if found else None


# ---- what it comes to ----


def same_output(model: nn.Module, other: nn.Module, tokens: Tensor) -> bool:
    """Return whether two models give the same logits, but for the order in which kernels add: within `SAME` of their
    size."""
    with torch.no_grad():
        got, wanted = (each(tokens.to(next(each.parameters()).device)).float() for each in (model, other))
    return bool((got - wanted).norm() < SAME * wanted.norm())


def nearest(point: dict, cuts: Sequence[dict]) -> dict | None:
    """The cut of the same model that leaves about as many neurons."""
    off = {
        i: abs(cut["density"] / point["density"] - 1) for i, cut in enumerate(cuts) if cut["model"] == point["model"]
    }
    best = min(off, key=off.__getitem__, default=None)
    return cuts[best] if best is not None and off[best] < 0.05 else None


def better(point: dict, other: dict) -> str:
    """The way that costs less: which of two points' intervals lies lower; "unclear" where they overlap."""
    if point["high"] < other["low"]:
        return point["way"]
    return other["way"] if point["low"] > other["high"] else "unclear"


def span(point: dict) -> str:
    """The interval of what a point costs."""
    return f"{point['low']:+.1f}..{point['high']:+.1f}%"
