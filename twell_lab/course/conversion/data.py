"""What notebook 05 computes: points of density and loss of models that were cut, converted or trained.

A point is a dict: `way` ("cut", "convert" or "train"), `model` (what it was made of), `what` (in a word), `density`
(the share of neurons that fire, mean over layers), `change`, `low`, `high` (of the loss, in percent of that of the
model it is held against, with the 95% interval, None where a record has none) and `where` (here, or recorded)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean

from torch import Tensor, nn

from ... import records
from ...analysis.profile import profile
from ...models.thresholds import Calibration, LossChange, calibrate, losses
from ...training.sweep import pressed
from ..own_model import read, windows
from ..sweep import folder, where

HERE = "here, now"


@dataclass(frozen=True, eq=False)
class Judged:
    """A model, what its layers did on some windows, and its loss on others: windows, int64 [n, context], of held-out
    text; alone, the loss of each, nats a token, float64 [n]."""

    what: str
    model: nn.Module
    calibration: Calibration
    windows: Tensor
    alone: Tensor

    @property
    def density(self) -> float:
        """The share of values that are not zero without a threshold."""
        return _left(self.calibration, 0.0)


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
    return mean(by_layer(calibration, sparsity))


def _point(way: str, model: str, what: str, density: float, change: LossChange) -> dict:
    percent = {name: 100 * getattr(change, name) / change.dense for name in ("change", "low", "high")}
    return {"way": way, "model": model, "what": what, "density": density, "where": HERE} | percent


# ---- convert ----


def converted(models: dict[str, nn.Module], against: Judged) -> list[dict]:
    """Points of converted ReLU models, by name, held against a SiLU model that read as much."""
    points = []
    for what, model in models.items():
        change = LossChange.of(against.alone, losses(model, against.windows))
        density = mean(layer.density for layer in profile(model, [against.windows]).layers)
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
    """Points of the recorded sweeps, each run held against its twin without L1. `model`: "l1-free" where the sweep
    trained it and it is here, else the number of weights."""
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
