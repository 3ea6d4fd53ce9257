"""Dead neurons: the paper's way to bring them back.

A neuron fires at a token where its gate's output, or in a plain layer its up projection's, is positive (see
twell_lab.analysis.profile). It is dead if it fired at none of the last `dead_window` tokens, counted in whole steps.
The paper (arXiv 2603.23198, appendix D.1) counts over one training step, just above a million tokens: at the L1 it
recommends, more than 30% of the neurons are dead. Its remedy (appendix C.3, equation 6) moves the gate row of each dead
neuron a little towards a fresh one,

    Wg[j] <- (1 - lambda) Wg[j] + lambda N(0, sigma^2)        lambda 0.1, sigma 0.02 (as the weights were initialised)

after every training step, which leaves almost no neuron dead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..layers.find import FeedForward
from . import parallel


def reinitialise(layer: FeedForward, dead: Tensor, strength: float, sigma: float, generator: torch.Generator) -> None:
    """Move the gate rows of dead neurons (of `up` in a plain layer) towards fresh ones, in place; wait for the device,
    to know which. The other projections, and the optimizer's state of these rows, stay as they are, as in the paper. A
    bias, which the paper's layers lack, moves towards zero, where it began.

    dead: which rows, bool [d_ff]. strength: lambda above. sigma: the deviation of the fresh numbers. generator: draws
    them in float32, on the CPU, for the dead rows in their order. With a weight that FSDP2 sharded, every process calls
    with the same `dead` and a generator in the same state."""
    rows = dead.nonzero().flatten()
    if not len(rows):
        return
    noise = sigma * torch.randn(len(rows), layer.pattern.weight.shape[1], generator=generator)
    for parameter, towards in ((layer.pattern.weight, noise), (layer.pattern.bias, torch.zeros(len(rows)))):
        if parameter is not None:
            whole = parallel.whole(parameter)  # which shares its memory, unless FSDP2 sharded it
            moved = (1 - strength) * whole[rows].float() + strength * towards.to(whole.device)
            whole[rows] = moved.to(whole.dtype)
            parallel.put(parameter, whole)
