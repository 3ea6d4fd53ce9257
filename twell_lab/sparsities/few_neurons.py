"""Layers that compute some of their neurons, put on a model and taken off it. Lossy.

    few = PredictedFFN(layer, predictor, neurons=64)      # sparsities.predictors; sparsities.core_neurons has another
    model = remove(model)                                 # the dense layers again

`sparsities.predictors` and `sparsities.core_neurons` choose the neurons: of a token, or of all tokens that follow a
prompt. `sparsities.predicted` does it as a path, from the weights alone."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core import InputError
from ..layers.experts import Expert
from ..layers.find import FeedForward, Only, StandIn, check_model, examine, feed_forwards, replaced
from ..layers.parts import Weights, parts_of
from ..layers.probe import raise_all, title
from ..ops.activation import Activation
from .products import hidden_of

LOSSY = "lossy: a layer that computes chosen neurons alone computes something else than the layer it was made of"


def of_neurons(weights: Weights, neurons: Tensor, down_t: Tensor) -> Weights:
    """Return the weights of these neurons, int64 [n], of a layer; down_t: its down transposed, [d_ff, d_model]."""
    gate, up, _, *biases, down_bias = weights
    first, beside, gate_bias, up_bias = (None if t is None else t.index_select(0, neurons) for t in (gate, up, *biases))
    down = down_t.index_select(0, neurons).t()
    return Weights(beside if gate is up else first, beside, down, gate_bias, up_bias, down_bias)


def computed(x: Tensor, weights: Weights, acts: Activation, chosen: Tensor | None = None) -> Tensor:
    """Return the output of a layer with these weights for x [rows, d_model]; chosen: bool [rows, d_ff], each row's
    neurons, None for all."""
    gate, up, down, gate_bias, up_bias, down_bias = weights
    first = None if gate is None or gate is up else F.linear(x, gate, gate_bias)
    hidden = hidden_of(first, F.linear(x, up, up_bias), weights, acts)
    return F.linear(hidden if chosen is None else torch.where(chosen, hidden, 0), down, down_bias)


def best_alone(x: Tensor, scores: Tensor, neurons: int, weights: Weights, acts: Activation, down_t: Tensor) -> Tensor:
    """Return the same, of the `neurons` neurons with the highest scores [rows, d_ff] for each row.

    One row gathers them; several rows, which have each their own, are computed densely and masked, and spare
    nothing."""
    best = scores.topk(neurons, sorted=False).indices
    if len(x) == 1:
        return computed(x, of_neurons(weights, best[0], down_t), acts)
    return computed(x, weights, acts, torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best, True))


class FewNeurons(nn.Module, ABC):
    """A feed-forward layer that computes some of its neurons, for inference. Lossy.

    dense: the layer as it was, with its projections. What a subclass makes of their weights (`renew`) it owns: it is
    made once, and again when a state is loaded."""

    label = "chosen neurons"

    def __init__(self, layer: FeedForward) -> None:
        super().__init__()
        self.dense = layer.module
        self._parts = [layer.gate, layer.up, layer.down]  # beside `dense`, whose children they are, or views of these
        self.register_load_state_dict_post_hook(lambda module, keys: module.renew())

    @property
    def weights(self) -> Weights:
        """The dense layer's weights."""
        return Weights.of(*self._parts)

    @abstractmethod
    def renew(self) -> None:
        """Make anew what this layer owns of the weights."""

    def own(self, **tensors: Tensor | None) -> None:
        """Keep tensors as buffers that are in no state."""
        for name, t in tensors.items():
            self.register_buffer(name, t if t is None else t.detach(), persistent=False)

    def extra_repr(self) -> str:
        return f"lossy: {self.label}"


def dense_layers(model: nn.Module, only: Only | None) -> list[FeedForward]:
    """List the dense ReLU layers of a model. InputError, by name, for those that cannot be replaced."""
    check_model(model)
    if chosen := [name for name, module in model.named_modules() if isinstance(module, FewNeurons)]:
        raise InputError(f"{chosen[0]!r} computes chosen neurons already; accepted: remove(model) first")
    layers, reasons = feed_forwards(model, only=only), []
    for layer in layers:
        module, name = layer.module, title(layer.name, layer.module)
        if isinstance(module, StandIn):
            reasons.append(f"{name} was swapped by sparsify; accepted: densify(model) first")
        elif isinstance(module, Expert) or (family := parts_of(module).family).inside or family.residual:
            reasons.append(f"{name} is an expert, or does more than its projections; accepted: an `only` without it")
        elif layer.acts is not None or layer.cut is not None:
            reasons.append(f"{name} has a threshold; accepted: layers with a ReLU or its square")
        elif (reason := examine(module)[0]) is not None:
            reasons.append(f"{name} {reason}")
    raise_all(reasons)
    return layers


def remove(model: nn.Module) -> nn.Module:
    """Put the dense layers back where layers compute chosen neurons, in place; returns the model."""
    check_model(model)
    return replaced(model, {layer: layer.dense for layer in model.modules() if isinstance(layer, FewNeurons)})


class Neurons(ABC):
    """A count of neurons to compute for each layer of a model, with the layer that computes them."""

    @abstractmethod
    def counts(self) -> dict[str, tuple[int, tuple[int, int]]]:
        """Return by the layer's name how many neurons it computes, and (d_ff, d_model)."""

    @abstractmethod
    def make(self, layer: FeedForward) -> FewNeurons:
        """Return what computes them in the place of a layer."""

    @property
    def sparsity(self) -> float:
        """The share of the neurons that is not computed, over all layers."""
        counts = self.counts().values()
        return 1 - sum(count for count, _ in counts) / sum(shape[0] for _, shape in counts)

    def apply(self, model: nn.Module) -> nn.Module:
        """Have the model's layers compute their chosen neurons alone, in place; returns the model. For inference.

        InputError, with nothing changed, for another model, and for layers that compute chosen neurons already."""
        counts = self.counts()
        there = {layer.name: layer for layer in dense_layers(model, lambda name, module: name in counts)}
        for name, (_, shape) in counts.items():
            own = tuple(there[name].up.weight.shape) if name in there else "not there"
            if own != shape:
                raise InputError(f"{name!r} is {own}; (d_ff, d_model) {shape} is accepted: the model this was made for")
        made = {layer.module: self.make(layer).train(layer.module.training) for layer in there.values()}
        return replaced(model, made)

    remove = staticmethod(remove)
