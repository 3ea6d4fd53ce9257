"""Thresholds for models that were not trained to be sparse: `thresholds`.

A SiLU or GELU is hardly ever exactly zero, but often close to it. What is below a threshold in magnitude is set to
zero, so that it can be skipped; the model then computes something else than before, which costs some loss. Two ways:

- "cats" (Lee et al., arXiv 2404.08763): on the activation of a layer, |act(gate(x))|, in layers without a gate
  |act(up(x))|. What is zero there spares a row of up and a column of down; without a gate, of down.
- "teal" (Liu et al., arXiv 2408.14690): on the inputs of the projections, which are x before gate and up, and the
  hidden values before down. What is zero there spares a column of what it enters.

How sparse each of these places should be is wished for; its threshold is the quantile of the magnitudes that were seen
there while the model ran over some batches (`calibrate`). All get the same sparsity, or with `greedy` each its own:

1. All begin with a sparsity of 0. For each place alone, the relative error of its layer's output is measured, at the
   sparsities of LEVELS, on up to ROWS inputs of the layer drawn from the batches.
2. The place is raised by one level for which the increase of that error, over the multiplications that the level
   spares, is least; of equal ones the first in the model's order. None is raised above the last of LEVELS.
3. That is repeated until the mean sparsity, each place counted by the multiplications that its values stand for, is
   what was wished. The last step is cut so that it meets it.

Batches are read once, one after the other: magnitudes are counted in histograms of fixed size."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import linear

from .. import records
from ..analysis import saved
from ..analysis.running import ALL, Gate, Rows, beyond, evaluating, run
from ..core import InputError, RecordError, write_atomically
from ..layers.activations import kind_of
from ..layers.experts import experts_of
from ..layers.families import accepted
from ..layers.find import FeedForward, Only, check_model, cut_places, selected, unreadable_part
from ..layers.lossy import Lossy, ThresholdedActivation, ThresholdedInput, lossy_parts
from ..layers.parts import named_family, part_at, parts_of, put, uncompiled
from ..layers.probe import check_all, raise_all, title
from ..layers.sparse_ffn import SparseFFN

FORMAT = "twell-lab thresholds"
VERSION = 1
SITES = {"cats": ("activation",), "teal": ("input", "hidden")}  # the places of a layer, by method
LEVELS = tuple(number / 20 for number in range(20))  # the sparsities at which errors are measured: 0 to 0.95
ROWS = 256  # inputs of each layer that are kept to measure errors on
LOSSY = "lossy: a thresholded model computes something else than the model it was made of"

_LOW, _HIGH, _PER_OCTAVE = -24, 16, 32  # magnitudes of 2**-24 to 2**16 are told apart, 32 steps for each factor of two
_BINS = (_HIGH - _LOW) * _PER_OCTAVE
_CHUNK = 2**22  # values that are counted at a time
_SCORES = 2**26  # scores of next tokens that are held at a time


class Histogram:
    """How many values of each magnitude were seen, on a logarithmic scale (2.2% a step): the size is the same however
    many there were, and sums of two are those of all values of both.

    counts: int64 [3 + steps]: exact zeros, below the scale, its steps, above it."""

    def __init__(self) -> None:
        self.counts = torch.zeros(_BINS + 3, dtype=torch.int64, device="cpu")

    def add(self, values: Tensor) -> None:
        """Count these values, of any shape. InputError for one that is not finite."""
        for some in values.detach().reshape(-1).split(_CHUNK):
            size = some.float().abs()
            if not size.isfinite().all():
                raise InputError("a value is not finite; accepted: a model and batches that give finite values")
            place = ((size.log2() - _LOW) * _PER_OCTAVE).floor().clamp(-1, _BINS) + 2
            place = torch.where(size == 0, 0, place).long()
            self.counts += torch.bincount(place, minlength=_BINS + 3).cpu()

    def __iadd__(self, other: Histogram) -> Histogram:
        self.counts += other.counts
        return self

    @property
    def total(self) -> int:
        """How many values were seen."""
        return int(self.counts.sum())

    def density(self, threshold: float) -> float:
        """The share of values that are neither zero nor below the threshold; within a step they count as evenly
        spread. NaN where none was seen."""
        if threshold <= 2.0**_LOW:
            at, share = 1, threshold / 2.0**_LOW
        else:
            place = (math.log2(threshold) - _LOW) * _PER_OCTAVE
            at, share = min(int(place), _BINS) + 2, place - int(place) if place < _BINS else 0.0
        below = int(self.counts[:at].sum()) + share * int(self.counts[at])
        return 1 - below / self.total if self.total else math.nan

    def threshold(self, sparsity: float) -> float:
        """The threshold below which this share of the values lies; 0 where so many are zero by themselves."""
        wanted, below = sparsity * self.total, self.counts.cumsum(0)
        at = int((below < wanted).sum())
        if at == 0:
            return 0.0
        share = (wanted - int(below[at - 1])) / max(1, int(self.counts[at]))
        return share * 2.0**_LOW if at == 1 else 2.0 ** (_LOW + min(at - 2 + share, _BINS) / _PER_OCTAVE)


class _Kept:
    """Up to ROWS of all rows that are added, each as likely as any other; which ones depends on their number alone."""

    def __init__(self) -> None:
        self.draw = torch.Generator("cpu").manual_seed(0)
        self.keys, self.rows = torch.empty(0, dtype=torch.float64, device="cpu"), None

    def add(self, rows: Tensor) -> None:
        keys = torch.rand(len(rows), generator=self.draw, dtype=torch.float64, device="cpu")
        keys, rows = torch.cat([self.keys, keys]), rows if self.rows is None else torch.cat([self.rows, rows])
        best = keys.topk(min(ROWS, len(keys))).indices.sort().values
        self.keys, self.rows = keys[best], rows[best.to(rows.device)]


class LayerCalibration:
    """What one feed-forward layer of a model did on the calibration batches.

    sites: a Histogram of each place where values may be zeroed. rows: some inputs of the layer, [up to ROWS, d_model].
    Holds the layer's own projections and activation; `error` runs them."""

    def __init__(self, layer: FeedForward, method: str) -> None:
        self.layer = layer
        self.d_ff, self.d_model = layer.up.weight.shape
        self.sites = {site: Histogram() for site in SITES[method]}
        self.tokens, self._kept = 0, _Kept()
        self._errors: dict[str, list[float]] = {}
        self._exact: Tensor | None = None

    @property
    def name(self) -> str:
        return self.layer.name

    @property
    def rows(self) -> Tensor:
        return self._kept.rows

    def see(self, x: Tensor, gate: Gate, rows: Rows) -> None:
        """Count what one forward of the layer gives; as analysis.running.run calls it."""
        x, first = rows.kept(x), rows.kept(gate(ALL))
        if not len(x):
            return
        seen = {"activation": self.layer.acts(first.clone()), "input": x}  # it may work in place
        if "hidden" in self.sites:
            up = self.layer.up
            seen["hidden"] = (
                seen["activation"] if self.layer.gate is None else seen["activation"] * linear(x, up.weight, up.bias)
            )
        for site, histogram in self.sites.items():
            try:
                histogram.add(seen[site])
            except InputError as error:
                raise InputError(f"{self.name}, {site}: {error}") from None
        self.tokens += len(x)
        self._kept.add(x)

    def work(self, site: str) -> int:
        """The multiplications for a token that the values of this place stand for."""
        return _matrices(site, self.layer.gate is not None) * self.d_ff * self.d_model

    @torch.no_grad()
    def hidden(self, x: Tensor, thresholds: dict[str, float]) -> Tensor:
        """What enters the down projection for x [rows, d_model] with these thresholds: [rows, d_ff]. Places without one
        keep all values."""
        gate, up = self.layer.gate, self.layer.up
        cut = {site: Lossy(threshold).zeroed for site, threshold in thresholds.items()}
        x = cut["input"](x) if "input" in cut else x
        first = up if gate is None else gate
        values = self.layer.acts(linear(x, first.weight, first.bias))
        values = cut["activation"](values) if "activation" in cut else values
        values = values if gate is None else values * linear(x, up.weight, up.bias)
        return cut["hidden"](values) if "hidden" in cut else values

    @torch.no_grad()
    def output(self, x: Tensor, thresholds: dict[str, float]) -> Tensor:
        """What the layer gives for x [rows, d_model] with these thresholds."""
        return linear(self.hidden(x, thresholds), self.layer.down.weight, self.layer.down.bias)

    def error(self, thresholds: dict[str, float]) -> float:
        """The relative error of the layer's output with these thresholds, |difference| / |output| over `rows`."""
        if self._exact is None:
            self._exact = self.output(self.rows, {})
        off = (self.output(self.rows, thresholds) - self._exact).double().norm().item()
        whole = self._exact.double().norm().item() or 1.0
        if not math.isfinite(off / whole):
            raise InputError(f"the output of {self.name!r} is not finite; accepted: layers that give finite values")
        return off / whole

    def errors(self, site: str) -> list[float]:
        """The error with a threshold in this place alone, at each of LEVELS. Measured once."""
        if site not in self._errors:
            self._errors[site] = [self.error({site: self.sites[site].threshold(level)}) for level in LEVELS]
        return self._errors[site]

    def at(self, sparsities: dict[str, float]) -> LayerThresholds:
        """The thresholds for these sparsities of its places, and the error measured with all of them."""
        thresholds = {site: self.sites[site].threshold(share) for site, share in sparsities.items()}
        return LayerThresholds(
            self.name,
            self.d_model,
            self.d_ff,
            self.layer.gate is not None,
            kind_of(self.layer.acts),
            thresholds,
            {site: self.sites[site].density(threshold) for site, threshold in thresholds.items()},
            self.error(thresholds),
        )


