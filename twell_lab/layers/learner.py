"""What SparseFFN does where gradients are needed: which path it takes, and how it reports its L1 norm."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..core import InputError
from ..ops import differentiable, operators
from ..ops.activation import RELU, Activation
from .paths import Path
from .paths.dense import by_torch, hides_host
from .weights import Weights

DENSE, SPARSE = differentiable.PATHS
# A token at which more than this share of the neurons fires is a heavy one: as a few among many tokens it costs the
# sparse kernels less than its entries would (twell_lab.analysis.switching has the times).
HEAVY = 0.07


class Told(NamedTuple):
    """What a layer reports of one forward pass: a LayerTerm without a name, on which a compiled graph would depend."""

    l1: Tensor
    nnz: Tensor
    lost: Tensor | None = None
    light: Tensor | None = None
    heavy: Tensor | None = None


class LayerTerm(NamedTuple):
    """One layer's part in one forward pass.

    l1: scalar with a gradient, the sum over neurons of |h| averaged over tokens, float32. nnz: scalar without a
    gradient, how many neurons fire at a token on average, float32. lost: the share of tokens that the sparse kernels
    finished from the dense weights (see ops.train_rows.survivors), float32; None where they did not run. heavy: the
    share of tokens at which more than HEAVY of the neurons fire, and light: nnz with none firing at these, float32;
    None in a dense layer that was not swapped. Reading any of them waits for the device.
    """

    name: str
    l1: Tensor
    nnz: Tensor
    lost: Tensor | None = None
    light: Tensor | None = None
    heavy: Tensor | None = None


def light_and_heavy(fired: Tensor, d_ff: int) -> tuple[Tensor, Tensor]:
    """`light` and `heavy` of a LayerTerm. fired: how many of d_ff neurons fire at each token, [tokens], any type."""
    heavy = fired > HEAVY * d_ff
    return fired.masked_fill(heavy, 0).float().mean(), heavy.float().mean()


def layer_l1(h: Tensor) -> Tensor:
    """Sum over neurons of |h|, averaged over tokens: [..., d_ff] -> a scalar, summed in float32 at least."""
    return h.abs().sum(dtype=torch.promote_types(h.dtype, torch.float32)) / h[..., 0].numel()


def layer_nnz(h: Tensor) -> Tensor:
    """Neurons with h != 0 at a token, averaged over tokens: [..., d_ff] -> a float32 scalar."""
    return torch.count_nonzero(h) / h[..., 0].numel()


class Learner:
    """The part of SparseFFN that trains. learning: the path that was given to `learn` last."""

    formula: dict[str, Any]
    acts: Activation | None
    learning: str | None = None
    splits: bool = False
    # A list for each layer: so one graph serves all layers where they are compiled one by one (see `tell`).
    _told: list[Told] | None = None
    # Once asked to report, a layer always takes the operator that can: a forward that is recomputed (checkpointing)
    # must save what the first one saved.
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

        Each layer gets a list of its own. Under FSDP2 layers are compiled one by one, and share a graph as long as they
        do not differ in anything, such as a name or the length of a common list. A graph for each layer would exceed
        torch.compile's limit, past which it compiles no more. InputError for a layer that is split over processes:
        its gradients are computed by what split it."""
        if told is not None and self.splits:
            raise InputError(
                "the layer is split over several processes (tp_plan), and its terms with it; accepted: a model that is "
                "whole, or terms of the dense model"
            )
        self._told = told
        self._reports |= told is not None

    def _learn(self, x: Tensor, weights: Weights, planned: Path) -> Tensor:
        """The output for x [..., d_model], with gradients; reports to the list of `tell`, if there is one. Kernels have
        gradients of the ReLU alone."""
        if self.acts != RELU:
            return self._by_torch(x, weights, None)
        skipping = self._skips(weights)
        if skipping is not None:  # a CPU skips the silent neurons forwards
            w = skipping.ready(self, weights)
            how = {"down_t": w.down_t, "tile": self.tile, "words": self.words}
            if w.gate is None:
                return operators.plain_ffn(x, w.up, w.down, w.up_bias, w.down_bias, **how)
            return operators.gated_ffn(x, w.gate, w.up, w.down, w.gate_bias, w.up_bias, w.down_bias, **how)
        path = self.learning or planned.learns
        if path == DENSE and weights.up.is_cuda and not self._reports and not hides_host(x):
            return by_torch(x, weights)
        if self._told is None:
            return differentiable.train_output(x, *weights[:6], path=path)
        y, l1, kept, lost = differentiable.train_layer(x, *weights[:6], path=path)
        lost = None if lost is None else lost.float() / kept.numel()
        self._told.append(Told(l1.mean(), kept.float().mean(), lost, *light_and_heavy(kept, weights.up.shape[0])))
        return y

    def _skips(self, weights: Weights) -> Path | None:
        """The path on which a CPU skips the silent neurons where gradients are needed; None where it does not."""
        return None if self._reports or weights.up.is_cuda or self.learning == DENSE else self._skipping

    def learns_by(self, planned: Path) -> str:
        """The name of the path that is taken where gradients are needed and the plan says this one."""
        if self.acts != RELU:
            return DENSE
        skipping = self._skips(Weights.of(*self.parts))
        return skipping.name if skipping is not None else self.learning or planned.learns

    def _by_torch(self, x: Tensor, weights: Weights, dropout: nn.Dropout | None) -> Tensor:
        """The output for x [..., d_model] by torch's operations, with this dropout before the down projection, as the
        dense layer has it: what is reported is what was not dropped."""

        def seen(hidden: Tensor) -> Tensor:
            hidden = hidden if dropout is None else dropout(hidden)
            if self._told is not None and torch.is_grad_enabled():
                self._told.append(Told(layer_l1(hidden), layer_nnz(hidden.detach())))
            return hidden

        return by_torch(x, weights, seen, **self.formula)
