"""Thresholds for models that were not trained to be sparse: `thresholds`.

A SiLU or GELU is hardly ever exactly zero, but often close to it. What is below a threshold in magnitude is set to
zero, so that it can be skipped; the model then computes something else than before, which costs some loss. Three ways:

- "cats" (Lee et al., arXiv 2404.08763): on the activation of a layer, |act(gate(x))|, in layers without a gate
  |act(up(x))|. What is zero there spares a row of up and a column of down; without a gate, of down.
- "teal" (Liu et al., arXiv 2408.14690): on the inputs of the projections, which are x before gate and up, and the
  hidden values before down. What is zero there spares a column of what it enters. With `attention` on the inputs of
  the other projections of these layers' blocks, too, as published: q, k, v and o.
- "wina" (Chen et al., arXiv 2505.19427): on the same inputs, each scored by |x_i| times the norm of column i of what it
  enters (equation 4). gate and up count as one matrix, as in the paper's code for Phi-4, which stores them so: one
  score spares columns of both, which kernels read together. The paper also rotates weights first; here none is.

A place's threshold is the quantile of the magnitudes that were seen there while the model ran over some batches
(`calibrate`). All places get the same sparsity."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import records
from ..analysis.running import ALL, Gate, Rows, run, vocabulary_of
from ..analysis.saved import Saved
from ..core import InputError
from ..layers.activations import kind_of
from ..layers.experts import experts_of
from ..layers.families import accepted
from ..layers.find import FeedForward, Only, check_model, cut_places, selected
from ..layers.lossy import HIDDEN, INPUT, ThresholdedActivation, ThresholdedInput, lossy_parts
from ..layers.parts import hidden_of, named_family, parts_of, put, uncompiled
from ..layers.probe import check_all, title
from ..layers.sparse_ffn import SparseFFN

CONFIG = "twell_lab_thresholds"  # what the configuration of a model of transformers calls those that are on it
SITES = {"cats": ("activation",), **dict.fromkeys(("teal", "wina"), (INPUT, HIDDEN))}  # places of a layer, by method
ROWS = 256  # inputs of each layer that are kept to measure errors on

_EDGES = torch.cat([torch.zeros(1), torch.arange(-24 * 32, 16 * 32 + 1).div(32).exp2()])  # 0, then 2.2% a step


class Histogram:
    """How many values of each magnitude were seen, on a logarithmic scale from 2**-24 to 2**16. counts: int64, exact
    zeros and then those up to each further edge, larger ones with the last."""

    def __init__(self) -> None:
        self.counts = torch.zeros(len(_EDGES), dtype=torch.int64, device="cpu")

    def add(self, values: Tensor, where: str = "the values") -> None:
        """Count these values, of any shape. InputError, which says where, for one that is not finite."""
        for part in values.detach().flatten().split(2**22):
            size = part.float().abs()
            if not size.isfinite().all():
                raise InputError(f"{where}: one is not finite; accepted: a model and batches that give finite values")
            place = torch.bucketize(size, _EDGES.to(size.device)).clamp_(max=len(_EDGES) - 1)
            self.counts += torch.bincount(place, minlength=len(_EDGES)).cpu()

    def density(self, threshold: float) -> float:
        """Return the share of values that are neither zero nor below the threshold, those of a step counting as evenly
        spread; NaN where none was seen."""
        up_to = self.counts.cumsum(0).numpy()
        return float(1 - np.interp(threshold, _EDGES.numpy(), up_to) / up_to[-1]) if up_to[-1] else math.nan

    def threshold(self, sparsity: float) -> float:
        """Return the threshold below which this share of the values lies; 0 where so many are zero by themselves."""
        up_to = self.counts.cumsum(0).numpy()
        wanted = sparsity * int(up_to[-1])
        return 0.0 if wanted <= up_to[0] else float(np.interp(wanted, up_to, _EDGES.numpy()))


class LayerCalibration:
    """What one feed-forward layer, or a projection `alone`, did on the calibration batches. sites: a Histogram of each
    place where values may be zeroed. rows: of a layer, up to ROWS of its inputs, [n, d_model], each as likely as any
    other."""

    def __init__(self, layer: FeedForward, method: str) -> None:
        self.layer, self.name, self.tokens, self.alone = layer, layer.name, 0, layer.up is layer.down
        self.sites = {site: Histogram() for site in ((INPUT,) if self.alone else SITES[method])}
        self.scales = _scales(method, layer)
        self.rows = layer.up.weight.new_empty(0, layer.up.weight.shape[1])
        self._draw = torch.Generator("cpu").manual_seed(0)
        self._keys = torch.empty(0, dtype=torch.float64, device="cpu")

    @torch.no_grad()
    def add(self, x: Tensor, gate: Gate, rows: Rows) -> None:
        """Count what one forward of the layer gives; as analysis.running.run calls it."""
        x, up = rows.kept(x), self.layer.up
        values = {INPUT: x}
        if len(x) and not self.alone:
            acts = self.layer.acts(rows.kept(gate(ALL)).clone())  # it may work in place
            beside = 1 if self.layer.gate is None or HIDDEN not in self.sites else F.linear(x, up.weight, up.bias)
            values |= {"activation": acts, HIDDEN: acts * beside}
        for site, histogram in self.sites.items() if len(x) else ():
            histogram.add(values[site] * self.scales[site], f"{self.name}, {site}")
        self.tokens += len(x)
        if not self.alone:
            fresh = torch.rand(len(x), generator=self._draw, dtype=torch.float64, device="cpu")
            keys, inputs = torch.cat([self._keys, fresh]), torch.cat([self.rows.to(x), x])
            best = keys.topk(min(ROWS, len(keys))).indices.sort().values
            self._keys, self.rows = keys[best], inputs[best.to(x.device)]

    @torch.no_grad()
    def error(self, thresholds: dict[str, float]) -> float:
        """Measure the error of the layer's output with these thresholds, |difference| / |output| over `rows`."""
        bounds, down = {site: value / self.scales[site] for site, value in thresholds.items()}, self.layer.down
        cut, exact = (
            F.linear(hidden_of(self.layer, self.rows, some), down.weight, down.bias).double() for some in (bounds, {})
        )
        return (cut - exact).norm().item() / (exact.norm().item() or 1.0)

    def at(self, sparsity: float) -> LayerThresholds:
        """Return the thresholds for this sparsity of each place, and the error measured with all of them."""
        cut = {site: histogram.threshold(sparsity) for site, histogram in self.sites.items()}
        density = {site: histogram.density(cut[site]) for site, histogram in self.sites.items()}
        return LayerThresholds(self.name, *_shape(self.layer), cut, density, None if self.alone else self.error(cut))


