"""Magnitude pruning: which weights of a matrix are the largest, so that the others become zero.

    kept = magnitude_mask(weight, 0.9)      # bool [out, in]: a tenth of the weights
    kept = threshold_mask(weight, 0.01)     # those above a threshold

Exactly as many weights go as were asked for, and of equal magnitudes the first in row order stay (torch.nn.utils.prune
leaves that open). `sparsities.weights` stores the kept ones alone, `sparsities.prune` prunes whole models."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from .checks import check_number, checked_weight


def kept_of(count: int, sparsity: float) -> int:
    """Return how many of `count` values stay: round(sparsity * count) go, as torch.nn.utils.prune counts. InputError
    for a sparsity that is no number from 0 up to, but not, 1."""
    accepted = "a share of the weights, from 0 up to, but not, 1,"
    return count - round(check_number("sparsity", sparsity, lambda share: 0 <= share < 1, accepted) * count)


def largest(sizes: Tensor, count: int) -> Tensor:
    """Return which values are the `count` largest: bool, of the shape of `sizes`, exactly `count` of them True. Of
    equal values the first in row order are taken, on every device. sizes: finite. count: 0 to sizes.numel()."""
    flat = sizes.reshape(-1)
    if count in (0, flat.numel()):
        return torch.full_like(sizes, count > 0, dtype=torch.bool)
    threshold = flat.topk(count, sorted=False).values.min()
    above, equal = flat > threshold, flat == threshold
    return (above | equal & (equal.cumsum(0) <= count - above.sum())).view(sizes.shape)


def magnitude_mask(weight: Tensor, sparsity: float) -> Tensor:
    """Keep the weights of largest magnitude: bool [out, in], True for what is kept.

    weight: [out, in], finite floating-point values of 16 bits or more. sparsity: exactly round(sparsity * out * in)
    weights go, zeros among them first; of equal magnitudes the last in row order. InputError for others."""
    weight = checked_weight(weight)
    return largest(weight.abs(), kept_of(weight.numel(), sparsity))


def threshold_mask(weight: Tensor, threshold: float) -> Tensor:
    """Keep the weights above a threshold in magnitude: bool [out, in]; how many stay depends on the weights. InputError
    for a threshold that is no finite number from 0 up, and for weights as `magnitude_mask`."""
    threshold = check_number("threshold", threshold, lambda bound: 0 <= bound < inf, "a finite number from 0 up")
    return checked_weight(weight).abs().double() > threshold  # compared in 16 bits, the threshold would be rounded
