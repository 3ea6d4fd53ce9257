"""What a training loop wants of every feed-forward layer at every step: its L1 norm, with a gradient, and who fires.

    with layer_terms(model) as terms:
        loss = cross_entropy(model, batch)
    loss = loss + coefficient * sum(term.l1 for term in terms) / len(terms)

Works on dense layers and on SparseFFN, and on models that have both. Sum over neurons, mean over tokens and layers: the
convention of the published code of arXiv 2603.23198, whose 2e-5 is meant so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .ffn import SparseFFN
from .learning import LayerTerm as LayerTerm
from .model import firing_layers
from .objective import layer_l1, layer_nnz


@contextmanager
def layer_terms(model: nn.Module) -> Iterator[list[LayerTerm]]:
    """Within this context each forward pass with gradients appends a LayerTerm for every feed-forward layer, in order.

    A layer that runs twice, as under gradient checkpointing, appends twice if the second time falls into the context: leave
    it before the backward pass. Raises InputError for a model without a ReLU or squared ReLU feed-forward layer.
    """
    terms: list[LayerTerm] = []
    layers = firing_layers(model)
    hooks, sparse = [], []
    for layer in layers:
        if isinstance(layer.module, SparseFFN):
            layer.module.report_to(terms, layer.name)
            sparse.append(layer.module)
        else:
            hooks.append(layer.down.register_forward_pre_hook(
                lambda _, args, name=layer.name: terms.append(dense_term(name, args[0])) if torch.is_grad_enabled() else None))
    try:
        yield terms
    finally:
        for hook in hooks:
            hook.remove()
        for module in sparse:
            module.report_to(None)


def dense_term(name: str, h: Tensor) -> LayerTerm:
    """The term of a layer whose hidden activations h [..., d_ff] are all there."""
    return LayerTerm(name, layer_l1(h), layer_nnz(h.detach()))
