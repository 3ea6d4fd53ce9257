"""What thresholds of every sparsity do to a model: counted once, so that a slider only looks it up.

A model runs while it is counted (`count`), and where its loss (`measure`) or the time of a step (`clock`) is measured
at one more sparsity; never in `view`, which reads what is there: densities from histograms, the rest between points
that were measured."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import quantiles
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ...analysis.costs import Rates, by_choice
from ...analysis.predict import rates_of
from ...analysis.profile import Counter
from ...analysis.running import hidden_by
from ...bench.causal import Causal
from ...core import InputError
from ...formats.twell import TILE, WORDS
from ...layers.lossy import lossy_parts
from ...layers.paths.cost import Firing
from ...models.swap import sparsify
from ...models.thresholds import LEVELS, Calibration, LossChange, calibrate
from ...ops import clock as clocks
from ...plots import layer_names

SPARSITIES = (0.3, 0.5, 0.7, 0.9)  # where the loss is measured before anybody asks
MOST = LEVELS[-1]
_ROUNDS, _BURST_MS = 7, 10.0  # samples of a step's time, and about how long the calls of one take; at most ten calls


class Step(NamedTuple):
    """How long decoding a token took on a device, milliseconds on the wall of plain calls: with thresholds, all layers
    on the TwELL path, and as the model was, in turn."""

    device: str
    ms: tuple[float, ...]
    dense_ms: tuple[float, ...]


@dataclass
class Counted:
    """What was counted of one model.

    what: what figures call it. calibration: the histograms of its layers (CATS). gpu: what times are predicted for.
    errors, overflow: by layer, at each of LEVELS, the error of its output and the share of tiles with more values than
    slots. us: likewise the microseconds for one token on each path, by its name. losses, steps: what was measured, by
    sparsity."""

    what: str
    model: nn.Module
    windows: Tensor
    calibration: Calibration
    gpu: str
    errors: list[list[float]]
    overflow: list[list[float]]
    us: list[list[dict[str, float]]]
    losses: dict[float, LossChange] = field(default_factory=dict)
    steps: dict[float, Step] = field(default_factory=dict)


def count(
    what: str, model: nn.Module, batches: Iterable, windows: Tensor, *, sparsities: Sequence[float] = SPARSITIES
) -> Counted:
    """Run the model over batches and windows, and count what CATS thresholds of every sparsity do to it.

    Times are predicted for the GPU that the model is on, if data/gpus.json has it, else for an H100.

    Args:
        what: what the figure calls the model; one with random weights is to be called that.
        model, batches: as `twell_lab.thresholds` takes them.
        windows: a text that is not in the batches, int64 [n, length], on which the loss is measured.
        sparsities: where the loss is measured now.

    Raises:
        InputError: as `twell_lab.thresholds`.
    """
    calibration = calibrate(model, batches, method="cats")
    rates = _rates(next(model.parameters()).device)
    errors, overflow, us = [], [], []
    for layer in calibration.layers:
        firing = []
        for level in LEVELS:
            thresholds = {site: histogram.threshold(level) for site, histogram in layer.sites.items()}
            counter = Counter(replace(layer.layer, acts=lambda hidden: hidden), TILE, WORDS)
            with torch.no_grad():
                hidden = hidden_by(layer.layer, layer.rows, thresholds)
            counter.add(layer.rows, lambda of, hidden=hidden: hidden[of])
            firing.append((layer.error(thresholds), counter.result()))
        errors.append([error for error, _ in firing])
        overflow.append([(each.tile_histogram[WORDS:].sum() / each.tile_histogram.sum()).item() for _, each in firing])
        took = [by_choice(Firing.of(each), rates, 1) for _, each in firing]
        us.append([{choice.path: time for choice, time in times.items()} for times in took])
    counted = Counted(what, model, windows, calibration, rates.device, errors, overflow, us)
    for sparsity in sparsities:
        measure(counted, sparsity)
    return counted


def _rates(device: torch.device) -> Rates:
    """Those of this device, or of an H100 where data/gpus.json has no figures of it."""
    try:
        return rates_of(clocks.device_name(device))
    except InputError:
        return rates_of("H100 SXM")


def measure(counted: Counted, sparsity: float) -> LossChange:
    """Measure the loss with thresholds of this sparsity, and keep it among the points. The model runs, and is left as
    it was."""
    counted.losses[sparsity] = cost = counted.calibration.at(sparsity).loss(counted.model, counted.windows)
    return cost


@torch.no_grad()
def clock(counted: Counted, sparsity: float) -> Step:
    """Measure on this machine how long decoding a token after a window of the text takes with thresholds of this
    sparsity and without any, and keep it among the points. A copy of the model gets the thresholds, and the TwELL path
    in every layer, be that faster or not. InputError for a model that is no causal language model, and for one with
    thresholds on it."""
    if lossy_parts(counted.model):
        raise InputError("the model has thresholds on it; accepted: one without (Thresholds.remove)")
    device = next(counted.model.parameters()).device
    cut = sparsify(counted.calibration.at(sparsity).apply(copy.deepcopy(counted.model)), "twell")
    runs, windows = {}, counted.windows.to(device)
    for name, model in (("ms", Causal(cut)), ("dense_ms", Causal(counted.model))):
        step, kept, last = model.reader(), model.keep(windows[:1, :-1]), windows[:1, -1:]
        runs[name] = lambda turn, step=step, kept=kept, last=last: step(last, kept)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    once = clocks.time_bursts(runs, wait, rounds=1, count=1)["dense_ms"][1][0]
    took = clocks.time_bursts(runs, wait, rounds=_ROUNDS, count=min(10, max(1, int(_BURST_MS / once))))
    samples = {name: tuple(wall) for name, (_, wall) in took.items()}
    counted.steps[sparsity] = step = Step(clocks.device_name(device), **samples)
    return step


def view(counted: Counted, sparsity: float) -> dict:
    """Return what thresholds of this sparsity do, without running the model.

    Returns:
        what, gpu, sparsity; layers: their names; density: of each layer, from histograms; error, overflow: of each
        layer, between levels on a line; path, us, dense_us: of each layer, the path that should take least, and what it
        and the dense path should take, between levels on a line; plain_us: what the best path should take without a
        threshold; loss: the change of the loss, in percent of the loss without thresholds, on a line between the
        measured points around it, None beyond the last; measured: whether it was measured here; points: (sparsity,
        change, low, high) of each point, the first at 0; step: the device, and ms and dense_ms, medians, None where no
        step was timed here; steps: (sparsity, median, low, high, median without thresholds) of each that was, low and
        high of the middle half.
    """
    layers = counted.calibration.layers
    shares = [share["activation"] for share in counted.calibration.sparsities(sparsity)]
    sites = [layer.sites["activation"] for layer in layers]
    took = [
        {path: _between(LEVELS, [at[path] for at in levels], share) for path in levels[0]}
        for levels, share in zip(counted.us, shares)
    ]
    best = [min(paths, key=paths.__getitem__) for paths in took]
    points = [(0.0, 0.0, 0.0, 0.0)]
    points += [(at, *_percent(found)) for at, found in sorted(counted.losses.items()) if at]
    inside, here = sparsity <= points[-1][0], counted.steps.get(sparsity)
    return {
        "what": counted.what,
        "gpu": counted.gpu,
        "sparsity": sparsity,
        "layers": layer_names([layer.name for layer in layers]),
        "density": [site.density(site.threshold(share)) for site, share in zip(sites, shares)],
        "error": [_between(LEVELS, errors, share) for errors, share in zip(counted.errors, shares)],
        "overflow": [_between(LEVELS, crowded, share) for crowded, share in zip(counted.overflow, shares)],
        "path": best,
        "us": [paths[path] for paths, path in zip(took, best)],
        "dense_us": [paths["dense"] for paths in took],
        "plain_us": [min(levels[0].values()) for levels in counted.us],
        "loss": _between([at for at, *_ in points], [change for _, change, *_ in points], sparsity) if inside else None,
        "measured": sparsity in counted.losses or sparsity == 0,
        "points": points,
        "step": here and {"device": here.device, "ms": _middle(here.ms)[0], "dense_ms": _middle(here.dense_ms)[0]},
        "steps": [(at, *_middle(step.ms), _middle(step.dense_ms)[0]) for at, step in sorted(counted.steps.items())],
    }


def sentence(view: dict) -> str:
    """Return what a view shows, in a line; that it is lossy is part of it."""
    if view["loss"] is None:
        loss = "loss not measured beyond the last point"
    else:
        loss = f"loss {view['loss']:+.2f}% ({'measured' if view['measured'] else 'between measured points'})"
    # Predicted: a view asks what thresholds that were never put on a layer would be worth.
    us, plain, dense = (sum(view[name]) for name in ("us", "plain_us", "dense_us"))
    all_layers = f"{len(view['us'])} layers together" if len(view["us"]) > 1 else "it"
    on = f"; on {view['gpu']}"
    if not us < dense:
        time = f"{on} no path should be faster than dense, with which {all_layers} should take {dense:,.0f} us"
    elif view["sparsity"] == 0:
        time = (
            f"{on}, without a threshold, {all_layers} should take {us:,.0f} us on the best path instead of "
            f"{dense:,.0f}, by fewer launches or what is zero by itself"
        )
    else:
        time = f"{on}, {all_layers} should take {us:,.0f} us if zeros are skipped instead of {dense:,.0f}"
        time += f", and {plain:,.0f} without a threshold" if plain < dense else ""
        time += ": launches decide" if f"{us:,.0f}" == f"{plain:,.0f}" else ""
    if step := view["step"]:
        time += f"; here decoding a token took {step['ms']:.3g} ms on the TwELL path instead of {step['dense_ms']:.3g}"
    return f"{view['what']}, CATS, sparsity {view['sparsity']:.0%} (lossy): {loss}{time}"


def _percent(found: LossChange) -> tuple[float, float, float]:
    """The change of the loss and its interval, in percent of the loss without thresholds."""
    change, low, high = (100 * value / found.dense for value in (found.change, found.low, found.high))
    return change, low, high


def _middle(samples: Sequence[float]) -> tuple[float, float, float]:
    """The median, and the ends of the middle half."""
    low, median, high = quantiles(samples, n=4, method="inclusive")
    return median, low, high


def _between(places: Sequence[float], values: Sequence[float], at: float) -> float:
    """The value at a place on the line between those at the places around it. places: rising."""
    return float(np.interp(at, places, values))
