"""Predicted neurons: a layer computes a fixed number of its neurons, chosen before the gate is computed. Lossy.

What fires is known once the gate is computed, which is a third of a gated layer's work. Two ways to guess earlier:

- `predict` (Deja Vu, Liu et al., arXiv 2310.17157): two narrow matrices, trained for each layer on inputs of a trained
  ReLU model, score all neurons of a token: x [d_model] -> rank -> [d_ff]. Those with the highest scores are computed.
- `core_neurons` (CoreInfer, Wang et al., arXiv 2410.18311): the neurons that were among the strongest of most tokens
  of a prompt are computed for all tokens that follow. Nothing is predicted.

    found = predict(model, batches, recall=0.95)    # model: dense, ReLU
    print(found)                                    # by layer: neurons, recall, precision, error
    model = found.apply(model)                      # lossy from here on; found.remove(model) takes it back

At one token a layer of the first kind gathers the rows of gate and up and the columns of down that it needs, one of the
second gathered them when the prompt was read; both compute small dense products of a fixed number of neurons, so that
nothing waits for the host. What fires and was not chosen is missing: `recall` is the share of firing neurons that were
chosen on inputs that the predictor was not trained on, `precision` the share of the chosen ones that fire, `error` the
relative error of the layer's output there. What that does to a model's loss, `bench.predictors` measures beside
thresholds (models.thresholds) and L1.

As a path of a feed-forward layer, `tl.plan(..., paths=["predicted"])` or `tl.sparsify(model, "predicted")`, there is
nothing to train a predictor on but the weights: it is the gate's own truncated singular value decomposition."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import records
from ..analysis.running import ALL, Gate, Rows, run
from ..core import InputError
from ..formats.twell import fires
from ..layers.experts import Expert
from ..layers.find import FeedForward, Only, check_model, feed_forwards, replaced
from ..layers.parts import part_at, parts_of, uncompiled
from ..layers.paths import Path
from ..layers.paths.converted import Converted
from ..layers.paths.cost import Work
from ..layers.paths.dense import dense_parts
from ..layers.probe import check_all, raise_all, title
from ..layers.sparse_ffn import SparseFFN
from ..layers.weights import Weights
from ..ops import copies
from .weights import checked_layer, checked_weight, largest

LOSSY = "lossy: a layer that computes chosen neurons alone computes something else than the layer it was made of"
ROWS = 8192  # inputs of a layer that a predictor is made of, at most
HELD_OUT = 0.25  # the share of them, the last ones, on which it is judged
_CHUNK = 1024  # inputs whose scores are sorted at a time


# ---- layers that compute some neurons ----


class FewNeurons(nn.Module):
    """A feed-forward layer that computes some of its neurons. Lossy.

    dense: the layer as it was, with its projections: what is done to its weights acts here too. What is put in the
    place of the layer, of a projection or of the activation (as `sparsify` and `weights.prune` do) would not: the next
    forward raises an InputError, until `remove`."""

    label = "chosen neurons"

    def __init__(self, layer: FeedForward) -> None:
        super().__init__()
        self.dense = layer.module
        # Beside `dense`, whose children they are, or views of these.
        self._parts = [layer.pattern, None if layer.gate is None else layer.up, layer.down]
        self._copies: tuple[copies.Note, tuple[Tensor, ...]] | None = None
        self._places = parts_of(layer.module).family.places
        self._found = self._standing()

    def _standing(self) -> dict[str, object]:
        """The layer, its projections and its activation, by their places."""
        return {"the layer": self.dense, **{place: part_at(self.dense, place) for place in self._places}}

    def check(self) -> None:
        """Raise InputError if something else stands where the layer or a part of it was."""
        for place, part in self._standing().items():
            if part is not self._found[place]:
                raise InputError(
                    f"{place} is a {type(part).__name__}, put there after the layer was replaced by one that computes "
                    f"{self.label}, which does not use it; accepted: remove(model) of sparsities.predictors first"
                )

    def copies(self) -> tuple[Tensor, ...]:
        """What `copied` makes of the weights: made anew when one of them was changed or replaced (ops.copies says which
        changes torch does not tell of: see `refresh`), and on every call where they may change unseen."""
        if torch.compiler.is_dynamo_compiling():  # which is not to trace how they are kept
            return torch.compiler.disable(FewNeurons.copies)(self)
        weights = [part.weight for part in self._parts if part is not None]
        held = self._copies
        if held is not None and copies.made_of(held[0], weights):
            if held[0].moment is not None:
                held[0].moment.enter(held[1])
            return held[1]
        self._copies = None
        with torch.inference_mode(False), torch.no_grad():
            made = self.copied()
        capturing = weights[0].is_cuda and torch.cuda.is_current_stream_capturing()
        if not capturing and not any(copies.changes_unseen(weight) for weight in weights):
            self._copies = copies.note(weights), made
        return made

    def refresh(self) -> None:
        """Have the next forward copy the weights anew: call it after a change of which torch raises no version, such as
        one in place of `down.weight.data`. Until then one token may be computed with the old values."""
        self._copies = None

    def copied(self) -> tuple[Tensor, ...]:
        """down [d_model, d_ff] turned, so that the columns of neurons are rows: as many bytes again as down has."""
        return (self._parts[2].weight.t().contiguous(),)

    def product(self, x: Tensor, first: Tensor, up: Tensor | None, down: Tensor, neurons: Tensor) -> Tensor:
        """The layer's output for x [rows, d_model], of these neurons [n] alone, whose weights are [n, d_model] each."""
        biases = [None if p is None or p.bias is None else p.bias for p in self._parts]
        few = [None if bias is None else bias.index_select(0, neurons) for bias in biases[:2]]
        hidden = torch.relu(F.linear(x, first, few[0]))
        if up is not None:
            hidden = hidden * F.linear(x, up, few[1])
        y = hidden @ down
        return y if biases[2] is None else y + biases[2]

    def masked(self, x: Tensor, chosen: Tensor) -> Tensor:
        """The same where each row has its own, chosen: bool [rows, d_ff]; all neurons are computed."""
        first, up, down = self._parts
        hidden = torch.relu(F.linear(x, first.weight, first.bias))
        if up is not None:
            hidden = hidden * F.linear(x, up.weight, up.bias)
        return F.linear(torch.where(chosen, hidden, 0), down.weight, down.bias)

    def extra_repr(self) -> str:
        return f"lossy: {self.label}"

    def __getstate__(self) -> dict:
        return {**vars(self), "_copies": None}