@dataclass(frozen=True, eq=False)
class Calibration:
    """What the feed-forward layers of a model, and projections of attention, did on some batches: thresholds of every
    sparsity are made from it."""

    method: str
    layers: list[LayerCalibration]
    projections: list[LayerCalibration]

    def at(self, sparsity: float) -> Thresholds:
        """Return the thresholds for this sparsity, a share as `thresholds` takes it."""
        _check_sparsity(sparsity)
        layers, projections = ([one.at(sparsity) for one in some] for some in (self.layers, self.projections))
        return Thresholds(self.method, float(sparsity), max(one.tokens for one in self.layers), layers, projections)


def calibrate(
    model: nn.Module, batches: Iterable, *, method: str = "cats", attention: bool = False, only: Only | None = None
) -> Calibration:
    """Run the model over the batches and count the magnitudes that thresholds are made of.

    Arguments and errors are those of `thresholds`; the model is left as it was."""
    if method not in tuple(SITES):
        raise InputError(f"method is {method!r:.80}; accepted: {', '.join(map(repr, SITES))}")
    if not isinstance(attention, bool) or attention and method == "cats":
        raise InputError(f"attention is {attention!r:.80}; accepted: False, and True with method 'teal' or 'wina'")
    _check_dense(model)
    modules = [*uncompiled(model).named_modules()]
    linear = {name: module for name, module in modules if type(module) is nn.Linear}
    found = [_place(*one) for one in modules if one[0] not in linear and named_family(one[1]) and selected(only, *one)]
    if not (chosen := [place for place in found if place is not None]):
        raise InputError(
            f"no feed-forward layer in {type(model).__name__}{'' if only is None else ' that `only` takes'}; routed "
            f"experts, which share an activation, do not count; {accepted()}"
        )
    _check_without(model)
    check_all((layer.name, layer.module) for layer in chosen)
    layers = [LayerCalibration(layer, method) for layer in chosen]
    blocks = tuple(f"{above}." for layer in chosen if (above := layer.name.rpartition(".")[0]))
    own = {id(module) for layer in chosen for module in (*layer.module.modules(), layer.gate, layer.up, layer.down)}
    others = [one for one in linear.items() if attention and one[0].startswith(blocks) and id(one[1]) not in own]
    projections = [LayerCalibration(_place(*one), method) for one in others]
    run(model, [(one.layer, one.add) for one in (*layers, *projections)], batches)
    if idle := [layer.name for layer in layers if not layer.tokens]:
        raise InputError(f"{idle[0]!r} saw no token of the batches; accepted: one or more, or an `only` without it")
    return Calibration(method, layers, [one for one in projections if one.tokens])