@dataclass(frozen=True, eq=False)
class Calibration:
    """What the feed-forward layers of a model did on some batches, from which thresholds of every sparsity are made."""

    method: str
    layers: list[LayerCalibration]

    @property
    def tokens(self) -> int:
        """How many tokens the layers saw: the largest number among them, should they differ."""
        return max(layer.tokens for layer in self.layers)

    def sparsities(self, sparsity: float, *, greedy: bool = False) -> list[dict[str, float]]:
        """The sparsity of each place, by layer: the same for all, or as this module's first lines say."""
        _check_wish(sparsity, greedy)
        found = [dict.fromkeys(layer.sites, 0.0 if greedy else float(sparsity)) for layer in self.layers]
        if greedy:
            self._raise(found, float(sparsity))
        return found

    def _raise(self, found: list[dict[str, float]], sparsity: float) -> None:
        places = [(number, site) for number, layer in enumerate(self.layers) for site in layer.sites]
        work = {place: self.layers[place[0]].work(place[1]) for place in places}
        level, left = dict.fromkeys(places, 0), sparsity * sum(work.values())

        def price(place: tuple[int, str]) -> float:
            number, site = place
            errors, at = self.layers[number].errors(site), level[place]
            return (errors[at + 1] - errors[at]) / ((LEVELS[at + 1] - LEVELS[at]) * work[place])

        prices = {place: price(place) for place in places}
        while left > 1e-9 * sum(work.values()):
            place = min(prices, key=prices.__getitem__)
            number, site = place
            step = min(LEVELS[level[place] + 1] - LEVELS[level[place]], left / work[place])
            found[number][site] = LEVELS[level[place]] + step
            left -= step * work[place]
            level[place] += 1
            if level[place] + 1 < len(LEVELS):
                prices[place] = price(place)
            else:
                del prices[place]

    def at(self, sparsity: float, *, greedy: bool = False) -> Thresholds:
        """The thresholds for this sparsity; arguments as `thresholds` takes them."""
        layers = [layer.at(each) for layer, each in zip(self.layers, self.sparsities(sparsity, greedy=greedy))]
        return Thresholds(self.method, float(sparsity), greedy, self.tokens, layers)