class LowRank(nn.Module):
    """Scores of neurons by two matrices: x [rows, d_model] -> [rows, d_ff], higher where firing is likelier.

    set_aside: weights.prune leaves these alone."""

    set_aside = True

    def __init__(self, d_model: int, d_ff: int, rank: int) -> None:
        super().__init__()
        self.narrow = nn.Linear(d_model, rank, bias=False)
        self.wide = nn.Linear(rank, d_ff)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(self.narrow(x))


class PredictedFFN(FewNeurons):
    """Computes, for each token, the `neurons` neurons that a LowRank scores highest. Lossy.

    One row gathers them; several, which have each their own, are computed densely and masked, and spare nothing."""

    def __init__(self, layer: FeedForward, predictor: LowRank, neurons: int) -> None:
        super().__init__(layer)
        self.predictor, self.neurons = predictor, neurons
        self.label = f"{neurons} predicted neurons a token"

    def forward(self, x: Tensor) -> Tensor:
        self.check()
        rows = x.reshape(-1, x.shape[-1])
        best = self.predictor(rows).topk(self.neurons, sorted=False).indices
        if len(rows) == 1:
            neurons = best[0]
            first, up = (None if part is None else part.weight.index_select(0, neurons) for part in self._parts[:2])
            down = self.copies()[0].index_select(0, neurons)
            return self.product(rows, first, up, down, neurons).view(x.shape)
        return self.masked(rows, _chosen(best, self._parts[0].weight.shape[0])).view(x.shape)


def _chosen(best: Tensor, d_ff: int) -> Tensor:
    return torch.zeros(len(best), d_ff, dtype=torch.bool, device=best.device).scatter_(1, best, True)