@torch.no_grad()
def _scales(method: str, layer: FeedForward) -> dict[str, float | Tensor]:
    """Return what the values of each place are multiplied by before they are compared: with "wina" the norms of the
    columns that they meet, float32 [inputs], and 1 with other methods."""
    if method != "wina":
        return {"activation": 1.0, INPUT: 1.0, HIDDEN: 1.0}
    gate, up, down = (
        None if one is None else torch.linalg.vector_norm(one.weight, dim=0, dtype=torch.float32)
        for one in (layer.gate, layer.up, layer.down)
    )
    return {"activation": 1.0, INPUT: up if gate is None else torch.stack([gate, up]).norm(dim=0), HIDDEN: down}


def thresholds(
    model: nn.Module,
    batches: Iterable,
    sparsity: float = 0.5,
    *,
    method: str = "cats",
    attention: bool = False,
    only: Only | None = None,
) -> Thresholds:
    """Choose, for a model that was not trained to be sparse, what its feed-forward layers may set to zero; leaves the
    model as it was. The result's `apply` makes a model lossy, `remove` takes that back, `loss` says what it costs.

    Args:
        model: of transformers (of a family that `feed_forwards` knows) or of this project, with any activation.
        batches: what the model takes, as `twell_lab.profile` takes them.
        sparsity: the share of the values that should become zero, from 0 up to, but not, 1.
        method: "cats", "teal" or "wina", as this module's first lines describe them.
        attention: cut the inputs of attention's projections, too, each by the same share; not with "cats".
        only: the layers for which only(name, module) is true; the others, and routed experts, keep all their values.

    InputError for a model without such a layer, or with thresholds on it; for layers that compute something else than
    their parts say, are quantised, adapted, sharded, on meta or swapped; for values that are not finite."""
    _check_sparsity(sparsity)
    return calibrate(model, batches, method=method, attention=attention, only=only).at(sparsity)


def _check_sparsity(sparsity) -> None:
    if type(sparsity) not in (int, float) or not 0 <= sparsity < 1:
        raise InputError(f"sparsity is {sparsity!r:.80}; a share of the values, from 0 up to, but not, 1, is accepted")


def _shape(layer: FeedForward) -> tuple[int, int, bool, str]:
    """Return d_model, d_ff, gated and activation, as LayerThresholds has them."""
    kind = "" if layer.acts is None else kind_of(layer.acts)
    return (*reversed(layer.up.weight.shape), layer.gate is not None, kind)


@dataclass(frozen=True)
class LayerThresholds:
    """The thresholds of one layer, by place (SITES); the density that they leave there on the calibration batches; and
    the relative error of the layer's output, measured on some of its inputs. activation: what the model calls it.

    A projection of attention has inputs d_model, outputs d_ff, no activation ("") and no error."""

    name: str
    d_model: int
    d_ff: int
    gated: bool
    activation: str
    thresholds: dict[str, float]
    density: dict[str, float]
    error: float | None


