"""Core neurons: those that were among the strongest of most tokens of a prompt are computed for all that follow. Lossy.

    core = core_neurons(model, prompt, share=0.4)   # model: dense, ReLU
    model = core.apply(model)                       # lossy from here on; few_neurons.remove(model) takes it back

CoreInfer (Wang et al., arXiv 2410.18311): nothing is predicted; the weights of the chosen neurons are gathered when the
prompt was read, so that each token takes small dense products, and nothing waits for the host."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..analysis.profile import captured
from ..core import InputError
from ..formats.twell import fires
from ..layers.find import FeedForward
from ..ops.activation import RELU
from .checks import check_number, shown
from .few_neurons import FewNeurons, Neurons, computed, dense_layers, gate_of, of_neurons
from .magnitude import largest

OF_TOKEN = 0.4  # of the neurons that fire for a token


class CoreFFN(FewNeurons):
    """Computes the same neurons for every token, whose weights the layer owns. Lossy. core: int64 [n], which ones."""

    def __init__(self, layer: FeedForward, core: Tensor) -> None:
        super().__init__(layer)
        self.core, self.label = core, f"the same {len(core)} neurons for all tokens"
        self.renew()

    @torch.no_grad()
    def renew(self) -> None:
        weights = self.weights
        self.few = of_neurons(weights, self.core.to(weights.up.device), weights.down.t())

    def forward(self, x: Tensor) -> Tensor:
        return computed(x, self.few, RELU)


@torch.no_grad()
def core_neurons(model: nn.Module, prompt: Tensor, share: float = 0.4) -> Neurons:
    """Choose the neurons to go on with after a prompt, token ids [1, length]. Of each token, the share OF_TOKEN of its
    firing neurons, rounded up, is its core: those of the largest |h|, what enters down. Of the layer, the ceil(share *
    d_ff) that are in the cores of the most tokens are; of equally many the first. The model is left as it was; layers
    and errors are those of `predictors.predict`."""
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