class CoreFFN(FewNeurons):
    """Computes the same neurons for every token, whose weights it copies once. Lossy. core: int64 [n], which ones."""

    core: Tensor

    def __init__(self, layer: FeedForward, core: Tensor) -> None:
        super().__init__(layer)
        self.register_buffer("core", core.to(layer.up.weight.device), persistent=False)
        self.label = f"the same {len(core)} neurons for all tokens"

    def copied(self) -> tuple[Tensor, ...]:
        first, up, down = self._parts
        rows = [part.weight.index_select(0, self.core) for part in (first, up) if part is not None]
        return (*rows, down.weight.index_select(1, self.core).t().contiguous())

    def forward(self, x: Tensor) -> Tensor:
        self.check()
        copies = self.copies()
        up = copies[1] if len(copies) == 3 else None
        return self.product(x.reshape(-1, x.shape[-1]), copies[0], up, copies[-1], self.core).view(x.shape)


# ---- in a model ----


def _layers(model: nn.Module, only: Only | None) -> list[FeedForward]:
    """The layers that can be replaced. InputError, by name, for those that cannot."""
    check_model(model)
    found, reasons = feed_forwards(model, only=only), []
    for layer in found:
        module, parts = layer.module, parts_of(layer.module)
        if isinstance(module, SparseFFN):
            reasons.append(f"{title(layer.name, module)} was swapped by sparsify; accepted: densify(model) first")
        elif isinstance(module, Expert) or parts is None or parts.family.inside or parts.family.residual:
            reasons.append(
                f"{title(layer.name, module)} is an expert, or does more than its projections; accepted: modules that "
                "are a feed-forward layer and no more, and an `only` that leaves others out"
            )
        elif layer.acts is not None or layer.cut is not None:
            reasons.append(f"{title(layer.name, module)} has a threshold; accepted: layers with a ReLU or its square")
        elif any(parameter.is_meta for parameter in module.parameters()):
            reasons.append(f"{title(layer.name, module)} is on meta; accepted: a model that was loaded")
    raise_all(reasons)
    check_all((layer.name, layer.module) for layer in found)
    return found


def _seats(model: nn.Module, shapes: dict[str, tuple[int, int]]) -> list[FeedForward]:
    """The model's layers of these names. InputError for a model without them, or with others of these names."""
    _refuse_held(model)
    there = {layer.name: layer for layer in _layers(model, lambda name, module: name in shapes)}
    for name, shape in shapes.items():
        own = tuple(there[name].up.weight.shape) if name in there else None
        if own != shape:
            raise InputError(
                f"{name!r} is {own or 'not there'} where {shape} (d_ff, d_model) was looked at; accepted: the model "
                "that this was made for"
            )
    return [there[name] for name in shapes]


def _refuse_held(model: nn.Module) -> None:
    check_model(model)
    if held := [name for name, module in model.named_modules() if isinstance(module, FewNeurons)]:
        raise InputError(f"{held[0]!r} computes chosen neurons already; accepted: remove(model) first")


def remove(model: nn.Module) -> nn.Module:
    """Put the dense layers back where layers compute chosen neurons, in place; returns the model."""
    check_model(model)
    return replaced(model, {each: each.dense for each in model.modules() if isinstance(each, FewNeurons)})


# ---- Deja Vu ----


