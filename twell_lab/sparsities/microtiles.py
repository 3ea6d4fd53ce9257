"""Micro-tiles (PIT): a sparse matrix times a dense one, in dense tensor-core tiles that are gathered from tiny ones.

    tiles = find_microtiles(h)          # h [tokens, d_ff]: which neurons fire in each 32 tokens, and their values
    y = product(tiles, down_t)          # h down_t [tokens, d_model]; down_t [d_ff, d_model], kept transposed
    rows, padding = remove_padding(x, real)      # the tokens of a padded batch that are real
    y = add_padding(layers(rows), padding)       # and back, once for all layers: or unpadded(layers, x, real)

Method: Zheng et al., "PIT: Optimization of Dynamic Sparse Deep Learning Models via Permutation Invariant
Transformation", SOSP 2023, arXiv 2301.10936. A tensor core wants dense tiles of 16 and more on each side; a pattern
that changes with every input has none. But the sum over k in c = a b may be taken in any order, and so may rows be
computed: what is sparse along one of these axes can be gathered along it into dense tiles. Then it is enough that zeros
come in *micro*-tiles, as small as one memory access:

- along k: of a stripe of 32 rows of a, the columns that hold anything, micro-tiles of 32 x 1. They meet the same rows
  of b, and the result is the stripe of c, in place: nothing is scattered. This is `find_microtiles` and `product`.
- along the rows: the rows of a that hold anything, micro-tiles of 1 x k; the result goes back to these rows. This is
  padding, which `remove_padding` gathers once for many products, by torch's own operations.

Tiles of 1 x s are those of the transpose, which is gathered along its own k: for x w with w [k, n] in tiles of one row
and 32 columns, `product(find_microtiles(w.t().contiguous()), x.t().contiguous())` is (x w)^T.

Finding the tiles costs one pass over a, whatever it holds; `product` costs by how many there are. They are two calls,
so that each can be timed; CUDA graphs hold both, torch.compile neither. With stripes of more rows, b is read less
often, and more of their columns are occupied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core import InputError
from ..formats.matrix import Format, as_matrix
from ..ops import microtiles as kernels
from ..ops.checks import needs_gradient

# ---- along k ----


@dataclass(frozen=True, eq=False)
class MicroTiles(Format):
    """A matrix [rows, width] as stripes of `height` rows, of each the columns that hold a value that is not zero.

    There is room for every column, so that nobody has to know how many there are: what lies past a stripe's count is
    not defined. The bytes are those of the dense matrix and of the columns' numbers.

    Attributes:
        counts: int32 [stripes], how many micro-tiles each stripe has.
        columns: int32 [stripes, width], their columns, ascending.
        values: [stripes, width, height], the values of each; rows past the matrix's last are zeros.
        shape: (rows, width) of the matrix.
    """

    counts: Tensor
    columns: Tensor
    values: Tensor
    shape: tuple[int, int]

    def geometry(self) -> tuple:
        """What describes the matrix beside its values: its shape and the height of a tile."""
        return (self.shape, self.height)

    @property
    def height(self) -> int:
        """Rows of a micro-tile, and of a stripe."""
        return self.values.shape[2]

    @property
    def occupied(self) -> float:
        """The share of all micro-tiles that hold anything; 0 where there are none. Waits for the device."""
        return int(self.counts.sum()) / everything if (everything := self.columns.numel()) else 0.0

    def to_dense(self) -> Tensor:
        """The matrix, [rows, width], every value bit for bit; those of columns that were left out as +0."""
        stripes, width, height = self.values.shape
        stripe, at = (torch.arange(width, device=self.counts.device) < self.counts[:, None]).nonzero(as_tuple=True)
        made = self.values.new_zeros(stripes, width, height)
        made[stripe, self.columns[stripe, at].long()] = self.values[stripe, at]
        return made.transpose(1, 2).reshape(stripes * height, width)[: self.shape[0]]


def find_microtiles(a: Tensor, height: int = 32) -> MicroTiles:
    """The micro-tiles of height x 1 that hold a value that is not zero; NaN is none.

    On a GPU, 16-bit values and heights of 32, 64 and 128 are found by a kernel, which reads `a` once and does not wait;
    everything else by torch's own operations, which read it several times.

    Args:
        a: [rows, width], floating-point values of 16 bits or more. Its history is left out.
        height: rows of a tile, from 1 up.

    Returns:
        The tiles, on a's device.

    Raises:
        InputError: for another height, and for what is no dense matrix that holds its values.
    """
    if type(height) is not int or height < 1:
        raise InputError(f"height is {height!r:.80}; a whole number of rows from 1 up is accepted")
    a = as_matrix(a).detach()
    rows, width = a.shape
    if a.is_cuda and kernels.finds(packed := a.contiguous(), height):
        return MicroTiles(*kernels.find(packed, height), (rows, width))
    values = F.pad(a, (0, 0, 0, -rows % height)).view(-1, height, width).transpose(1, 2)  # [stripes, width, height]
    used = (values != 0).any(2)
    counts = used.sum(1, dtype=torch.int32)
    columns = (~used).to(torch.uint8).argsort(dim=1, stable=True)  # those that hold anything first, ascending
    return MicroTiles(
        counts, columns.to(torch.int32), values.gather(1, columns[..., None].expand_as(values)), (rows, width)
    )


def product(tiles: MicroTiles, b: Tensor) -> Tensor:
    """a b, of a [rows, width] as its micro-tiles and b [width, n]: c [rows, n]. It has no gradient: a b that needs
    one is refused, and a's history is left out by `find_microtiles`.

    It is the dense product, by the kernel row by row as exact as torch's, for every a (also NaN and infinities) and
    every finite b.
    Whether b is finite is not looked at, which would cost a pass over it and a wait (`weights.checked_weight` does it
    once, for weights): where a row of b that no tile of a stripe meets is not finite, the dense product has 0 * inf =
    NaN, and this one has not.

    On a GPU of compute capability 8.0 or more, 16-bit values and heights of 32, 64 and 128 run as one kernel, with sums
    in float32, and nothing waits; columns of b are then filled up to a multiple of 8, in a copy, where they are not
    one. Everything else is gathered stripe by stripe by torch, which waits for the counts.

    Args:
        tiles: of a.
        b: dense, in the tiles' dtype and on their device.

    Raises:
        InputError: for another shape, dtype or device, and for a b that needs a gradient.
    """
    if not isinstance(tiles, MicroTiles):
        raise InputError(f"tiles is a {type(tiles).__name__}; what find_microtiles returns is accepted")
    if isinstance(b, Tensor) and needs_gradient(b):
        raise InputError("b needs a gradient, which this product does not have; b.detach() is accepted")
    b = as_matrix(b).detach()
    values = tiles.values
    if b.dtype != values.dtype or b.device != values.device or b.shape[0] != tiles.shape[1]:
        raise InputError(
            f"b is {b.dtype} {list(b.shape)} on {b.device}; {values.dtype} [{tiles.shape[1]}, n] on {values.device} is "
            "accepted"
        )
    if b.is_cuda:
        missing = -b.shape[1] % kernels.VECTOR
        filled = (F.pad(b, (0, missing)) if missing else b).contiguous()
        filled = filled if filled.data_ptr() % 16 == 0 else filled.clone()
        if kernels.multiplies(values, filled):
            return kernels.product(tiles.counts, tiles.columns, values, filled, tiles.shape[0])[:, : b.shape[1]]
    made = b.new_zeros(len(values), tiles.height, b.shape[1])
    for stripe, count in enumerate(tiles.counts.tolist()):
        made[stripe] = values[stripe, :count].t() @ b[tiles.columns[stripe, :count].long()]
    return made.flatten(0, 1)[: tiles.shape[0]]


# ---- along the rows: padding ----


@dataclass(frozen=True, eq=False)
class Padding:
    """Where the rows of a padded batch were.

    Attributes:
        places: int64 [real rows], their numbers among all rows, ascending.
        shape: of all rows, such as (sequences, length).
    """

    places: Tensor
    shape: tuple[int, ...]

    @property
    def share(self) -> float:
        """The share of the rows that is padding; 0 where there are none."""
        return 1 - len(self.places) / everything if (everything := torch.Size(self.shape).numel()) else 0.0

    @property
    def whole(self) -> bool:
        """Whether every row is real."""
        return len(self.places) == torch.Size(self.shape).numel()

    def gather(self, x: Tensor) -> Tensor:
        """The real rows of x [*shape, width], side by side: [real rows, width]. Where every row is real nothing is
        moved, and they are x itself. Does not wait. Raises InputError for an x of other rows, or on another device."""
        if x.shape[:-1] != self.shape or x.device != self.places.device:
            raise InputError(
                f"x is {_told(x)}; [{', '.join(map(str, self.shape))}, width] on {self.places.device} is accepted"
            )
        rows = x.reshape(torch.Size(self.shape).numel(), x.shape[-1])
        return rows if self.whole else rows.index_select(0, self.places)


def remove_padding(x: Tensor, real: Tensor) -> tuple[Tensor, Padding]:
    """The rows that are real, side by side, for everything that computes each row by itself. Passes gradients on.

    How many there are decides the shape, so this waits for the device once; one `Padding` serves all layers of a model.

    Args:
        x: [..., width], such as [sequences, length, d_model].
        real: bool [...], True for rows that are not padding, such as an attention mask of transformers compared with 0;
            (x != 0).any(-1) where padding is rows of zeros.

    Returns:
        The rows [real rows, width], in their order, and where they were. Where every row is real they share x's memory.

    Raises:
        InputError: for another shape, dtype or device of `real`.
    """
    if not isinstance(x, Tensor) or x.dim() < 1:
        raise InputError(f"x is {_told(x)}; a tensor [..., width] is accepted")
    fits = isinstance(real, Tensor) and (real.dtype, real.shape, real.device) == (torch.bool, x.shape[:-1], x.device)
    if not fits:
        raise InputError(f"real is {_told(real)}; bool {list(x.shape[:-1])} on {x.device} is accepted")
    padding = Padding(real.reshape(-1).nonzero()[:, 0], tuple(real.shape))
    return padding.gather(x), padding


def add_padding(rows: Tensor, padding: Padding, fill: float = 0.0) -> Tensor:
    """The padded batch again, [..., width]: the rows where they were, bit for bit, and `fill` elsewhere; the rows' own
    memory where every row is real. Passes gradients on, and does not wait.

    Args:
        rows: [real rows, width] of any width.
        padding: as `remove_padding` returned it.
        fill: what padding holds.

    Raises:
        InputError: for another number of rows, or another device.
    """
    if not isinstance(rows, Tensor) or rows.dim() != 2 or len(rows) != len(padding.places):
        raise InputError(f"rows is {_told(rows)}; [{len(padding.places)}, width] is accepted")
    if rows.device != padding.places.device:
        raise InputError(f"rows is on {rows.device}; {padding.places.device} is accepted")
    if padding.whole:
        return rows.reshape(*padding.shape, rows.shape[1])
    made = rows.new_full((torch.Size(padding.shape).numel(), rows.shape[1]), fill)
    return made.index_copy_(0, padding.places, rows).view(*padding.shape, rows.shape[1])


def unpadded(layer: Callable[[Tensor], Tensor], x: Tensor, real: Tensor) -> Tensor:
    """layer(x) of the real rows, and zeros for the others: time that follows the real rows.

    Gathering and putting back takes as long for one layer as for many, so give it as many at once as follow each other,
    such as an nn.Sequential.

    layer: computes each row by itself, [rows, width] -> [rows, any width]: a linear or feed-forward layer, a norm. One
    that mixes tokens (attention) needs to know where sequences end, and takes torch.nested or flash attention's
    cumulative lengths. x, real: as of `remove_padding`. InputError as of both."""
    rows, padding = remove_padding(x, real)
    return add_padding(layer(rows), padding)


def _told(given: object) -> str:
    if not isinstance(given, Tensor):
        return f"a {type(given).__name__}"
    return f"{given.dtype} {list(given.shape)} on {given.device}"
