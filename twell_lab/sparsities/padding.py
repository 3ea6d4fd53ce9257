"""Padding removed: what computes each row by itself gets the real rows of a padded batch alone.

    rows, padding = remove_padding(x, real)      # x [sequences, length, d_model]; real: an attention mask == 1
    y = add_padding(layers(rows), padding)       # and back, once for all layers: or unpadded(layers, x, real)

These are micro-tiles of one row (sparsities.microtiles), gathered once for many products by torch's own operations.
Gradients pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..core import InputError
from .checks import shown


class Padding(NamedTuple):
    """Where the rows of a padded batch were: places, int64 [real rows], their numbers among all rows, ascending; shape,
    of all rows, such as (sequences, length). Where every row is real, nothing is moved."""

    places: Tensor
    shape: torch.Size

    def gather(self, x: Tensor) -> Tensor:
        """Return the real rows of x [*shape, width]: [real rows, width]. InputError for an x of other rows."""
        if not isinstance(x, Tensor) or x.shape[:-1] != self.shape or x.device != self.places.device:
            raise InputError(f"x is {shown(x)}; {[*self.shape, 'width']} on {self.places.device} is accepted")
        rows = x.reshape(self.shape.numel(), x.shape[-1])
        return rows if len(rows) == len(self.places) else rows.index_select(0, self.places)


def remove_padding(x: Tensor, real: Tensor) -> tuple[Tensor, Padding]:
    """Return the rows of x [..., width] that are real, bool [...], in their order, and where they were. It waits for
    the device once; one `Padding` serves all layers of a model. InputError for others."""
    if not isinstance(real, Tensor) or (real.dtype, real.device) != (torch.bool, getattr(x, "device", None)):
        raise InputError(f"x is {shown(x)} and real {shown(real)}; a tensor and bool, on one device, are accepted")
    padding = Padding(real.reshape(-1).nonzero()[:, 0], real.shape)
    return padding.gather(x), padding


def add_padding(rows: Tensor, padding: Padding) -> Tensor:
    """Return the padded batch, [..., width]: the rows [real rows, width] where they were, and zeros elsewhere.
    InputError for another number of rows, or another device."""
    places, shape = padding
    if not isinstance(rows, Tensor) or rows.shape[:-1] != places.shape or rows.device != places.device:
        raise InputError(f"rows is {shown(rows)}; [{len(places)}, width] on {places.device} is accepted")
    if len(rows) < shape.numel():
        rows = rows.new_zeros(shape.numel(), rows.shape[1]).index_copy(0, places, rows)
    return rows.reshape(*shape, rows.shape[1])


def unpadded(layer: Callable[[Tensor], Tensor], x: Tensor, real: Tensor) -> Tensor:
    """Return layer(x) of the real rows, and zeros for the others. layer: computes each row by itself, [rows, width] ->
    [rows, any width]; attention, which mixes tokens, needs to know where sequences end, and takes torch.nested."""
    rows, padding = remove_padding(x, real)
    return add_padding(layer(rows), padding)