@dataclass(frozen=True)
class Thresholds(Saved):
    """Thresholds for the feed-forward layers of one model, which make it lossy where they are applied.

    sparsity: what was wished for. tokens: how many were calibrated on."""

    FORMAT: ClassVar = "twell-lab thresholds"
    VERSION: ClassVar = 4

    method: str
    sparsity: float
    tokens: int
    layers: list[LayerThresholds]
    projections: list[LayerThresholds] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.method not in SITES or not self.layers:
            raise InputError(f"'method' is none of {', '.join(SITES)}, or 'layers' is empty")
        for layer in self.all:
            sites = SITES[self.method] if layer in self.layers else (INPUT,)
            if not {*layer.thresholds} == {*layer.density} == {*sites}:
                raise InputError(f"'thresholds' and 'density' of {layer.name!r} are not of {sites}")

    @property
    def all(self) -> list[LayerThresholds]:
        """Return the thresholds of layers and projections."""
        return [*self.layers, *self.projections]

    @property
    def spared(self) -> float:
        """Return the share of the multiplications by these weights that meet a zero, on the calibration batches. A
        gated layer's activation and inputs stand for two matrices each."""
        zero = whole = 0.0
        for layer in self.all:
            met = sum((1 - share) * (1 + (layer.gated and site != HIDDEN)) for site, share in layer.density.items())
            zero += met * layer.d_ff * layer.d_model
            whole += (3 if layer.gated else 2 if layer.activation else 1) * layer.d_ff * layer.d_model
        return zero / whole

    def __str__(self) -> str:
        rows = [
            {"layer": layer.name or "layer"}
            | {f"{site} threshold": value for site, value in layer.thresholds.items()}
            | {f"{site} density": value for site, value in layer.density.items()}
            | {"error": layer.error}
            for layer in self.layers
        ]
        attention = f", {len(self.projections)} projections of attention included" if self.projections else ""
        label = "lossy: a thresholded model computes something else than the model it was made of"
        if not any(value > 0 for layer in self.layers for value in layer.thresholds.values()):
            label = "so many values are zero by themselves: no threshold is above 0, nothing is changed"
        return (
            f"{records.table(rows, {name: name for name in rows[0]})}\n"
            f"{self.method}, sparsity {self.sparsity:g}, from {self.tokens:,} tokens: {self.spared:.0%} of the layers' "
            f"multiplications meet a zero{attention}\n{label}"
        )

    def apply(self, model: nn.Module) -> nn.Module:
        """Have the layers of the model set to zero what is below the thresholds, in place; returns the model.

        With "cats" each activation becomes a ThresholdedActivation; otherwise the projections get a ThresholdedInput,
        for "wina" by the norms that their weights have now. Others that are on the model are taken off before. The
        configuration of a model of transformers holds them from then on (CONFIG), so that `save_pretrained` writes them
        and `twell_lab.load`, not transformers, puts them on. InputError, with nothing changed, for a model whose layers
        have other names, shapes or activations than those that were calibrated, and for one that `sparsify` swapped."""
        pairs = self._pairs(model)
        self.remove(model)
        for layer, place in pairs:
            module, parts = place.module, parts_of(place.module)
            if self.method == "cats":
                activation = ThresholdedActivation(place.acts, layer.thresholds["activation"])
                put(module, parts.family.activation, activation.train(module.training))
                continue
            scales = _scales(self.method, place)
            for site, projections in ({INPUT: [module]} if parts is None else cut_places(parts)).items():
                part = ThresholdedInput(layer.thresholds[site], scales[site])
                part.train(module.training).put_on(module, site, projections)
        if (config := _config(model)) is not None:
            setattr(config, CONFIG, asdict(self))
        return model

    @staticmethod
    def remove(model: nn.Module) -> nn.Module:
        """Take all thresholds off the model, in place; returns the model, which computes what it did before. InputError
        for one that was swapped by `sparsify` since: `densify` first."""
        _check_dense(model)
        for module in list(model.modules()):
            ThresholdedInput.take_off(module)
            if (parts := parts_of(module)) is not None and isinstance(parts.acts, ThresholdedActivation):
                before = parts.acts.activation
                if isinstance(before, nn.Module):
                    before.train(module.training)  # which did not reach it while it was no child
                put(module, parts.family.activation, before)
        if hasattr(config := _config(model), CONFIG):
            delattr(config, CONFIG)
        return model

    def loss(self, model: nn.Module, windows: Tensor) -> LossChange:
        """Measure what these thresholds cost: the loss of the model without and with them, on the same windows.

        model: a causal language model without thresholds on it; left as it was. windows: int64 [n, length], two or
        more, on text that was not calibrated on. InputError as `apply`, for other windows, and for thresholds on the
        model."""
        what = f"{windows.dtype} {list(windows.shape)}" if isinstance(windows, Tensor) else type(windows).__name__
        if not what.startswith("torch.int64") or windows.dim() != 2 or min(windows.shape) < 2:
            raise InputError(f"windows is {what}; accepted: int64 [n, length], two or more windows and tokens in each")
        self._pairs(model)
        _check_without(model)
        without = losses(model, windows)
        try:
            with_them = losses(self.apply(model), windows)
        finally:
            self.remove(model)
        return LossChange.of(without, with_them)

    def _pairs(self, model: nn.Module) -> list[tuple[LayerThresholds, FeedForward]]:
        """Return the thresholds beside the model's layers that they are for. InputError for another model."""
        _check_dense(model)
        modules, pairs = dict(uncompiled(model).named_modules()), []
        for layer in self.all:
            place = _place(layer.name, modules[layer.name]) if layer.name in modules else None
            wanted = (layer.d_model, layer.d_ff, layer.gated, layer.activation)
            if place is None or _shape(place) != wanted:
                said = "d_model {}, d_ff {}, gated {}, {}"
                own = "is not there" if place is None else f"has {said.format(*_shape(place))}"
                raise InputError(
                    f"these are thresholds of another model: {layer.name!r} {own}, and they are for "
                    f"{said.format(*wanted)}; accepted: the model that they were made for"
                )
            pairs.append((layer, place))
        return pairs


