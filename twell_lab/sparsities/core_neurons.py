"""Core neurons: those that were among the strongest of most tokens of a prompt are computed for all that follow. Lossy.

    core = core_neurons(model, prompt, share=0.4)   # model: dense, ReLU
    model = core.apply(model)                       # lossy from here on; remove(model) takes it back

CoreInfer (Wang et al., arXiv 2410.18311): nothing is predicted. The weights of the chosen neurons are gathered when the
prompt was read, so that each token takes small dense products, and nothing waits for the host."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..analysis.running import ALL, Gate, Rows, run
from ..core import InputError
from ..formats.twell import fires
from ..layers.find import FeedForward, Only
from ..layers.parts import NAMES, Weights, uncompiled
from ..ops.activation import RELU
from .checks import check_share, shown
from .few_neurons import LOSSY, FewNeurons, Neurons, computed, dense_layers, of_neurons, remove
from .magnitude import largest

__all__ = ["CoreFFN", "core_neurons", "remove"]


class CoreFFN(FewNeurons):
    """Computes the same neurons for every token, whose weights the layer owns. Lossy. core: int64 [n], which ones."""

    core: Tensor

    def __init__(self, layer: FeedForward, core: Tensor) -> None:
        super().__init__(layer)
        self.own(core=core.to(layer.up.weight.device))
        self.label = f"the same {len(core)} neurons for all tokens"
        self.renew()

    def renew(self) -> None:
        few = of_neurons(self.weights, self.core, self.weights.down.t())
        self.own(**few._asdict() | {"gate": None if few.gate is few.up else few.gate})
        self.squared = few.gate is few.up

    def forward(self, x: Tensor) -> Tensor:
        few = Weights(*(getattr(self, name) for name in NAMES))
        few = few._replace(gate=few.up) if self.squared else few
        return computed(x.reshape(-1, x.shape[-1]), few, RELU).view(x.shape)


@dataclass(frozen=True, eq=False)
class Core(Neurons):
    """The core neurons of each layer for one prompt: int64 [n], ascending, by the layer's name. shapes: (d_ff, d_model)
    of each. tokens: of the prompt."""

    neurons: dict[str, Tensor]
    shapes: dict[str, tuple[int, int]]
    tokens: int

    def counts(self) -> dict[str, tuple[int, tuple[int, int]]]:
        return {name: (len(self.neurons[name]), shape) for name, shape in self.shapes.items()}

    def make(self, layer: FeedForward) -> CoreFFN:
        return CoreFFN(layer, self.neurons[layer.name])

    def __str__(self) -> str:
        return f"{self.sparsity:.1%} of the neurons are not computed after a prompt of {self.tokens:,} tokens\n{LOSSY}"


def core_neurons(
    model: nn.Module, prompt: Tensor, share: float = 0.4, *, of_token: float = 0.4, only: Only | None = None
) -> Core:
    """Choose the neurons to go on with after a prompt.

    Of each token, those of its firing neurons with the largest |h|, what enters down, are its core. Of the layer, those
    that are in the cores of the most tokens are; of equally many the first.

    model: dense, with a ReLU or squared ReLU. It runs once over the prompt and is left as it was. prompt: token ids [1,
    length]. share: of a layer's neurons, above 0 and up to 1: ceil(share * d_ff) are taken. of_token: of a token's
    firing neurons, above 0 and up to 1, rounded up. only: the layers for which only(name, module) is true. InputError
    for wrong arguments, and for models as `predictors.predict`."""
    check_share("share", share)
    check_share("of_token", of_token)
    if not isinstance(prompt, Tensor) or prompt.dim() != 2 or prompt.shape[0] != 1 or not prompt.numel():
        raise InputError(f"prompt is {shown(prompt)}; token ids [1, length] are accepted")
    layers, counts = dense_layers(model, only), {}

    def watch(layer: FeedForward):
        def count(x: Tensor, gate: Gate, rows: Rows) -> None:
            first = rows.kept(gate(ALL))
            size = torch.relu(first).float()
            if layer.gate is not None:
                size = (size * F.linear(rows.kept(x), layer.up.weight, layer.up.bias).float()).abs()
            fired = fires(first)
            order = size.masked_fill(~fired, -1).argsort(dim=1, descending=True, stable=True)
            most = (fired.sum(1, keepdim=True) * of_token).ceil()
            taken = torch.arange(size.shape[1], device=size.device) < most
            counts[layer.name] = counts.get(layer.name, 0) + torch.zeros_like(taken).scatter_(1, order, taken).sum(0)

        return layer, count

    run(uncompiled(model), [watch(layer) for layer in layers], [prompt])
    neurons = {}
    for layer in layers:
        if layer.name not in counts:
            raise InputError(f"{layer.name!r} saw no token of the prompt; an `only` that leaves it out is accepted")
        count = math.ceil(share * layer.up.weight.shape[0])
        neurons[layer.name] = largest(counts[layer.name], count).nonzero()[:, 0]
    return Core(neurons, {layer.name: tuple(layer.up.weight.shape) for layer in layers}, prompt.shape[1])
