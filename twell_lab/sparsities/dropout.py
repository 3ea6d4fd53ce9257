"""Dropout as 2:4: of each four neighbouring activations two stay, drawn at random, doubled. An experiment.

    y = two_four_dropout(h)                     # [..., d_ff], what enters the down projection in training
    layer.dropout = TwoFourDropout()            # in the place of nn.Dropout(0.5)

Dropout at one half already sets half of the activations to zero, in places that no hardware skips; in 2:4 places tensor
cores from sm_80 on skip them in y = h Wd^T. The pattern is new in each step, so h has to be compressed in each step
too, which on an H100 took longer than the product gained. Every value is kept with probability 1/2, as by Bernoulli
dropout (Srivastava et al., JMLR 2014), but of four exactly two are: so for a sum over four terms s = w_i h_i the
variance is 4/3 sum s_i^2 - 1/3 (sum s_i)^2 and not sum s_i^2, the same on average where signs are independent."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..core import InputError
from .checks import shown

_PAIRS = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))  # what may stay of four


def two_four_dropout(h: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """Keep two of each four neighbours in the last dimension, each of the six pairs equally likely, doubled; the others
    become +0. Gradients go through what stays, doubled. InputError for a last dimension that is no multiple of 4, and
    for values that are not floating-point."""
    if not isinstance(h, Tensor) or not h.is_floating_point() or not h.dim() or h.shape[-1] % 4:
        raise InputError(f"h is {shown(h)}; floating-point values, a multiple of 4 in the last dimension, are accepted")
    stays = torch.zeros(6, 4, dtype=torch.bool).scatter_(1, torch.tensor(_PAIRS), True).to(h.device)
    pairs = torch.randint(6, (*h.shape[:-1], h.shape[-1] // 4), device=h.device, generator=generator)
    return torch.where(stays[pairs].view(h.shape), 2 * h, 0)


class TwoFourDropout(nn.Module):
    """`two_four_dropout` in training, and nothing in evaluation."""

    def forward(self, h: Tensor) -> Tensor:
        return two_four_dropout(h) if self.training else h
