"""Layers that compute some of their neurons, put on a model and taken off it. Lossy.

    few = PredictedFFN(layer, predictor, neurons=64)      # sparsities.predictors; sparsities.core_neurons has another
    model = remove(model)                                 # the dense layers again

`sparsities.predictors` and `sparsities.core_neurons` choose the neurons: of a token, or of all tokens that follow a
prompt. `sparsities.predicted` does it as a path, from the weights alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core import InputError
from ..layers.experts import Expert
from ..layers.find import FeedForward, StandIn, check_model, replaced, survey
from ..layers.parts import Weights, parts_of
from ..ops.activation import Activation
from .products import hidden_of

LOSSY = "lossy: a layer that computes chosen neurons alone computes something else than the layer it was made of"


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


def computed(x: Tensor, weights: Weights, acts: Activation, chosen: Tensor | None = None) -> Tensor:
    """Return the output of a layer with these weights for x [..., d_model]; chosen: bool [..., d_ff], each row's
    neurons, None for all."""
    gate, up, down, gate_bias, up_bias, down_bias = weights
    first = None if gate is None or gate is up else F.linear(x, gate, gate_bias)
    hidden = hidden_of(first, F.linear(x, up, up_bias), weights, acts)
    return F.linear(hidden if chosen is None else torch.where(chosen, hidden, 0), down, down_bias)


def best_alone(x: Tensor, scores: Tensor, neurons: int, weights: Weights, acts: Activation, down_t: Tensor) -> Tensor:
    """Return the same for x [rows, d_model], of the `neurons` neurons with the highest scores [rows, d_ff] of each row:
    gathered for one row; of several, which have each their own, computed densely and masked."""
    best = scores.topk(neurons, sorted=False).indices
    if len(x) == 1:
        return computed(x, of_neurons(weights, best[0], down_t), acts)
    return computed(x, weights, acts, torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best, True))


class FewNeurons(nn.Module, ABC):
    """A feed-forward layer that computes some of its neurons, for inference. Lossy. dense: the layer as it was. What a
    subclass owns of its weights (`renew`) is made again when a state is loaded, and when the layer is moved or cast."""

    label = "chosen neurons"

    def __init__(self, layer: FeedForward) -> None:
        super().__init__()
        self.dense = layer.module
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


def dense_layers(model: nn.Module) -> list[FeedForward]:
    """List the dense layers of a model that have a ReLU or its square and are modules of their own. InputError where
    there is none, and by name for one that computes chosen neurons already."""
    check_model(model)
    layers, reasons = survey(model)
    if chosen := [name for name, module in model.named_modules() if isinstance(module, FewNeurons)]:
        raise InputError(f"{chosen[0]!r} computes chosen neurons already; accepted: remove(model) first")
    alone = [
        one for one in layers if not (one.both or one.acts or one.cut or isinstance(one.module, (StandIn, Expert)))
    ]
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
    """Neurons to compute in the layers of a model. By the layer's name, counts: how many; shapes: (d_ff, d_model).
    make: from a layer to what computes them in its place."""

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
        """Have the model's layers compute their chosen neurons alone, in place; returns the model. For inference.

        InputError, with nothing changed, for another model, and for layers that compute chosen neurons already."""
        layers = dense_layers(model)
        shapes = {layer.name: tuple(layer.up.weight.shape) for layer in layers}
        if shapes != self.shapes:
            said = f"the layers' (d_ff, d_model) are {shapes!s:.200}; {self.shapes!s:.200}"
            raise InputError(f"{said} are accepted: the model that this was made for")
        return replaced(model, {one.module: self.make(one).train(one.module.training) for one in layers})