def _config(model: nn.Module) -> object | None:
    """Return the configuration of a model of transformers, which save_pretrained writes; None for another model."""
    config = getattr(uncompiled(model), "config", None)
    return config if hasattr(config, "to_json_file") else None


def _place(name: str, module: nn.Module) -> FeedForward | None:
    """Return a feed-forward layer, whatever its activation, which is `acts`, without a threshold of ours on it; a plain
    linear layer as one that is a projection alone; None for routed experts and others. InputError for a layer that
    cannot be asked."""
    if type(module) is nn.Linear:
        return FeedForward(name, module, None, module, module)
    if experts_of(module) or named_family(module) is None:
        return None
    parts = parts_of(module)
    weights = [] if parts is None else [p for owner in parts.owners for p in owner.parameters()]
    if parts is None or any(p.is_meta or hasattr(p, "device_mesh") for p in weights):
        raise InputError(
            f"{title(name, module)}: its projections are quantised, adapted, sharded or on meta; accepted: plain ones "
            "of torch.nn.Linear, or an `only` that leaves the layer out"
        )
    acts = parts.acts.activation if isinstance(parts.acts, ThresholdedActivation) else parts.acts
    return FeedForward(name, module, parts.gate, parts.up, parts.down, acts)


def _check_dense(model: nn.Module) -> None:
    check_model(model)
    if swapped := [name for name, module in model.named_modules() if isinstance(module, SparseFFN)]:
        raise InputError(f"{', '.join(swapped[:3])}: swapped by sparsify; accepted: dense layers (twell_lab.densify)")


def _check_without(model: nn.Module) -> None:
    if lossy_parts(model):
        raise InputError("the model has thresholds on it; accepted: one without (Thresholds.remove)")


@dataclass(frozen=True)
class LossChange:
    """The loss of a model with and without thresholds, in nats a token, on the same windows: both means, and that of
    the difference, with 1.96 standard errors of it on either side (low, high: 95%, over windows)."""

    dense: float
    thresholded: float
    change: float
    low: float
    high: float
    windows: int

    @classmethod
    def of(cls, dense: Tensor, thresholded: Tensor) -> LossChange:
        """Compare the losses of two or more windows, float64 [n]."""
        difference, n = thresholded - dense, len(dense)
        change, reach = difference.mean().item(), 1.96 * difference.std().item() / math.sqrt(n)
        return cls(dense.mean().item(), thresholded.mean().item(), change, change - reach, change + reach, n)

    def __str__(self) -> str:
        return (
            f"loss {self.dense:.4g} nats a token as it was, {self.thresholded:.4g} with thresholds: "
            f"{self.change:+.4g} ({self.low:+.4g} to {self.high:+.4g}, 95% over {self.windows:,} windows); lossy"
        )


def losses(model: nn.Module, windows: Tensor) -> Tensor:
    """Measure the mean loss of each window [n, length] in nats, float64 [n]. InputError for a token that the model does
    not know, and for a model that gives no scores [batch, tokens, vocabulary]."""
    scores = windows.shape[1] * vocabulary_of(model)  # of a window; 2**26 are in memory at a time
    batches, means = windows.split(max(1, min(32, 2**26 // max(1, scores)))), []

    def after(output, seen: list[Rows]) -> None:
        tokens, scores = batches[len(means)], getattr(output, "logits", output)
        if not isinstance(scores, Tensor) or scores.shape[:2] != tokens.shape:
            raise InputError(f"{type(model).__name__} gives no scores [batch, tokens, vocabulary]; those are accepted")
        targets = tokens[:, 1:].flatten().to(scores.device)
        nats = F.cross_entropy(scores[:, :-1].flatten(0, 1).float(), targets, reduction="none")
        means.append(nats.double().view(len(tokens), -1).mean(1).cpu())

    run(model, [], batches, after)
    return torch.cat(means)
