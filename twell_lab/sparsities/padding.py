"""Padding removed: what computes each row by itself gets the real rows of a padded batch alone.

    rows, padding = remove_padding(x, real)      # x [sequences, length, d_model]; real: an attention mask == 1
    y = add_padding(layers(rows), padding)       # and back, once for all layers: or unpadded(layers, x, real)

These are micro-tiles of one row (sparsities.microtiles; Zheng et al., arXiv 2301.10936), gathered once for many
products by torch's own operations. Gradients pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core import InputError


@dataclass(frozen=True, eq=False)
class Padding:
    """Where the rows of a padded batch were.

    places: int64 [real rows], their numbers among all rows, ascending. shape: of all rows, such as (sequences,
    length)."""

    places: Tensor
    shape: tuple[int, ...]

    @property
    def whole(self) -> bool:
        """Return whether every row is real."""
        return len(self.places) == torch.Size(self.shape).numel()

    def gather(self, x: Tensor) -> Tensor:
        """Return the real rows of x [*shape, width], side by side: [real rows, width]. Where every row is real nothing
        is moved, and they are x itself. Does not wait. InputError for an x of other rows, or on another device."""
        if not isinstance(x, Tensor) or x.shape[:-1] != self.shape or x.device != self.places.device:
            raise InputError(f"x is {_shown(x)}; {[*self.shape, 'width']} on {self.places.device} is accepted")
        rows = x.reshape(torch.Size(self.shape).numel(), x.shape[-1])
        return rows if self.whole else rows.index_select(0, self.places)


def remove_padding(x: Tensor, real: Tensor) -> tuple[Tensor, Padding]:
    """Return the rows that are real, [real rows, width], in their order, and where they were.

    How many there are decides the shape, so this waits for the device once; one `Padding` serves all layers of a model.
    Where every row is real they share x's memory.

    x: [..., width], such as [sequences, length, d_model]. real: bool [...], True for rows that are not padding, such as
    an attention mask of transformers compared with 0. InputError for another shape, dtype or device of `real`."""
    wanted = (torch.bool, x.shape[:-1], x.device) if isinstance(x, Tensor) else None
    if not isinstance(real, Tensor) or (real.dtype, real.shape, real.device) != wanted:
        raise InputError(
            f"x is {_shown(x)} and real {_shown(real)}; [..., width] and bool [...], of one device, accepted"
        )
    padding = Padding(real.reshape(-1).nonzero()[:, 0], tuple(real.shape))
    return padding.gather(x), padding


def add_padding(rows: Tensor, padding: Padding) -> Tensor:
    """Return the padded batch again, [..., width]: the rows [real rows, width] where they were, bit for bit, and zeros
    elsewhere; the rows' own memory where every row is real. Does not wait. InputError for another number of rows, or
    another device."""
    count, device = len(padding.places), padding.places.device
    if not isinstance(rows, Tensor) or rows.dim() != 2 or len(rows) != count or rows.device != device:
        raise InputError(f"rows is {_shown(rows)}; [{count}, width] on {device} is accepted")
    if padding.whole:
        return rows.reshape(*padding.shape, rows.shape[1])
    batch = rows.new_zeros(torch.Size(padding.shape).numel(), rows.shape[1])
    return batch.index_copy(0, padding.places, rows).view(*padding.shape, rows.shape[1])


def unpadded(layer: Callable[[Tensor], Tensor], x: Tensor, real: Tensor) -> Tensor:
    """Return layer(x) of the real rows, and zeros for the others: time that follows the real rows.

    Gathering and putting back takes as long for one layer as for many, so give it as many at once as follow each other,
    such as an nn.Sequential.

    layer: computes each row by itself, [rows, width] -> [rows, any width]: a linear or feed-forward layer, a norm. One
    that mixes tokens (attention) needs to know where sequences end, and takes torch.nested or flash attention's
    cumulative lengths. x, real: as of `remove_padding`. InputError as of both."""
    rows, padding = remove_padding(x, real)
    return add_padding(layer(rows), padding)


def _shown(value: object) -> str:
    return f"{value.dtype} {list(value.shape)} on {value.device}" if isinstance(value, Tensor) else f"{value!r:.80}"