class LayerPredictor:
    """The predictor of one layer, and how well it guesses on inputs that it was not trained on.

    name: of the layer. predictor: a LowRank. tokens: how many it was judged on. firing: how many neurons fire at one of
    these on average. recalls: float64 [d_ff + 1], the share of firing neurons among the n that score highest."""

    def __init__(self, layer: FeedForward, predictor: LowRank, x: Tensor) -> None:
        self.name, self.predictor, self.tokens = layer.name, predictor, len(x)
        self.shape = tuple(layer.up.weight.shape)
        self._layer, self._x = layer, x
        counts, d_ff = torch.zeros(self.shape[0], dtype=torch.int64), self.shape[0]
        with torch.no_grad():
            for some in x.split(_CHUNK):
                order = predictor(some).argsort(dim=1, descending=True, stable=True)
                counts += fires(_gate(layer, some)).gather(1, order).sum(0).cpu()
        total = int(counts.sum())
        self.firing = total / len(x)
        self.recalls = torch.cat([torch.zeros(1), counts.cumsum(0).double() / max(1, total)]).double()
        if not total:
            self.recalls = torch.ones(d_ff + 1, dtype=torch.float64)

    def neurons(self, recall: float) -> int:
        """The least number of neurons, from 1 up, with which this recall is reached."""
        return max(1, int((self.recalls < recall - 1e-12).sum()))

    @torch.no_grad()
    def row(self, neurons: int) -> dict:
        """JSON-able: layer, neurons, d_ff, firing, recall, precision and error with so many neurons a token; see this
        module's first lines."""
        cut, off, whole = PredictedFFN(self._layer, self.predictor, neurons), 0.0, 0.0
        for some in self._x.split(_CHUNK):
            best = self.predictor(some).topk(neurons, sorted=False).indices
            every = torch.ones(len(some), self.shape[0], dtype=torch.bool, device=some.device)
            exact = cut.masked(some, every).double()
            off += float((cut.masked(some, _chosen(best, self.shape[0])).double() - exact).square().sum())
            whole += float(exact.square().sum())
        recall = float(self.recalls[neurons])
        return {
            "layer": self.name,
            "neurons": neurons,
            "d_ff": self.shape[0],
            "firing": round(self.firing, 2),
            "recall": recall,
            "precision": recall * self.firing / neurons,
            "error": math.sqrt(off / whole) if whole else 0.0,
        }


@dataclass(frozen=True, eq=False)
class Predictors:
    """Predictors of a model's layers. recall: what was wished for, in each layer. rank: of all."""

    layers: list[LayerPredictor]
    recall: float
    rank: int

    def at(self, recall: float) -> Predictors:
        """The same predictors for another recall. InputError for a number that is not above 0 and up to 1."""
        return Predictors(self.layers, _check_share("recall", recall), self.rank)

    @property
    def sparsity(self) -> float:
        """The share of the neurons that is not computed, over all layers."""
        total = sum(layer.shape[0] for layer in self.layers)
        return 1 - sum(layer.neurons(self.recall) for layer in self.layers) / total

    @property
    def extra(self) -> float:
        """The predictors' multiplications, as a share of those of the dense layers."""
        dense = sum((3 if each._layer.gate is not None else 2) * math.prod(each.shape) for each in self.layers)
        return sum(self.rank * sum(each.shape) for each in self.layers) / dense

    def table(self) -> list[dict]:
        """`LayerPredictor.row` of each layer."""
        return [layer.row(layer.neurons(self.recall)) for layer in self.layers]

    def __str__(self) -> str:
        """`table` as lines of text, and that this is lossy."""
        rows = self.table()
        return (
            f"{records.table(rows, {name: name for name in rows[0]})}\n{self.sparsity:.1%} of the neurons are not "
            f"computed; predicting takes {self.extra:.1%} of the dense layers' multiplications\n{LOSSY}"
        )

    def apply(self, model: nn.Module) -> nn.Module:
        """Have the model's layers compute predicted neurons alone, in place; returns the model. Lossy; for inference.

        InputError, with nothing changed, for another model, and for layers that compute chosen neurons already."""
        seats = _seats(model, {layer.name: layer.shape for layer in self.layers})
        changed = {}
        for layer, seat in zip(self.layers, seats, strict=True):
            weight = seat.up.weight
            predictor = LowRank(layer.shape[1], layer.shape[0], self.rank).to(weight.device, weight.dtype)
            predictor.load_state_dict(layer.predictor.state_dict())
            made = PredictedFFN(seat, predictor.requires_grad_(False), layer.neurons(self.recall))
            changed[seat.module] = made.train(seat.module.training)
        return replaced(model, changed)

    remove = staticmethod(remove)