def calibrate(model: nn.Module, batches: Iterable, *, method: str = "cats", only: Only | None = None) -> Calibration:
    """Run the model over the batches and count the magnitudes that thresholds are made of.

    Arguments and errors are those of `thresholds`; the model is left as it was."""
    if method not in tuple(SITES):
        raise InputError(f"method is {method!r:.80}; accepted: {', '.join(map(repr, SITES))}")
    found = _layers(model, only)
    if lossy_parts(model):
        raise InputError("the model has thresholds on it; accepted: one without (Thresholds.remove)")
    check_all((layer.name, layer.module) for layer in found)
    layers = [LayerCalibration(layer, method) for layer in found]
    if not run(model, [(each.layer, each.see) for each in layers], batches):
        raise InputError("batches is empty; accepted: at least one input of the model")
    for layer in layers:
        if not layer.tokens:
            raise InputError(
                f"{layer.name!r} saw no token: the batches were empty, or have nothing for it; accepted: one token or "
                "more, or an `only` that leaves it out"
            )
    return Calibration(method, layers)


def thresholds(
    model: nn.Module,
    batches: Iterable,
    sparsity: float = 0.5,
    *,
    method: str = "cats",
    greedy: bool = False,
    only: Only | None = None,
) -> Thresholds:
    """Choose, for a model that was not trained to be sparse, what its feed-forward layers may set to zero.

        found = twell_lab.thresholds(model, batches, sparsity=0.5)
        print(found)                        # by layer: threshold, density, error
        print(found.loss(model, windows))   # what it costs, on text that the batches do not hold
        model = found.apply(model)          # lossy from here on; found.remove(model) takes it back

    Args:
        model: of transformers (of a family in twell_lab.layers.families) or of this project, with any activation. It
            runs in evaluation mode without gradients and is left as it was.
        batches: what the model takes, as `twell_lab.profile` takes them.
        sparsity: the share of the values that should become zero, from 0 up to, but not, 1; with `greedy` up to 0.95.
        method: "cats" or "teal", as this module's first lines describe them.
        greedy: give each layer its own sparsity by measured errors, not all the same.
        only: the layers for which only(name, module) is true; the others keep all their values.

    Raises:
        InputError: for a model without a feed-forward layer that is known; for layers that compute something else than
            their parts say, quantised or sharded ones, weights on meta, layers that `sparsify` swapped, and a model
            that has thresholds; for values that are not finite; and for wrong arguments. Routed experts are left as
            they are, and a model that has no other layer is refused: they share one activation.
    """
    _check_wish(sparsity, greedy)
    return calibrate(model, batches, method=method, only=only).at(sparsity, greedy=greedy)


