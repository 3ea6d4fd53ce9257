"""What training minimises, measured in one pass: cross-entropy, and the L1 of what enters each down projection, times a
coefficient that has a schedule (`l1_coefficient`); and the remedy for the neurons that this kills."""

from __future__ import annotations

import math
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..analysis.running import vocabulary_of
from ..layers.find import FeedForward, firing_layers
from ..layers.sparse_ffn import SparseFFN
from ..layers.terms import LayerTerm, layer_terms
from . import parallel

EVAL_BATCH = 64  # windows read at a time where nothing is learned from them
SIGMA = 0.02  # the deviation of fresh gate rows
EVAL_SCORES = 2**28  # the most scores of next tokens that they may have: 1 GiB in float32


def l1_coefficient(l1: float, delay: int, warmup: int, step: int) -> float:
    """Return the penalty's coefficient at a step, counted from 1: 0 for `delay` steps, a ramp of `warmup`, then l1."""
    return l1 * min(1.0, max(0, step - delay) / max(1, warmup))


def cross_entropy(model: nn.Module, windows: Tensor, *, of_scores=F.cross_entropy) -> Tensor:
    """Return the mean cross-entropy of each next token, in nats: int64 windows [batch, context + 1] -> a scalar.

    model: gives scores [batch, context, vocabulary], or has them as `logits` of its output, as in transformers.
    of_scores: computes it from the scores [tokens, vocabulary] and the tokens that followed [tokens]."""
    output = model(windows[:, :-1])
    scores = output if isinstance(output, Tensor) else output.logits
    return of_scores(scores.flatten(0, 1), windows[:, 1:].flatten())


def eval_batch(model: nn.Module, windows: Tensor) -> int:
    """Return how many of the windows [n, context + 1] to read at a time: EVAL_BATCH, or fewer where the scores of a
    large vocabulary would take more memory than training does."""
    scores = vocabulary_of(model) * windows.shape[1]
    return max(1, min(EVAL_BATCH, EVAL_SCORES // max(1, scores)))


def bits_per_byte(model: nn.Module, windows: Tensor, lengths: Tensor | None = None) -> float:
    """Return the cross-entropy in bits a byte on int64 windows [n, context + 1]; each is read with nothing before it.

    lengths: bytes that each token stands for, int [vocabulary]; None where a token is a byte. Only the bytes of the
    predicted tokens count: in these windows a token may stand for more or fewer bytes than in the whole text."""
    with torch.no_grad():
        nats = sum(cross_entropy(model, some) * len(some) for some in windows.split(eval_batch(model, windows)))
    bits = (nats / len(windows)).item() / math.log(2)
    return bits if lengths is None else bits / lengths.to(windows.device)[windows[:, 1:]].double().mean().item()


class Objective(nn.Module):
    """Model, cross-entropy and penalty as one module, which torch.compile and DDP take as a whole.

    The model's layers report to it for good, because torch.compile looks at hooks only once: who calls the model alone
    has to clear `terms` (layers.terms). All numbers stay on the device: whoever needs one reads it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.of_scores = F.cross_entropy
        self._reporting = ExitStack()
        self.terms = self._reporting.enter_context(layer_terms(model))
        self.told = [*self.terms.told.values()]
        modules = [layer.module for layer in firing_layers(model)]
        self.sparse = [(one, told) for one, told in zip(modules, self.told) if isinstance(one, SparseFFN)]

    def forward(self, windows: Tensor, l1: Tensor | None) -> tuple[Tensor, ...]:
        """Return the loss of int64 windows [batch, context + 1], a scalar with gradient; and without gradient:
        cross-entropy and penalty, [2]; then l1, nnz, and what layers.terms.LayerTerm has as lost, light and heavy, by
        layer, float32 [layers] each. l1: the coefficient, a scalar; None for no penalty."""
        for layer, told in self.sparse:
            layer.tell(told)
        ce = cross_entropy(self.model, windows, of_scores=self.of_scores)
        for layer, _ in self.sparse:
            layer.tell(None)  # a validation takes the paths of inference
        terms = [LayerTerm("", *told.pop()) for told in self.told]
        penalty = ce.new_zeros(()) if l1 is None else l1 * (sum(term.l1 for term in terms) / len(terms))
        none, rows = torch.zeros_like(terms[0].nnz), []
        for term in terms:
            # Of what only sparse layers report: nothing was lost, and no token was heavy.
            usual = zip((term.lost, term.light, term.heavy), (none, term.nnz, none))
            rows.append([term.l1.detach(), term.nnz, *(other if own is None else own for own, other in usual)])
        numbers = (torch.stack(column) for column in zip(*rows))
        return ce + penalty, torch.stack([ce.detach(), penalty.detach()]), *numbers


def reinitialise(layer: FeedForward, dead: Tensor, strength: float, generator: torch.Generator) -> None:
    """Move the gate rows of dead neurons (of `up` in a plain layer) towards fresh ones, in place; wait for the device,
    to know which.

    A neuron fires at a token where its gate's output, or in a plain layer its up projection's, is positive. The paper
    (arXiv 2603.23198, appendix D.1) calls one dead that fired at no token of a training step, just above a million: at
    the L1 it recommends, more than 30% are. Its remedy (appendix C.3, equation 6) is, after every training step,

        Wg[j] <- (1 - lambda) Wg[j] + lambda N(0, sigma^2)      lambda 0.1, sigma 0.02 (as the weights were initialised)

    which leaves almost no neuron dead. The other projections, and the optimizer's state of these rows, stay as they
    are. A bias, which the paper's layers lack, moves towards zero, where it began.

    dead: which rows, bool [d_ff]. strength: lambda. generator: draws the fresh numbers in float32, on the CPU, for the
    dead rows in their order. With a weight that FSDP2 sharded, every process calls with the same `dead` and a generator
    in the same state."""
    rows = dead.nonzero().flatten()
    if not len(rows):
        return
    noise = SIGMA * torch.randn(len(rows), layer.pattern.weight.shape[1], generator=generator)
    for parameter, towards in ((layer.pattern.weight, noise), (layer.pattern.bias, torch.zeros(len(rows)))):
        if parameter is not None:
            whole = parallel.whole(parameter)  # which shares its memory, unless FSDP2 sharded it
            moved = (1 - strength) * whole[rows].float() + strength * towards.to(whole.device)
            whole[rows] = moved.to(whole.dtype)
            parallel.put(parameter, whole)
