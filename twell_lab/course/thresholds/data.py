"""What thresholds of every sparsity do to a model: counted once, so that a slider only looks it up.

A model runs while it is counted (`count`), and where its loss (`measure`) or the time of a step (`clock`) is measured
at one more sparsity; never in `view`, which reads what is there: densities from histograms, the rest between points
that were measured."""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import quantiles

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


@dataclass(frozen=True)
class Step:
    """How long a step of the whole model took, milliseconds on the wall of plain calls, with thresholds and without, in
    turn.

    what: the step, such as "decoding a token"; device: where; path: what computed the layers with thresholds, "twell",
    or for "teal" "kept_inputs" on a GPU and "dense" elsewhere. Without thresholds the layers are as they were."""

    what: str
    device: str
    path: str
    ms: tuple[float, ...]
    dense_ms: tuple[float, ...]


@dataclass
class Counted:
    """What was counted of one model.

    what: what figures call it. calibration: the histograms of its layers. greedy: whether each layer gets its own
    sparsity. gpu, tokens: what times are predicted for. errors, overflow: by layer, at each of LEVELS, the error of its
    output and the share of tiles with more values than slots. us: likewise the microseconds on each path, by its name;
    none with "teal", whose savings are not predicted. losses, steps: what was measured, by sparsity."""

    what: str
    model: nn.Module
    windows: Tensor
    calibration: Calibration
    greedy: bool
    gpu: str
    tokens: int
    errors: list[list[float]]
    overflow: list[list[float]]
    us: list[list[dict[str, float]]]
    losses: dict[float, LossChange] = field(default_factory=dict)
    steps: dict[float, Step] = field(default_factory=dict)


def count(
    what: str,
    model: nn.Module,
    batches: Iterable,
    windows: Tensor,
    *,
    method: str = "cats",
    greedy: bool = False,
    gpu: str | None = None,
    tokens: int = 1,
    sparsities: Sequence[float] = SPARSITIES,
) -> Counted:
    """Run the model over batches and windows, and count what thresholds of every sparsity do to it.

    Args:
        what: what the figure calls the model; one with random weights is to be called that.
        model, batches, method: as `twell_lab.thresholds` takes them.
        windows: a text that is not in the batches, int64 [n, length], on which the loss is measured.
        greedy: give each layer its own sparsity, with "cats" alone.
        gpu, tokens: a name in data/gpus.json and how many tokens at once, for predicted times. None: the GPU that the
            model is on, if that file has it, else an H100.
        sparsities: where the loss is measured now.

    Raises:
        InputError: as `twell_lab.thresholds`, and for wrong arguments.
    """
    if not isinstance(what, str) or not what:
        raise InputError(
            f"what is {what!r:.80}; what to call the model is accepted, such as 'a Llama of random weights'"
        )
    if greedy and method != "cats":
        raise InputError(
            f"greedy with {method!r:.80}; accepted: 'cats', whose layers have one place for a threshold each"
        )
    rates = None if gpu is None else rates_of(gpu)
    if type(tokens) is not int or tokens < 1:
        raise InputError(f"tokens is {tokens!r:.80}; a whole number from 1 up is accepted")
    calibration = calibrate(model, batches, method=method)
    rates = rates or _rates(next(model.parameters()).device)
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
        us.append(
            [
                {choice.path: took for choice, took in by_choice(Firing.of(each), rates, tokens).items()}
                for _, each in firing
                if method == "cats"
            ]
        )
    counted = Counted(what, model, windows, calibration, greedy, rates.device, tokens, errors, overflow, us)
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
    _check(sparsity)
    chosen = counted.calibration.at(sparsity, greedy=counted.greedy)
    counted.losses[sparsity] = cost = chosen.loss(counted.model, counted.windows)
    return cost


@torch.no_grad()
def clock(counted: Counted, sparsity: float) -> Step:
    """Measure on this machine how long a step takes with thresholds of this sparsity and without any, and keep it among
    the points: decoding a token after a window of the text, or a forward of `tokens` tokens where those are more than
    one (or of all windows, where they are fewer). A copy of the model gets the thresholds, and with "cats" the TwELL
    path in every layer, with "teal" on a GPU "kept_inputs", be that faster or not; the model is left as it was.
    InputError for a model that is no causal language model, and for one with thresholds on it."""
    _check(sparsity)
    if lossy_parts(counted.model):
        raise InputError("the model has thresholds on it; accepted: one without (Thresholds.remove)")
    device = next(counted.model.parameters()).device
    path = "twell" if counted.calibration.method == "cats" else "kept_inputs" if device.type == "cuda" else "dense"
    cut = counted.calibration.at(sparsity, greedy=counted.greedy).apply(copy.deepcopy(counted.model))
    cut = sparsify(cut, path) if path != "dense" else cut
    windows = counted.windows.to(device)
    run, what = _step(Causal(counted.model), windows, counted.tokens)
    runs = {"ms": _step(Causal(cut), windows, counted.tokens)[0], "dense_ms": run}
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    once = clocks.time_bursts(runs, wait, rounds=1, count=1)["dense_ms"][1][0]
    took = clocks.time_bursts(runs, wait, rounds=_ROUNDS, count=min(10, max(1, int(_BURST_MS / once))))
    samples = {name: tuple(wall) for name, (_, wall) in took.items()}
    counted.steps[sparsity] = step = Step(what, clocks.device_name(device), path, **samples)
    return step