def _check_wish(sparsity, greedy) -> None:
    if not isinstance(greedy, bool):
        raise InputError(f"greedy is {greedy!r:.80}; True or False is accepted")
    most = LEVELS[-1] if greedy else 1.0
    wrong = isinstance(sparsity, bool) or not isinstance(sparsity, (int, float))
    if wrong or not 0 <= sparsity <= most or sparsity == 1:
        until = f"up to {most:g}" if greedy else "up to, but not, 1"
        raise InputError(f"sparsity is {sparsity!r:.80}; a share of the values, from 0 {until}, is accepted")


def _matrices(site: str, gated: bool) -> int:
    """How many of a layer's projections a value of this place spares a part of, where it is zero."""
    return 2 if gated and site != "hidden" else 1


# ---- what was chosen ----


@dataclass(frozen=True)
class LayerThresholds:
    """The thresholds of one layer, by place (SITES); the density that they leave there on the calibration batches; and
    the relative error of the layer's output, measured on some of its inputs. activation: what the model calls it."""

    name: str
    d_model: int
    d_ff: int
    gated: bool
    activation: str
    thresholds: dict[str, float]
    density: dict[str, float]
    error: float


@dataclass(frozen=True)
class Thresholds:
    """Thresholds for the feed-forward layers of one model, which make it lossy where they are applied.

    sparsity: what was wished for. tokens: how many were calibrated on."""

    method: str
    sparsity: float
    greedy: bool
    tokens: int
    layers: list[LayerThresholds]

    @property
    def spared(self) -> float:
        """The share of the layers' multiplications that meet a zero, on the calibration batches."""
        each = [(layer, layer.d_ff * layer.d_model) for layer in self.layers]
        zero = sum(
            (1 - density) * _matrices(site, layer.gated) * size
            for layer, size in each
            for site, density in layer.density.items()
        )
        return zero / sum((3 if layer.gated else 2) * size for layer, size in each)

    def table(self) -> list[dict]:
        """One row a layer, JSON-able: layer, threshold and density of each place, error."""
        return [
            {
                "layer": layer.name,
                **{f"{site} threshold": value for site, value in layer.thresholds.items()},
                **{f"{site} density": value for site, value in layer.density.items()},
                "error": layer.error,
            }
            for layer in self.layers
        ]

    def __str__(self) -> str:
        """`table` as lines of text, and that this is lossy."""
        rows = [{**row, "layer": row["layer"] or "layer"} for row in self.table()]
        how = "greedy" if self.greedy else "the same for all layers"
        cut = any(value > 0 for layer in self.layers for value in layer.thresholds.values())
        label = LOSSY if cut else "so many values are zero by themselves: no threshold is above 0, nothing is changed"
        return (
            f"{records.table(rows, {name: name for name in rows[0]})}\n"
            f"{self.method}, sparsity {self.sparsity:g}, {how}, from {self.tokens:,} tokens: {self.spared:.0%} of the "
            f"layers' multiplications meet a zero\n{label}"
        )

    def apply(self, model: nn.Module) -> nn.Module:
        """Have the layers of the model set to zero what is below the thresholds, in place; returns the model.

        With "cats" each activation becomes a ThresholdedActivation; with "teal" the projections get a ThresholdedInput.
        They are named lossy where the model is printed, have no parameters, and are not saved with it: save the
        Thresholds. Others that are on the model are taken off before. Gradients go through what is kept. `sparsify`
        takes a model with either on it, and for few tokens kernels then skip its silent neurons, or read the weights of
        kept inputs alone.

        Raises InputError, with nothing changed, for a model whose layers have other names, shapes or activations than
        those that were calibrated, and for one that `sparsify` swapped."""
        seats = self._seats(model)
        self.remove(model)
        for layer, found in seats:
            if self.method == "cats":
                cut = ThresholdedActivation(found.acts, layer.thresholds["activation"])
                put(found.module, parts_of(found.module).family.activation, cut.train(found.module.training))
                continue
            for place, projections in cut_places(parts_of(found.module)).items():
                inputs = ThresholdedInput(layer.thresholds[place]).train(found.module.training)
                inputs.put_on(found.module, place, projections)
        return model

    @staticmethod
    def remove(model: nn.Module) -> nn.Module:
        """Take all thresholds off the model, in place; returns the model, which computes what it did before. InputError
        for one that was swapped by `sparsify` since: `densify` first."""
        _check_dense(model)
        for module in list(model.modules()):
            ThresholdedInput.take_off(module)
            parts = parts_of(module)
            if parts is not None and isinstance(parts.acts, ThresholdedActivation):
                if isinstance(before := parts.acts.activation, nn.Module):
                    before.train(module.training)  # which did not reach it while it was no child
                put(module, parts.family.activation, before)
        return model

    def loss(self, model: nn.Module, windows: Tensor, *, bytes_per_token: float | None = None) -> LossChange:
        """Measure what these thresholds cost: the loss of the model without and with them, on the same windows.

        model: a causal language model, with these thresholds on it or none; it is left as it was. windows: int64 [n,
        length], on text that was not calibrated on; each is read with nothing before it, and its tokens from the second
        on are predicted. bytes_per_token: of the text, to have bits a byte as well. Raises InputError as `apply`, for
        other thresholds on the model, for fewer than two windows or tokens in each, and for tokens that the model does
        not know."""
        _check_windows(windows)
        self._seats(model)
        if held := [part for _, part in lossy_parts(model)]:
            self._check_held(held)
        else:
            self.apply(model)
        parts = [part for _, part in lossy_parts(model)]
        own = [part.threshold for part in parts]
        try:
            with_them = losses(model, windows)
            for part in parts:
                part.threshold = 0.0  # which leaves every value as it is
            without = losses(model, windows)
        finally:
            for part, threshold in zip(parts, own):
                part.threshold = threshold
            if not held:
                self.remove(model)
        return LossChange.of(without, with_them, windows.shape[1] - 1, bytes_per_token)

    def _seats(self, model: nn.Module) -> list[tuple[LayerThresholds, FeedForward]]:
        """The model's layers that these thresholds are for. InputError for another model."""
        there = {found.name: found for found in _layers(model, None)}
        reasons, seats = [], []
        for layer in self.layers:
            if (found := there.get(layer.name)) is None:
                reasons.append(f"there is no layer {layer.name!r}")
                continue
            d_ff, d_model = found.up.weight.shape
            own = (d_model, d_ff, found.gate is not None, kind_of(found.acts))
            if own != (layer.d_model, layer.d_ff, layer.gated, layer.activation):
                sizes = "d_model {}, d_ff {}, gated {}, {}"
                wanted = sizes.format(layer.d_model, layer.d_ff, layer.gated, layer.activation)
                reasons.append(f"{layer.name!r} has {sizes.format(*own)} where the thresholds are for {wanted}")
            seats.append((layer, found))
        if reasons:
            more = f"; and {len(reasons) - 2} more" if len(reasons) > 2 else ""
            raise InputError(
                f"these are thresholds of another model: {'; '.join(reasons[:2])}{more}; accepted: the model that they "
                "were made for"
            )
        return seats

    def _check_held(self, held: list[Lossy]) -> None:
        """InputError unless these are the thresholds that are on a model."""
        wanted = [threshold for layer in self.layers for threshold in layer.thresholds.values()]
        if sorted(wanted) != sorted(part.threshold for part in held):
            raise InputError("the model has other thresholds on it; accepted: one with these, or none (remove)")

    def save(self, path: str | os.PathLike) -> Path:
        """Write them as JSON, the file whole or not at all. RecordError where it can't be written."""
        path = Path(path)
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        write_atomically(path, json.dumps(content, indent=1) + "\n", make_folder=False)
        return path

    @classmethod
    def load(cls, path: str | os.PathLike) -> Thresholds:
        """The thresholds that `save` wrote. RecordError names the file and the field missing or wrong."""
        content, where, _ = saved.load(path, "thresholds", FORMAT, {VERSION: _FIELDS})
        if content["method"] not in SITES:
            raise RecordError(f"{where}: 'method' is {content['method']!r:.80}; accepted: {', '.join(SITES)}")
        if not content["layers"]:
            raise RecordError(f"{where}: 'layers' is empty; accepted: one layer or more")
        sites = dict.fromkeys(SITES[content["method"]], (float, int))
        layers = []
        for number, each in enumerate(content.pop("layers")):
            at = f"{where}, layer {number}"
            each = saved.fields(each, _LAYER, at)
            saved.widths(each, at)
            for name in ("thresholds", "density"):
                saved.fields(each[name], sites, f"{at}, {name!r}")
            layers.append(LayerThresholds(**each))
        return cls(**content, layers=layers)


