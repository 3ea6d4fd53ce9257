"""Layers that compute some of their neurons, put on a model and taken off it. Lossy.

`sparsities.predictors` and `sparsities.core_neurons` choose the neurons: of a token, or of all tokens that follow a
prompt."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core import InputError
from ..layers.experts import Expert
from ..layers.find import FeedForward, Only, StandIn, check_model, feed_forwards, obstacle, replaced
from ..layers.parts import parts_of
from ..layers.probe import raise_all, title

LOSSY = "lossy: a layer that computes chosen neurons alone computes something else than the layer it was made of"


class FewNeurons(nn.Module, ABC):
    """A feed-forward layer that computes some of its neurons, for inference. Lossy.

    dense: the layer as it was, with its projections. What a subclass makes of their weights (`renew`) it owns: it is
    made once, and again when a state is loaded."""

    label = "chosen neurons"

    def __init__(self, layer: FeedForward) -> None:
        super().__init__()
        self.dense = layer.module
        # Beside `dense`, whose children they are, or views of these.
        self._parts = [layer.pattern, None if layer.gate is None else layer.up, layer.down]
        self.register_load_state_dict_post_hook(FewNeurons._loaded)

    @abstractmethod
    def renew(self) -> None:
        """Make anew what this layer owns of the weights."""

    def _loaded(self, keys) -> None:
        self.renew()

    def own(self, **tensors: Tensor | None) -> None:
        """Keep tensors as buffers that are in no state."""
        for name, t in tensors.items():
            self.register_buffer(name, t if t is None else t.detach(), persistent=False)

    def product(self, x: Tensor, first: Tensor, up: Tensor | None, down_t: Tensor, neurons: Tensor) -> Tensor:
        """Return the layer's output for x [rows, d_model], of these neurons [n] alone, whose weights are [n, d_model]
        each."""
        biases = [None if part is None or part.bias is None else part.bias for part in self._parts]
        few = [None if bias is None else bias.index_select(0, neurons) for bias in biases[:2]]
        hidden = torch.relu(F.linear(x, first, few[0]))
        if up is not None:
            hidden = hidden * F.linear(x, up, few[1])
        y = hidden @ down_t
        return y if biases[2] is None else y + biases[2]

    def masked(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Return the same where each row has its own, chosen: bool [rows, d_ff]; all neurons are computed."""
        first, up, down = self._parts
        hidden = torch.relu(F.linear(x, first.weight, first.bias))
        if up is not None:
            hidden = hidden * F.linear(x, up.weight, up.bias)
        return F.linear(torch.where(chosen, hidden, 0), down.weight, down.bias)

    def extra_repr(self) -> str:
        return f"lossy: {self.label}"


def places(best: Tensor, d_ff: int) -> Tensor:
    """Return which neurons are among `best`, int64 [rows, n]: bool [rows, d_ff]."""
    return torch.zeros(len(best), d_ff, dtype=torch.bool, device=best.device).scatter_(1, best, True)


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
        elif (reason := obstacle(module)) is not None:
            reasons.append(f"{name} {reason}")
    raise_all(reasons)
    return layers


def places_in(model: nn.Module, shapes: dict[str, tuple[int, int]]) -> list[FeedForward]:
    """List the model's layers of these names. InputError for a model without them, or with others of these names."""
    there = {layer.name: layer for layer in dense_layers(model, lambda name, module: name in shapes)}
    for name, shape in shapes.items():
        own = tuple(there[name].up.weight.shape) if name in there else None
        if own != shape:
            raise InputError(
                f"{name!r} is {own or 'not there'} where {shape} (d_ff, d_model) was looked at; accepted: the model "
                "that this was made for"
            )
    return [there[name] for name in shapes]


def remove(model: nn.Module) -> nn.Module:
    """Put the dense layers back where layers compute chosen neurons, in place; returns the model."""
    check_model(model)
    return replaced(model, {layer: layer.dense for layer in model.modules() if isinstance(layer, FewNeurons)})


def check_share(name: str, value: float) -> float:
    """Return the value. InputError for anything but a number above 0 and up to 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise InputError(f"{name} is {value!r:.80}; a number above 0 and up to 1 is accepted")
    return float(value)