def _step(model: Causal, windows: Tensor, tokens: int):
    """One step of the model, a function of the number of its turn, and what to call it."""
    if tokens == 1:
        step, kept, last = model.stepper(), model.keep(windows[:1, :-1]), windows[:1, -1:]
        return (lambda turn: step(last, kept)), "decoding a token"
    read, length = model.reader(), windows.shape[1]
    some = windows[: max(1, tokens // length), : min(tokens, length)]
    return (lambda turn: read(some)), f"a forward of {some.numel():,} tokens"


def view(counted: Counted, sparsity: float) -> dict:
    """Return what thresholds of this sparsity do, without running the model.

    Returns:
        what, method, greedy, gpu, tokens, sparsity; layers: their names; density: by place, of each layer, from
        histograms; error, overflow: of each layer, between levels on a line; path, us, dense_us: of each layer, the
        path that should take least, and what it and the dense path should take, between levels on a line; plain_us:
        what the best path should take without a threshold (all of these empty with "teal"); loss: the change of the
        loss, in percent of the loss without thresholds, on a line between the measured points around it, None beyond
        the last;
        measured: whether it was measured here; points: (sparsity, change, low, high) of each point, the first at 0;
        step: what was timed, on what device and path, and ms and dense_ms, medians, None where no step was timed here;
        steps: (sparsity, median, low, high, median without thresholds) of each that was, low and high of the middle
        half.
    """
    _check(sparsity)
    layers = counted.calibration.layers
    shares = counted.calibration.sparsities(sparsity, greedy=counted.greedy)
    each = [max(share.values()) for share in shares]  # all places of a layer have the same, as `count` sees to
    took = [
        {path: _between(LEVELS, [at[path] for at in levels], share) for path in levels[0]}
        for levels, share in zip(counted.us, each)
        if levels
    ]
    best = [min(paths, key=lambda path: paths[path]) for paths in took]
    points = [(0.0, 0.0, 0.0, 0.0)]
    points += [(at, *_percent(found)) for at, found in sorted(counted.losses.items()) if at]
    inside = sparsity <= points[-1][0]
    steps = [(at, *_middle(step.ms), _middle(step.dense_ms)[0]) for at, step in sorted(counted.steps.items())]
    here = counted.steps.get(sparsity)
    return {
        "what": counted.what,
        "method": counted.calibration.method,
        "greedy": counted.greedy,
        "gpu": counted.gpu,
        "tokens": counted.tokens,
        "sparsity": sparsity,
        "layers": layer_names([layer.name for layer in layers]),
        "density": {
            site: [
                layer.sites[site].density(layer.sites[site].threshold(share[site]))
                for layer, share in zip(layers, shares)
            ]
            for site in layers[0].sites
        },
        "error": [_between(LEVELS, errors, share) for errors, share in zip(counted.errors, each)],
        "overflow": [_between(LEVELS, shares, share) for shares, share in zip(counted.overflow, each)],
        "path": best,
        "us": [paths[path] for paths, path in zip(took, best)],
        "dense_us": [paths["dense"] for paths in took],
        "plain_us": [min(levels[0].values()) for levels in counted.us if levels],
        "loss": _between([at for at, *_ in points], [change for _, change, *_ in points], sparsity) if inside else None,
        "measured": sparsity in counted.losses or sparsity == 0,
        "points": points,
        "step": here
        and {
            "what": here.what,
            "device": here.device,
            "path": here.path,
            "ms": _middle(here.ms)[0],
            "dense_ms": _middle(here.dense_ms)[0],
        },
        "steps": steps,
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
    if not view["us"]:
        time = ""
    elif not us < dense:
        time = (
            f"; on {view['gpu']} no path should be faster than dense, with which {all_layers} should take "
            f"{dense:,.0f} us"
        )
    elif view["sparsity"] == 0:
        time = (
            f"; on {view['gpu']}, without a threshold, {all_layers} should take {us:,.0f} us on the best path instead "
            f"of {dense:,.0f}, by fewer launches or what is zero by itself"
        )
    else:
        time = f"; on {view['gpu']}, {all_layers} should take {us:,.0f} us if zeros are skipped instead of {dense:,.0f}"
        time += f", and {plain:,.0f} without a threshold" if plain < dense else ""
        time += ": launches decide" if f"{us:,.0f}" == f"{plain:,.0f}" else ""
    if step := view["step"]:
        how = {"twell": "on the TwELL path", "dense": "computed densely"}.get(step["path"], f"on path {step['path']!r}")
        time += f"; here {step['what']} took {step['ms']:.3g} ms {how} instead of {step['dense_ms']:.3g}"
    return f"{view['what']}, {view['method'].upper()}, sparsity {view['sparsity']:.0%} (lossy): {loss}{time}"


def _percent(found: LossChange) -> tuple[float, float, float]:
    """The change of the loss and its interval, in percent of the loss without thresholds."""
    change, low, high = (100 * value / found.dense for value in (found.change, found.low, found.high))
    return change, low, high


def _middle(samples: Sequence[float]) -> tuple[float, float, float]:
    """The median, and the ends of the middle half."""
    low, median, high = quantiles(samples, n=4, method="inclusive")
    return median, low, high


def _between(places: Sequence[float], values: Sequence[float], at: float) -> float:
    """The value at a place on the line between those at the places around it. places: rising, from at most `at`."""
    after = min(bisect_right(places, at), len(places) - 1)
    if len(places) == 1:
        return values[0]
    low, high = places[after - 1], places[after]
    part = (at - low) / (high - low)
    return (1 - part) * values[after - 1] + part * values[after]


def _check(sparsity) -> None:
    if isinstance(sparsity, bool) or not isinstance(sparsity, (int, float)) or not 0 <= sparsity <= MOST:
        raise InputError(f"sparsity is {sparsity!r:.80}; a share from 0 to {MOST:g} is accepted")