_FIELDS = {"method": str, "sparsity": (float, int), "greedy": bool, "tokens": int, "layers": list}
_LAYER = {
    **{"name": str, "d_model": int, "d_ff": int, "gated": bool, "activation": str},
    **{"thresholds": dict, "density": dict, "error": (float, int)},
}


# ---- the layers of a model ----


def _layers(model: nn.Module, only: Only | None) -> list[FeedForward]:
    """Every feed-forward layer of the model but routed experts, whatever its activation, which is `acts`: without a
    threshold of ours, where one is on it. InputError where there is none, and for those that cannot be asked."""
    check_model(model)
    _check_dense(model)
    found, reasons, experts = [], [], 0
    for name, module in uncompiled(model).named_modules():
        if experts_of(module):
            experts += 1
            continue
        family = named_family(module)
        if family is None or not selected(only, name, module):
            continue
        owners = {place: part_at(module, place) for place in family.projections}
        if (reason := _unreadable(owners)) is not None:
            reasons.append(f"{title(name, module)}: {reason}")
        elif (parts := parts_of(module)) is not None:
            acts = parts.acts.activation if isinstance(parts.acts, ThresholdedActivation) else parts.acts
            found.append(FeedForward(name, module, *parts[1:4], acts))
    raise_all(reasons)
    if not found:
        also = "routed experts alone, which share an activation" if experts else "none of its modules is one"
        chosen = " that `only` takes" if only is not None else ""
        raise InputError(f"no feed-forward layer in {type(model).__name__}{chosen}: {also}; {accepted()}")
    return found