def predict(
    model: nn.Module,
    batches: Iterable,
    *,
    recall: float = 0.95,
    rank: int = 32,
    steps: int = 300,
    seed: int = 0,
    only: Only | None = None,
) -> Predictors:
    """Train a predictor for each ReLU feed-forward layer of a trained model, on what the layers are given.

    Each is trained alone, to tell which neurons fire (logistic loss, AdamW), in float32. The model is left as it was.

    Args:
        model: dense, with a ReLU or squared ReLU.
        batches: what the model takes, as `twell_lab.profile` takes them. The first ROWS tokens are used; the last
            quarter of these only to judge.
        recall: the share of the firing neurons that each layer should compute, above 0 and up to 1. How many neurons a
            layer computes is chosen by it, on the tokens that judge.
        rank: how narrow the predictors are, from 1 up.
        steps: of 256 tokens each, from 1 up.
        seed: of the predictors' weights and the order of the tokens.
        only: the layers for which only(name, module) is true.

    Raises:
        InputError: for wrong arguments, a model without such layers, layers that do more than their parts say or were
            swapped by sparsify, fewer than 8 tokens, and inputs that are not finite.
    """
    _check_share("recall", recall)
    for name, value in (("rank", rank), ("steps", steps)):
        if type(value) is not int or value < 1:
            raise InputError(f"{name} is {value!r:.80}; a whole number from 1 up is accepted")
    _refuse_held(model)
    layers, taken = _layers(model, only), {}

    def watch(layer: FeedForward):
        def see(x: Tensor, gate: Gate, rows: Rows) -> None:
            held = taken.setdefault(layer.name, [])
            held.append(rows.kept(x).detach().float()[: ROWS - sum(map(len, held))])

        return layer, see

    def enough() -> bool:
        return all(sum(map(len, taken.get(layer.name, []))) >= ROWS for layer in layers)

    run(model, [watch(layer) for layer in layers], batches, enough)
    made = []
    for number, layer in enumerate(layers):
        x = torch.cat(taken[layer.name]) if taken.get(layer.name) else torch.empty(0, 1)
        if len(x) < 8 or not x.isfinite().all():
            said = f"{len(x)} tokens" if len(x) < 8 else "values that are not finite"
            raise InputError(f"{layer.name!r} was given {said}; 8 tokens or more, of finite values, are accepted")
        learnt = len(x) - max(1, round(HELD_OUT * len(x)))
        made.append(LayerPredictor(layer, _train(layer, x[:learnt], rank, steps, seed + number), x[learnt:]))
    return Predictors(made, recall, rank)


def _train(layer: FeedForward, x: Tensor, rank: int, steps: int, seed: int) -> LowRank:
    with torch.no_grad():
        target = fires(_gate(layer, x))
    d_ff, d_model = layer.up.weight.shape
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), torch.inference_mode(False):
        torch.default_generator.manual_seed(seed)
        with torch.device("cpu"):
            made = LowRank(d_model, d_ff, rank).to(x.device)
        optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2, weight_decay=1e-2)
        slope = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(steps):
            some = torch.randint(len(x), (256,), device="cpu").to(x.device)
            loss = F.binary_cross_entropy_with_logits(made(x[some]), target[some].float(), reduction="none").sum(1)
            optimizer.zero_grad(set_to_none=True)
            loss.mean().backward()
            optimizer.step()
            slope.step()
    return made.requires_grad_(False)


def _gate(layer: FeedForward, x: Tensor) -> Tensor:
    """What decides who fires, for float32 x: [rows, d_ff]."""
    first = layer.pattern
    return F.linear(x.to(first.weight.dtype), first.weight, first.bias)


