"""What a training loop wants of every feed-forward layer at every step: its L1 norm, with a gradient, and how many
neurons fire.

    with layer_terms(model) as terms:
        loss = cross_entropy(model, batch)
    loss = loss + coefficient * sum(term.l1 for term in terms) / len(terms)

Works on dense layers and on SparseFFN, and on models that have both. The sum over neurons and the mean over tokens and
layers are the convention of the published code of arXiv 2603.23198, for which its coefficient 2e-5 is meant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest

import torch
from torch import Tensor, nn

from ..ops.copies import all_finite
from .find import firing_layers
from .learner import LayerTerm, Told, layer_l1, layer_nnz
from .sparse_ffn import SparseFFN


class LayerTerms(Sequence[LayerTerm]):
    """The terms of the forward passes so far, those of the first one first, each in the order of the model's layers.

    Which pass a term belongs to is found by counting: the count is wrong where a layer is skipped in one of several
    passes, or runs twice in one.
    """

    def __init__(self, told: dict[str, list[Told]], layers: list) -> None:
        self._told, self._layers = told, layers

    def _all(self) -> list[LayerTerm]:
        passes = zip_longest(*self._told.values())
        return [
            LayerTerm(name, *each)
            for one in passes
            for name, each in zip(self._told, one, strict=True)
            if each is not None
        ]

    def __len__(self) -> int:
        return sum(map(len, self._told.values()))

    def __getitem__(self, at):
        return self._all()[at]

    def __iter__(self) -> Iterator[LayerTerm]:
        return iter(self._all())

    def clear(self) -> None:
        """Forget them, as between the parts of a step."""
        for each in self._told.values():
            each.clear()

    def finite(self) -> Tensor:
        """Whether every weight and bias of these layers is finite now: a bool scalar on their device, to be read
        together with the loss, now and then. A NaN in the weights of a silent neuron would show in a dense layer's
        loss; kernels that skip silent neurons never read it."""
        parts = [part for layer in self._layers for part in (layer.gate, layer.up, layer.down) if part is not None]
        return all_finite([*{id(p): p.detach() for part in parts for p in part.parameters()}.values()])

    def __repr__(self) -> str:
        return f"LayerTerms({self._all()})"


@contextmanager
def layer_terms(model: nn.Module) -> Iterator[LayerTerms]:
    """Within this context each forward pass with gradients adds a LayerTerm for every feed-forward layer, in order.

    Enter it for each pass anew, or `clear` the terms between passes: for each further pass torch.compile makes another
    graph. Do not enter it twice at once for a model. Leave it before the backward pass: under gradient checkpointing
    layers run a second time there, and would add a second term; for dense layers torch would raise an error, since the
    second run lacks the first one's hook. If a dense model is compiled, compile it within the context: torch does not
    look for hooks again. Raises InputError for a model without a ReLU or squared ReLU feed-forward layer."""
    layers = firing_layers(model)
    told: dict[str, list[Told]] = {layer.name: [] for layer in layers}
    hooks = [
        layer.down.register_forward_pre_hook(_told_by_dense(told[layer.name]))
        for layer in layers
        if not isinstance(layer.module, SparseFFN)
    ]
    sparse = [layer for layer in layers if isinstance(layer.module, SparseFFN)]
    for layer in sparse:
        layer.module.tell(told[layer.name])
    try:
        yield LayerTerms(told, layers)
    finally:
        for hook in hooks:
            hook.remove()
        for layer in sparse:
            layer.module.tell(None)


def _told_by_dense(told: list[Told]):
    """A hook for a down projection, whose input is the hidden activations h [..., d_ff] as a whole."""

    def tell(module: nn.Module, args: tuple) -> None:
        if torch.is_grad_enabled():
            told.append(Told(layer_l1(args[0]), layer_nnz(args[0].detach())))

    return tell
