"""What SparseFFN does where gradients are needed: which path it takes, and whom it tells about its L1 norm."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..core.errors import InputError
from ..ops import differentiable


class Told(NamedTuple):
    """What a layer tells of one forward pass: a LayerTerm without its name, which no compiled graph is to depend on."""

    l1: Tensor
    nnz: Tensor
    lost: Tensor | None = None


class LayerTerm(NamedTuple):
    """One layer's part in one forward pass.

    l1: scalar with gradient, the sum over neurons of |h| averaged over tokens, float32. nnz: scalar without, the
    neurons that fire at a token on average, float32. lost: the share of tokens that found no room in the sparse
    kernels' lists and were finished densely, float32; None where those kernels did not run. Reading any of them waits
    for the device.
    """

    name: str
    l1: Tensor
    nnz: Tensor
    lost: Tensor | None = None


class Learner:
    """The part of SparseFFN that trains. `learning` is what `learn` was told last."""

    learning: str | None = None
    _told: list[Told] | None = (
        None  # a list of this layer's own: one graph serves all layers where they are compiled one by one
    )
    _reports = (
        False  # once asked, always by the operator that can: a recomputed forward must save what the first one saved
    )

    def learn(self, path: str | None) -> None:
        """Which path to take where gradients are needed: "dense" for all neurons, "twell" for those that fire, None for
        "dense" where the plan says so for inputs of that size, and "twell" otherwise. Parameters and gradients stay the
        same."""
        if path not in (None, *differentiable.PATHS):
            raise InputError(f"path is {path!r}; {', '.join(map(repr, differentiable.PATHS))} and None are accepted")
        self.learning = path

    def tell(self, told: list[Told] | None) -> None:
        """Append to `told` at each forward with gradients from now on; None: stop. See twell_lab.layers.terms.

        A list for each layer: under FSDP2 layers are compiled one by one, and share a graph as long as nothing tells
        them apart, be it a name or how many layers have appended before. A graph for each is more than torch.compile's
        limit, past which it runs the rest without."""
        self._told = told
        self._reports |= told is not None

    def _learn(self, x: Tensor, weights: list[Tensor | None], biases: list[Tensor | None], planned: str) -> Tensor:
        path = self.learning or ("dense" if planned == "dense" else "twell")
        y, l1, kept, lost = differentiable.train_layer(x, *weights, *biases, path=path)
        if self._told is not None:
            lost = None if lost is None else lost.float() / kept.numel()
            self._told.append(Told(l1.mean(), kept.float().mean(), lost))
        return y


def may_watch(x) -> bool | None:
    """Whether a forward with x can be counted: None where the layer had better never change under its caller.

    A captured CUDA graph keeps the addresses of the buffers that were there; compiled code keeps what it was traced
    with."""
    if torch.compiler.is_compiling() or type(x) is not Tensor:
        return False
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    if x.layout != torch.strided or torch.is_autocast_enabled(x.device.type):
        return False  # under autocast: the plan is for the layer's own dtype
    return x.dim() > 0