def _unreadable(owners: dict) -> str | None:
    """Why a layer with these projections cannot be asked what they give."""
    for place, owner in owners.items():
        if (reason := unreadable_part(owner)) is not None:
            return f"{place} {reason}, or an `only` that leaves the layer out"
        if any(parameter.is_meta for parameter in owner.parameters()):
            return f"{place} is on meta, without values; accepted: a model that was loaded"
    return None


def _check_dense(model: nn.Module) -> None:
    check_model(model)
    if swapped := [name for name, module in model.named_modules() if isinstance(module, SparseFFN)]:
        raise InputError(f"{', '.join(swapped[:3])}: swapped by sparsify; accepted: dense layers (twell_lab.densify)")


# ---- what they cost ----


@dataclass(frozen=True)
class LossChange:
    """The loss of a model with and without thresholds, in nats a token, on the same windows.

    dense, thresholded: the mean. change: of thresholded - dense, the mean; low, high: 1.96 standard errors of it on
    either side, over windows, which holds the change on such text with a probability of about 95%. bytes_per_token: of
    the text, None where it was not said."""

    dense: float
    thresholded: float
    change: float
    low: float
    high: float
    windows: int
    tokens: int
    bytes_per_token: float | None = None

    @classmethod
    def of(cls, dense: Tensor, thresholded: Tensor, each: int, bytes_per_token: float | None = None) -> LossChange:
        """From the losses of two or more windows, float64 [n], of `each` predicted tokens."""
        difference, n = thresholded - dense, len(dense)
        middle, reach = difference.mean().item(), 1.96 * difference.std().item() / math.sqrt(n)
        return cls(
            dense.mean().item(),
            thresholded.mean().item(),
            middle,
            middle - reach,
            middle + reach,
            n,
            n * each,
            bytes_per_token,
        )

    @property
    def bits_per_byte(self) -> tuple[float, float] | None:
        """(dense, thresholded) in bits a byte of text."""
        if self.bytes_per_token is None:
            return None
        return tuple(nats / math.log(2) / self.bytes_per_token for nats in (self.dense, self.thresholded))

    def as_dict(self) -> dict:
        """JSON-able, with `bits_per_byte` and what this is."""
        return {**asdict(self), "bits_per_byte": self.bits_per_byte, "label": LOSSY}

    def __str__(self) -> str:
        bits = self.bits_per_byte
        bits = f" ({bits[0]:.4g} to {bits[1]:.4g} bits a byte)" if bits else ""
        return (
            f"loss {self.dense:.4g} nats a token as it was, {self.thresholded:.4g} with thresholds{bits}: "
            f"{self.change:+.4g} ({self.low:+.4g} to {self.high:+.4g}, 95% over {self.windows:,} windows); lossy"
        )


