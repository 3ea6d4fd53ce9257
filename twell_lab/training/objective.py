"""What training minimises, measured in one pass: cross-entropy, and the L1 of what enters each down projection, times a
coefficient that has a schedule (`l1_coefficient`); and which neurons this kills, with the remedy (`Silence`)."""

from __future__ import annotations

import math
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..analysis.running import vocabulary_of
from ..layers.find import FeedForward
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
    return max(1, min(EVAL_BATCH, EVAL_SCORES // (vocabulary_of(model) * windows.shape[1])))


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
        self.model, self.of_scores = model, F.cross_entropy
        self._reporting = ExitStack()
        self.terms = self._reporting.enter_context(layer_terms(model))
        self.told = [*self.terms.told.values()]

    def forward(self, windows: Tensor, l1: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the loss of int64 windows [batch, context + 1], a scalar with gradient; and float32 [3 + 5 layers]
        without: loss, cross-entropy and penalty; then l1, nnz, lost, light and heavy (see layers.terms.LayerTerm), each
        by layer. l1: the coefficient, a scalar; None for no penalty."""
        ce = cross_entropy(self.model, windows, of_scores=self.of_scores)
        terms = [LayerTerm("", *told.pop()) for told in self.told]
        penalty = ce.new_zeros(()) if l1 is None else l1 * (sum(term.l1 for term in terms) / len(terms))
        none, rows, loss = torch.zeros_like(terms[0].nnz), [], ce + penalty
        for term in terms:
            # Of what only sparse layers report: nothing was lost, and no token was heavy.
            usual = zip((term.lost, term.light, term.heavy), (none, term.nnz, none))
            rows.append((term.l1, term.nnz, *(other if own is None else own for own, other in usual)))
        facts = [loss, ce, penalty, *(fact for column in zip(*rows) for fact in column)]
        return loss, torch.stack([fact.detach() for fact in facts])


class Silence:
    """For how long each neuron of some layers has not fired. A neuron fires at a token where its gate's output, or in a
    plain layer its up projection's, is positive; the row of these weights then has a gradient.

    The paper (arXiv 2603.23198, appendix D.1) calls one dead that fired at no token of a training step, just above a
    million: at the L1 it recommends, more than 30% are. Its remedy (appendix C.3, equation 6) is, after every step,

        Wg[j] <- (1 - lambda) Wg[j] + lambda N(0, sigma^2)      lambda 0.1, sigma 0.02 (as the weights were initialised)

    which leaves almost no neuron dead. The other projections, and the optimizer's state of these rows, stay as they
    are. A bias, which the paper's layers lack, moves towards zero, where it began.

    silent: int64 [d_ff] of each layer, on its device. generator: draws the fresh rows in float32, on the CPU."""

    def __init__(self, layers: list[FeedForward], generator: torch.Generator) -> None:
        self.layers, self.generator = layers, generator
        weights = [layer.pattern.weight for layer in layers]
        self.silent = [torch.zeros(len(weight), dtype=torch.int64, device=weight.device) for weight in weights]

    def count(self, many: int) -> None:
        """Add `many`, of tokens or steps, for the neurons without a gradient, and begin anew for the others."""
        for layer, silent in zip(self.layers, self.silent):
            fired = parallel.whole((layer.pattern.weight.grad != 0).any(1))
            silent.add_(many).masked_fill_(fired, 0)

    def dead(self, window: int) -> list[Tensor]:
        """Return for each layer, bool [d_ff], which neurons have been silent for the whole window."""
        return [silent >= window for silent in self.silent]

    @torch.no_grad()
    def revive(self, window: int, strength: float) -> None:
        """Apply the remedy to the dead, in place, with lambda = strength; wait for the device, to know which they are.
        With weights that FSDP2 sharded, every process calls it with a generator in the same state."""
        for layer, dead in zip(self.layers, self.dead(window)):
            weight, bias, rows = layer.pattern.weight, layer.pattern.bias, dead.nonzero().flatten()
            noise = SIGMA * torch.randn(len(rows), weight.shape[1], generator=self.generator)
            for parameter, towards in ((weight, noise), (bias, torch.zeros(len(rows)))):
                if parameter is not None and len(rows):
                    whole = parallel.whole(parameter)  # which shares its memory, unless FSDP2 sharded it
                    moved = (1 - strength) * whole[rows].float() + strength * towards.to(whole.device)
                    whole[rows] = moved.to(whole.dtype)
                    parallel.put(parameter, whole)
