"""What SparseFFN does where gradients are needed: which path it takes, and whom it tells about its L1 norm."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..core.errors import InputError
from ..ops import differentiable, operators
from .paths import Path
from .weights import Weights

DENSE, SPARSE = differentiable.PATHS


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
    # A list of this layer's own: one graph serves all layers where they are compiled one by one.
    _told: list[Told] | None = None
    # Once asked, always by the operator that can: a recomputed forward must save what the first one saved.
    _reports = False

    def learn(self, path: str | None) -> None:
        """Which path to take where gradients are needed: "dense" for all neurons, "twell" for those that fire, None for
        "dense" where the plan says so for inputs of that size, and "twell" otherwise. Parameters and gradients stay the
        same. Raises InputError for another path."""
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

    def _learn(self, x: Tensor, weights: Weights, planned: Path) -> Tensor:
        """The output for x [..., d_model], with gradients, and what there is to tell of it."""
        skipping = None if self._reports or weights.up.is_cuda or self.learning == DENSE else self._skipping
        if skipping is not None:  # a CPU skips the silent neurons forwards
            w = skipping.ready(self, weights)
            how = {"down_t": w.down_t, "tile": self.tile, "words": self.words}
            if w.gate is None:
                return operators.plain_ffn(x, w.up, w.down, w.up_bias, w.down_bias, **how)
            return operators.gated_ffn(x, w.gate, w.up, w.down, w.gate_bias, w.up_bias, w.down_bias, **how)
        y, l1, kept, lost = differentiable.train_layer(x, *weights[:6], path=self.learning or planned.learns)
        if self._told is not None:
            lost = None if lost is None else lost.float() / kept.numel()
            self._told.append(Told(l1.mean(), kept.float().mean(), lost))
        return y
