"""What a training loop wants of every feed-forward layer at every step: its L1 norm, with a gradient, and how many
neurons fire; and what a SparseFFN does where gradients are needed (`learn`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from ..core import InputError
from ..ops.activation import RELU
from ..ops.checks import plain_eager, watched
from .find import firing_layers
from .paths import hides_host

DENSE, SPARSE = "dense", "twell"  # the paths of ops.train
# A token at which more than this share of the neurons fires is heavy: as one of a few it costs the sparse kernels less
# than its entries would (twell_lab.analysis.switching has the times).
HEAVY = 0.07


class LayerTerm(NamedTuple):
    """One layer's part in one forward pass: float32 scalars, of which l1 alone has a gradient.

    l1: the sum over neurons of |h|, averaged over tokens. nnz: how many neurons fire at a token on average. Of swapped
    layers alone, else None: lost, the share of tokens that the sparse kernels finished from the dense weights; heavy,
    the share of tokens at which more than HEAVY of the neurons fire; and light, nnz with none firing at these."""

    name: str
    l1: Tensor
    nnz: Tensor
    lost: Tensor | None = None
    light: Tensor | None = None
    heavy: Tensor | None = None


def light_and_heavy(fired: Tensor, d_ff: int) -> tuple[Tensor, Tensor]:
    """Return `light` and `heavy` of a LayerTerm. fired: how many of d_ff neurons fire at each token, [tokens]."""
    heavy = fired > HEAVY * d_ff
    return fired.masked_fill(heavy, 0).float().mean(), heavy.float().mean()


def learn(layer: nn.Module, x: Tensor, weights: tuple, path) -> Tensor:
    """Compute a SparseFFN's output for x [..., d_model] where gradients are needed, or a report is asked for. path: the
    planned Path."""
    if (way := _way(layer, x, path)) is None:
        return layer.dense(x)
    from ..ops.train import train

    return _reported(layer, *train(x, *weights, path=way), weights.up.shape[0])


def prepare(layer: nn.Module, x: Tensor, weights: tuple, path) -> Callable[[Tensor], Tensor] | None:
    """Return a function that does `learn` on a GPU for any x like this one, with these weights; None where more may
    change than a layer looks at before each call: autocast, the rate of a dropout, weights that are computed."""
    if layer.may_drop or not plain_eager() or watched(*weights) or not all(t is None or t.is_leaf for t in weights):
        return None
    if (way := _way(layer, x, path)) is None:
        return layer.dense
    from ..ops import train

    step, d_ff = train.prepare(x, *weights, path=way), weights.up.shape[0]
    return lambda x: _reported(layer, *step(x), d_ff)


def _way(layer: nn.Module, x: Tensor, path) -> str | None:
    """Return the path of ops.train; None for the dense module. Once asked to report, a layer always takes the operator
    that can: a forward that is recomputed (checkpointing) must save what the first one saved."""
    way = layer.learning or path.learns
    short = way == DENSE and not (layer.reports or x.is_cuda and hides_host(x))
    return None if layer.acts != RELU or layer.gate is layer.up or short else way


def _reported(layer: nn.Module, y: Tensor, l1: Tensor, facts: Tensor, d_ff: int) -> Tensor:
    if layer.told is not None:
        from ..ops.train import counts

        _refuse_reentrant()
        kept, lost = counts(facts, l1.numel())
        share = None if lost is None else lost.float() / kept.numel()
        layer.told.append((l1.mean(), kept.float().mean(), share, *light_and_heavy(kept, d_ff)))
    return y


def of_hidden(h: Tensor) -> tuple[Tensor, ...]:
    """Return the report of a layer whose hidden values are h [..., d_ff]: l1, summed in float32 at least, and nnz."""
    _refuse_reentrant()
    tokens = h[..., 0].numel()
    l1 = h.abs().sum(dtype=torch.promote_types(h.dtype, torch.float32)) / tokens
    return l1, torch.count_nonzero(h.detach()) / tokens


def _refuse_reentrant() -> None:
    """Raise InputError where a layer runs inside the forward of an autograd.Function, as under reentrant checkpointing:
    gradients are off there, and the term would have none."""
    frame = None if torch.is_grad_enabled() or torch.compiler.is_compiling() else sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and isinstance(frame.f_locals.get(code.co_varnames[0]), FunctionCtx):
            raise InputError(
                "layer_terms under reentrant checkpointing: layers run without gradients there, and their L1 norms "
                "would have none; torch.utils.checkpoint with use_reentrant=False is accepted"
            )
        frame = frame.f_back


def _reporting(told: list[tuple]) -> Callable:
    # A closure: what torch.compile of torch 2.11 appends to a list among a function's defaults is lost.
    return lambda module, args: told.append(of_hidden(args[0]))


class LayerTerms(Sequence[LayerTerm]):
    """The terms of the forward passes so far, those of the first one first, each in the order of the model's layers:
    passes are told apart by counting, which is wrong where a layer is skipped in one of several, or runs twice. told:
    what each layer said in them, by its name."""

    def __init__(self, told: dict[str, list[tuple]]) -> None:
        self.told = told

    def __len__(self) -> int:
        return sum(map(len, self.told.values()))

    def __iter__(self) -> Iterator[LayerTerm]:
        return iter(self[:])

    def __getitem__(self, at):
        passes = zip_longest(*self.told.values())
        return [LayerTerm(name, *term) for row in passes for name, term in zip(self.told, row) if term is not None][at]

    def clear(self) -> None:
        """Forget them, as between the parts of a step."""
        for told in self.told.values():
            told.clear()


@contextmanager
def layer_terms(model: nn.Module) -> Iterator[LayerTerms]:
    """Within this context each forward pass adds a LayerTerm for every feed-forward layer that runs, in order.

        with layer_terms(model) as terms:
            loss = cross_entropy(model, batch)
        loss = loss + coefficient * sum(term.l1 for term in terms) / len(terms)

    The sum over neurons and the mean over tokens and layers are the convention of the published code of arXiv
    2603.23198, for which its coefficient 2e-5 is meant.

    Enter it for each pass anew, or `clear` the terms between passes; not twice at once for a model. Leave it before the
    backward pass: under gradient checkpointing layers run a second time there. Compile a dense model within it: torch
    does not look for hooks later. InputError for a model without a ReLU or squared ReLU feed-forward layer, and where a
    layer runs under reentrant checkpointing (use_reentrant=True)."""
    layers = firing_layers(model)
    told: dict[str, list[tuple]] = {layer.name: [] for layer in layers}
    with ExitStack() as undo:
        for layer in layers:
            if hasattr(layer.module, "tell"):
                undo.callback(layer.module.tell, None)
                layer.module.tell(told[layer.name])
            else:
                undo.callback(layer.down.register_forward_pre_hook(_reporting(told[layer.name])).remove)
        yield LayerTerms(told)
