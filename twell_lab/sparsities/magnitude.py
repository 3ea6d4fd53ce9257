"""Magnitude pruning: which weights of a matrix are the largest, so that the others become zero.

    kept = magnitude_mask(weight, 0.9)      # bool [out, in]: a tenth of the weights
    kept = threshold_mask(weight, 0.01)     # those above a threshold

Exactly as many weights go as were asked for, and of equal magnitudes the first in row order stay. (torch has it too, in
torch.nn.utils.prune, which leaves open which of equal magnitudes go.) What stores the kept ones alone is in
`sparsities.weights`, and what prunes whole models in `sparsities.prune`."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from ..core import InputError
from ..formats.matrix import as_matrix


def check_sparsity(sparsity: float) -> float:
    """Return the share of the weights that become zero. InputError for anything but a number from 0 up to, but not,
    1."""
    if isinstance(sparsity, bool) or not isinstance(sparsity, (int, float)) or not 0 <= sparsity < 1:
        raise InputError(f"sparsity is {sparsity!r:.80}; a share of the weights, from 0 up to, but not, 1, is accepted")
    return float(sparsity)


def kept_of(count: int, sparsity: float) -> int:
    """Return how many of `count` values stay: round(sparsity * count) go, as torch.nn.utils.prune counts."""
    return count - round(check_sparsity(sparsity) * count)


def largest(sizes: Tensor, count: int) -> Tensor:
    """Return which values are the `count` largest: bool, of the shape of `sizes`, exactly `count` of them True.

    Of equal values the first in row order are taken, on every device: the count-th largest value is found by
    torch.topk, and all others are compared with it. sizes: finite. count: 0 to sizes.numel()."""
    flat = sizes.reshape(-1)
    if count in (0, flat.numel()):
        return torch.full_like(sizes, count > 0, dtype=torch.bool)
    threshold = flat.topk(count, sorted=False).values.min()
    above, equal = flat > threshold, flat == threshold
    return (above | equal & (equal.cumsum(0) <= count - above.sum())).view(sizes.shape)


def checked_weight(weight: Tensor) -> Tensor:
    """Return the weight [out, in] without its history. InputError unless it is a dense matrix of finite floating-point
    values of 16 bits or more, that are there (not on meta)."""
    weight = as_matrix(weight).detach()
    if not weight.isfinite().all():
        raise InputError("the weight holds a value that is not finite; finite weights are accepted")
    return weight


def magnitude_mask(weight: Tensor, sparsity: float) -> Tensor:
    """Keep the weights of largest magnitude: bool [out, in], True for what is kept.

    weight: [out, in], floating-point values of 16 bits or more. sparsity: exactly round(sparsity * out * in) weights
    go, zeros among them first; of equal magnitudes the last in row order. InputError as `check_sparsity` and
    `checked_weight`."""
    weight = checked_weight(weight)
    return largest(weight.abs(), kept_of(weight.numel(), sparsity))


def threshold_mask(weight: Tensor, threshold: float) -> Tensor:
    """Keep the weights above a threshold in magnitude: bool [out, in]. With 0 what is not zero; one pass over them, but
    how many stay depends on the weights. InputError for a threshold that is no finite number from 0 up."""
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not 0 <= threshold < inf:
        raise InputError(f"threshold is {threshold!r:.80}; a finite number from 0 up is accepted")
    sizes = checked_weight(weight).abs()
    rounded = torch.tensor(threshold, dtype=torch.float64).to(sizes.dtype).item()  # as torch would round it to compare
    return sizes >= rounded if rounded > threshold else sizes > rounded