def _check_windows(windows) -> None:
    good = isinstance(windows, Tensor) and windows.dtype == torch.int64 and windows.dim() == 2
    if not good or min(windows.shape) < 2:
        what = f"{windows.dtype} {list(windows.shape)}" if isinstance(windows, Tensor) else type(windows).__name__
        raise InputError(f"windows is {what}; accepted: int64 [n, length], two or more windows of two or more tokens")


def losses(model: nn.Module, windows: Tensor) -> Tensor:
    """The mean loss of each window in nats, float64 [n]."""
    device, found, some = next(model.parameters()).device, [], 1
    with evaluating(model):
        at = 0
        while at < len(windows):
            tokens = windows[at : at + some].to(device)
            try:
                scores = model(tokens)
            except LookupError as error:
                if reason := beyond(model, tokens):
                    raise InputError(f"a window {reason}") from error
                raise
            scores = getattr(scores, "logits", scores)
            if not isinstance(scores, Tensor) or scores.shape[:2] != tokens.shape:
                raise InputError(
                    f"{type(model).__name__} gives no scores [batch, tokens, vocabulary] for tokens; a causal language "
                    "model is accepted"
                )
            nats = F.cross_entropy(scores[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none")
            found.append(nats.double().view(len(tokens), -1).mean(1).cpu())
            at += some
            some = max(1, min(32, _SCORES // max(1, scores[0].numel())))  # the vocabulary is known from the first
    return torch.cat(found)
