"""Layers that compute some of their neurons: here the same ones for all tokens that follow a prompt. Lossy.

    core = core_neurons(model, prompt, share=0.4)   # model: dense, ReLU
    model = core.apply(model)                       # lossy from here on
    model = remove(model)                           # the dense layers again

CoreInfer (Wang et al., arXiv 2410.18311): the neurons that were among the strongest of most tokens of a prompt are
computed for all that follow. Their weights are gathered once, so that each token takes small dense products, and
nothing waits for the host. `sparsities.predictors` chooses neurons for each token."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..analysis.profile import captured
from ..core import InputError
from ..formats.twell import fires
from ..layers.experts import Expert
from ..layers.find import FeedForward, StandIn, check_model, replaced, survey
from ..layers.parts import Weights, parts_of
from ..ops.activation import RELU
from .checks import check_number, shown
from .magnitude import largest
from .products import hidden_of

LOSSY = "lossy: a layer that computes chosen neurons alone computes something else than the layer it was made of"
OF_TOKEN = 0.4  # of the neurons that fire for a token, what is its core


def gate_of(layer: FeedForward, x: Tensor) -> Tensor:
    """Return what decides which neurons fire, [rows, d_ff], for x [rows, d_model] of any dtype."""
    first = layer.pattern
    return F.linear(x.to(first.weight.dtype), first.weight, first.bias)


def of_neurons(weights: Weights, neurons: Tensor, down_t: Tensor) -> Weights:
    """Return the weights of these neurons, int64 [n], of a layer; down_t: its down transposed, [d_ff, d_model]."""
    gate, up, _, *biases, down_bias = weights
    first, beside, gate_bias, up_bias = (None if t is None else t.index_select(0, neurons) for t in (gate, up, *biases))
    down = down_t.index_select(0, neurons).t()
    return Weights(beside if gate is up else first, beside, down, gate_bias, up_bias, down_bias)


def computed(x: Tensor, weights: Weights, chosen: Tensor | None = None) -> Tensor:
    """Return the output of a ReLU layer for x [..., d_model]; chosen: bool [..., d_ff], of each row, None for all."""
    gate, up, down, gate_bias, up_bias, down_bias = weights
    first = None if gate is None or gate is up else F.linear(x, gate, gate_bias)
    hidden = hidden_of(first, F.linear(x, up, up_bias), weights, RELU)
    return F.linear(hidden if chosen is None else torch.where(chosen, hidden, 0), down, down_bias)


class FewNeurons(nn.Module, ABC):
    """A feed-forward layer that computes some of its neurons, for inference. Lossy. dense: the layer as it was. What a
    subclass owns of its weights (`renew`) is made again when a state is loaded, and when the layer is moved or cast."""

    def __init__(self, layer: FeedForward, label: str) -> None:
        super().__init__()
        self.dense, self.label = layer.module, label
        self._parts = [layer.gate, layer.up, layer.down]  # beside `dense`, whose children they are, or views of these
        self.register_load_state_dict_post_hook(lambda module, keys: module.renew())

    @property
    def weights(self) -> Weights:
        return Weights.of(*self._parts)

    @abstractmethod
    def renew(self) -> None:
        """Make anew what this layer owns of the weights."""

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.renew()
        return self

    def extra_repr(self) -> str:
        return f"lossy: {self.label}"


class CoreFFN(FewNeurons):
    """Computes the same neurons for every token, whose weights the layer owns. Lossy. core: int64 [n], which ones."""

    def __init__(self, layer: FeedForward, core: Tensor) -> None:
        super().__init__(layer, f"the same {len(core)} neurons for all tokens")
        self.core = core
        self.renew()

    @torch.no_grad()
    def renew(self) -> None:
        weights = self.weights
        self.few = of_neurons(weights, self.core.to(weights.up.device), weights.down.t())

    def forward(self, x: Tensor) -> Tensor:
        return computed(x, self.few)


def dense_layers(model: nn.Module) -> list[FeedForward]:
    """List the dense layers of a model that have a ReLU or its square and are modules of their own. InputError where
    there is none, and for one that computes chosen neurons already."""
    check_model(model)
    layers, reasons = survey(model)
    if chosen := [name for name, module in model.named_modules() if isinstance(module, FewNeurons)]:
        raise InputError(f"{chosen[0]!r} computes chosen neurons already; accepted: remove(model) first")
    plain = [one for one in layers if not (one.both or one.acts or one.cut)]
    alone = [one for one in plain if not isinstance(one.module, (StandIn, Expert))]
    dense = [layer for layer in alone if not parts_of(layer.module).family.inside]
    if not dense:
        why = next((f"{name} {reason}" for name, reason in reasons.items()), f"{len(layers)} others")
        raise InputError(f"no dense layer with a ReLU in {type(model).__name__} ({why}); one or more is accepted")
    return dense


def remove(model: nn.Module) -> nn.Module:
    """Put the dense layers back where layers compute chosen neurons, in place; returns the model."""
    check_model(model)
    return replaced(model, {layer: layer.dense for layer in model.modules() if isinstance(layer, FewNeurons)})


@dataclass(eq=False)
class Neurons:
    """Neurons to compute in the layers of a model: by the layer's name how many (counts) and (d_ff, d_model) (shapes);
    and what makes of a layer what computes them in its place (make)."""

    counts: dict[str, int]
    shapes: dict[str, tuple[int, int]]
    make: Callable[[FeedForward], FewNeurons]

    @property
    def sparsity(self) -> float:
        """The share of the neurons that is not computed, over all layers."""
        return 1 - sum(self.counts.values()) / sum(d_ff for d_ff, _ in self.shapes.values())

    def __str__(self) -> str:
        return f"{self.sparsity:.1%} of the neurons are not computed\n{LOSSY}"

    def apply(self, model: nn.Module) -> nn.Module:
        """Have the model's layers compute their chosen neurons alone, in place; returns the model. InputError, with
        nothing changed, for another model, and for layers that compute chosen neurons already."""
        layers = dense_layers(model)
        shapes = {layer.name: tuple(layer.up.weight.shape) for layer in layers}
        if shapes != self.shapes:
            said = f"the layers' (d_ff, d_model) are {shapes!s:.200}; {self.shapes!s:.200}"
            raise InputError(f"{said} are accepted: the model that this was made for")
        return replaced(model, {one.module: self.make(one).train(one.module.training) for one in layers})


@torch.no_grad()
def core_neurons(model: nn.Module, prompt: Tensor, share: float = 0.4) -> Neurons:
    """Choose the neurons to go on with after a prompt, token ids [1, length]: the ceil(share * d_ff) that are in the
    cores of the most tokens, of equally many the first. A token's core is the share OF_TOKEN of its firing neurons,
    rounded up: those of the largest |h|, what enters down. Layers and errors are those of `predictors.predict`."""
    check_number("share", share, lambda part: 0 < part <= 1, "a number above 0 and up to 1")
    if not isinstance(prompt, Tensor) or prompt.dim() != 2 or prompt.shape[0] != 1 or not prompt.numel():
        raise InputError(f"prompt is {shown(prompt)}; token ids [1, length] are accepted")
    layers, neurons = dense_layers(model), {}
    inputs = captured(model, [prompt], [layer.name for layer in layers], prompt.numel())
    for layer in layers:
        x = inputs[layer.name]
        first = gate_of(layer, x)
        size = torch.relu(first).float()
        if layer.gate is not None:
            size = (size * F.linear(x, layer.up.weight, layer.up.bias).float()).abs()
        fired = fires(first)
        order = size.masked_fill(~fired, -1).argsort(dim=1, descending=True, stable=True)
        taken = torch.arange(size.shape[1], device=size.device) < (fired.sum(1, keepdim=True) * OF_TOKEN).ceil()
        counts = torch.zeros_like(taken).scatter_(1, order, taken).sum(0)
        neurons[layer.name] = largest(counts, math.ceil(share * len(counts))).nonzero()[:, 0]
    shapes = {layer.name: tuple(layer.up.weight.shape) for layer in layers}
    counts = {name: len(some) for name, some in neurons.items()}
    return Neurons(counts, shapes, lambda layer: CoreFFN(layer, neurons[layer.name]))