def _check_share(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise InputError(f"{name} is {value!r:.80}; a number above 0 and up to 1 is accepted")
    return float(value)


# ---- CoreInfer ----


@dataclass(frozen=True, eq=False)
class Core:
    """The core neurons of each layer for one prompt: int64 [n], ascending, by the layer's name. shapes: (d_ff, d_model)
    of each. tokens: of the prompt."""

    neurons: dict[str, Tensor]
    shapes: dict[str, tuple[int, int]]
    tokens: int

    @property
    def sparsity(self) -> float:
        """The share of the neurons that is not computed, over all layers."""
        return 1 - sum(map(len, self.neurons.values())) / sum(shape[0] for shape in self.shapes.values())

    def __str__(self) -> str:
        return f"{self.sparsity:.1%} of the neurons are not computed after a prompt of {self.tokens:,} tokens\n{LOSSY}"

    def apply(self, model: nn.Module) -> nn.Module:
        """Have the model's layers compute their core neurons alone, in place; returns the model. Lossy; for inference.

        InputError, with nothing changed, for another model, and for layers that compute chosen neurons already."""
        seats = _seats(model, self.shapes)
        changed = {seat.module: CoreFFN(seat, self.neurons[seat.name]).train(seat.module.training) for seat in seats}
        return replaced(model, changed)

    remove = staticmethod(remove)


def core_neurons(
    model: nn.Module, prompt: Tensor, share: float = 0.4, *, of_token: float = 0.4, only: Only | None = None
) -> Core:
    """Choose the neurons to go on with after a prompt.

    Of each token, those of its firing neurons with the largest |h|, what enters down, are its core. Of the layer, those
    that are in the cores of the most tokens are; of equally many the first.

    Args:
        model: dense, with a ReLU or squared ReLU. It runs once over the prompt and is left as it was.
        prompt: token ids [1, length].
        share: of a layer's neurons, above 0 and up to 1: ceil(share * d_ff) are taken.
        of_token: of a token's firing neurons, above 0 and up to 1, rounded up.
        only: the layers for which only(name, module) is true.

    Raises:
        InputError: for wrong arguments, and for models as `predict`.
    """
    _check_share("share", share), _check_share("of_token", of_token)
    if not isinstance(prompt, Tensor) or prompt.dim() != 2 or prompt.shape[0] != 1 or not prompt.numel():
        what = f"{prompt.dtype} {list(prompt.shape)}" if isinstance(prompt, Tensor) else type(prompt).__name__
        raise InputError(f"prompt is {what}; token ids [1, length] are accepted")
    _refuse_held(model)
    layers, counts = _layers(model, only), {}

    def watch(layer: FeedForward):
        def see(x: Tensor, gate: Gate, rows: Rows) -> None:
            first = rows.kept(gate(ALL))
            size = torch.relu(first).float()
            if layer.gate is not None:
                size = (size * F.linear(rows.kept(x), layer.up.weight, layer.up.bias).float()).abs()
            fired = fires(first)
            size, order = size.masked_fill(~fired, -1).sort(dim=1, descending=True, stable=True)
            many = (fired.sum(1, keepdim=True) * of_token).ceil()
            taken = torch.arange(size.shape[1], device=size.device) < many
            counts[layer.name] = counts.get(layer.name, 0) + torch.zeros_like(taken).scatter_(1, order, taken).sum(0)

        return layer, see

    run(uncompiled(model), [watch(layer) for layer in layers], [prompt])
    neurons = {}
    for layer in layers:
        d_ff = layer.up.weight.shape[0]
        if layer.name not in counts:
            raise InputError(f"{layer.name!r} saw no token of the prompt; an `only` that leaves it out is accepted")
        neurons[layer.name] = largest(counts[layer.name], math.ceil(share * d_ff)).nonzero()[:, 0]
    return Core(neurons, {layer.name: tuple(layer.up.weight.shape) for layer in layers}, prompt.shape[1])


# ---- as a path ----

RANK, NEURONS = 1 / 4, 1 / 8  # of the path's predictors, as a share of d_model; and computed for a token, of d_ff


def truncated(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """narrow [rank, columns] and wide [rows, rank], whose product is the closest matrix of this rank to weight [rows,
    columns] by the sum of squares: its truncated singular value decomposition.

    From the eigenvectors of weight^T weight, in float32; of weight's dtype.

    Raises:
        InputError: for a rank that is not from 1 to the number of columns, and for a weight that is no matrix, on meta
            or not finite.
    """
    matrix = checked_weight(weight)
    if type(rank) is not int or not 1 <= rank <= matrix.shape[1]:
        raise InputError(f"rank is {rank!r:.80}; a whole number from 1 to {matrix.shape[1]} is accepted")
    wide = matrix.float()
    size = wide.abs().amax().clamp(min=torch.finfo(torch.float32).tiny) if wide.numel() else 1.0
    own = wide / size  # whose squares float32 holds
    narrow = torch.linalg.eigh(own.t() @ own).eigenvectors[:, -rank:].t().contiguous()
    return narrow.to(weight.dtype), (wide @ narrow.t()).to(weight.dtype)


class Predicted(Converted):
    """For each token the NEURONS of a layer that the `truncated` gate, of RANK, scores highest. Lossy.

    One token gathers their weights, from `down` turned, which it holds; several, which have each their own, are
    computed densely and masked, and take longer than the dense layer. To make its form takes an eigendecomposition of
    d_model x d_model. Predictors that were trained (`predict`) guess better, and are applied to a model by themselves.
    """

    name = "predicted"
    exact = False

    @staticmethod
    def sizes_of(d_ff: int, d_model: int) -> tuple[int, int]:
        """The rank, and how many neurons a token computes."""
        return max(1, math.ceil(RANK * d_model)), max(1, math.ceil(NEURONS * d_ff))

    def fitted(self, weights: Weights) -> Path:
        checked_layer(weights)
        return self

    def form_bytes(self, weights: Weights) -> int:
        rank, _ = self.sizes_of(*weights.up.shape)
        return (rank * sum(weights.up.shape) + weights.down.numel()) * weights.up.itemsize

    def convert(self, weights: Weights) -> tuple[Any, Sequence[Tensor]]:
        self.fitted(weights)
        narrow, wide = truncated(
            weights.up if weights.gate is None else weights.gate, self.sizes_of(*weights.up.shape)[0]
        )
        made = narrow, wide, weights.down.t().clone(memory_format=torch.contiguous_format)
        return made, made

    def compute(self, layer: nn.Module, x: Tensor, weights: Sequence[Tensor | None], value: Any) -> Tensor:
        gate, up, down, gate_bias, up_bias, down_bias, _ = weights
        narrow, wide, turned = value
        rows, neurons = x.reshape(-1, x.shape[-1]), self.sizes_of(*up.shape)[1]
        scores = F.linear(F.linear(rows, narrow), wide, up_bias if gate is None else gate_bias)
        best = scores.topk(neurons, sorted=False).indices
        if len(rows) == 1:
            chosen = best[0]
            parts = [None if t is None else t.index_select(0, chosen) for t in (gate, up, gate_bias, up_bias)]
            if gate is up:  # gathered twice; the formula asks whether they are one
                parts[0] = parts[1]
            y = self._hidden(layer, rows, *parts) @ turned.index_select(0, chosen)
            y = y if down_bias is None else y + down_bias
        else:
            hidden = self._hidden(layer, rows, gate, up, gate_bias, up_bias)
            y = F.linear(torch.where(_chosen(best, len(up)), hidden, 0), down, down_bias)
        # What is not chosen does not see that 0 * inf is NaN, as the dense layer does.
        y = y + torch.linalg.vector_norm(rows, torch.inf, dim=-1, keepdim=True) * 0
        return y.view(x.shape)

    @staticmethod
    def _hidden(
        layer: nn.Module,
        x: Tensor,
        gate: Tensor | None,
        up: Tensor,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
    ) -> Tensor:
        acts, both = layer.formula["acts"], layer.formula["both"]
        beside = F.linear(x, up, up_bias)
        if gate is None:
            return acts(beside)
        if gate is up:
            return acts(beside).square()
        return acts(F.linear(x, gate, gate_bias)) * (acts(beside) if both else beside)

    def cost(self, work: Work, hot: int = 0) -> dict[str, float]:
        """Gathered weights are read, written, and read by their product."""
        d_ff, d_model, gated = work.firing.d_ff, work.firing.d_model, work.firing.gated
        rank, neurons = self.sizes_of(d_ff, d_model)
        scored = work.gemm(rank, d_model) + work.gemm(d_ff, rank)
        sorts = 4 * work.tokens * d_ff * work.itemsize / work.rates.bandwidth  # scores: written, and read to choose
        if work.tokens == 1:
            gathered = 3 * (3 if gated else 2) * neurons * d_model * work.itemsize / work.rates.bandwidth
            parts = {"gemm": scored, "rows": gathered, "memory": sorts}
        else:
            gemm, values = dense_parts(work)
            parts = {"gemm": scored + gemm, "rows": 0.0, "memory": sorts + 2 * values}
        return {**parts, "launches": 20 * work.rates.launch, "lost": 0.0}


PATHS = (Predicted(),)
