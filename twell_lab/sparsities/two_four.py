"""2:4: of each four neighbouring weights of a row at most two are not zero, which tensor cores from sm_80 on skip.

    prune(model, mask=two_four_mask)    # sparsities.prune: the two largest of each four stay, and train on
    prune_two_four(linear)              # one layer, in place
    assert is_two_four(linear.weight)
    bound(4096, 4096, 4096, rates)      # how many times as fast as dense each product can be at most

Method: Mishra et al., arXiv 2104.08378, who prune once by magnitude and train again with these zeros. With
`prune(..., gradient="dense")`, and again every few steps, the two largest are chosen anew while it trains (Zhou et al.,
arXiv 2102.04010). What multiplies such weights is in `sparsities.semi_structured`.

The instruction multiplies a first operand [m, k] that is 2:4 along k with a dense second one [k, n]:

- y = x W^T, computed as y^T = W x^T: k is in. It gains if W is 2:4 along its rows.
- dx = dy W, computed as dx^T = W^T dy^T: k is out. It gains only if W is 2:4 along its columns too
  (`two_four_mask(transposable=True)`; Hubara et al., arXiv 2102.08124).
- dW = dy^T x: k is the tokens. It gains only if dy or x is 2:4 along the tokens (`sparsities.two_four_training`).

**Why about 1.6x and not 2x**: half of the operations are left, but not half of the bytes. A kept value of 16 bits
brings 2 bits that say where it was, so W shrinks to 56%; x and y do not shrink at all. With few tokens that is 1.78x at
most; with many, each tile of y still fetches all of its part of x, now in half the time, from the L2 cache."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..core import InputError
from ..layers.paths.cost import Rates
from .checks import check_count, checked_linear, checked_weight

# Rows and columns of the result for which operands are fetched once: what two blocks of 128 x 256 make that share what
# they fetch, as Hopper's clusters do.
TILE = 256


def _groups(weight: Tensor) -> Tensor:
    """Check a weight and return it as [out, in / 4, 4]. InputError for a width that four does not divide."""
    weight = checked_weight(weight)
    if weight.shape[1] % 4:
        raise InputError(f"the weight has shape {list(weight.shape)}; a multiple of 4 columns is accepted")
    return weight.reshape(len(weight), weight.shape[1] // 4, 4)


def two_four_mask(weight: Tensor, *, transposable: bool = False) -> Tensor:
    """Keep the two largest in magnitude of each four neighbours in a row, of equal ones the first: bool [out, in].

    weight: [out, in], finite, in a multiple of 4. transposable: keep at most two in each row and each column of every
    4 x 4 weights, greedily, the largest first, so that the transpose is 2:4 too. InputError for others."""
    groups = _groups(weight).abs()
    rows, columns = weight.shape
    if not transposable:
        order = groups.argsort(dim=-1, descending=True, stable=True)
        return torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, order[..., :2], True).view(rows, columns)
    if rows % 4:
        raise InputError(f"the weight has shape {[rows, columns]}; a multiple of 4 rows is accepted where transposable")
    tiles = groups.view(rows // 4, 4, columns // 4, 4).transpose(1, 2).reshape(-1, 16)
    order = tiles.argsort(dim=-1, descending=True, stable=True)
    tile = torch.arange(len(tiles), device=tiles.device)
    kept = torch.zeros(len(tiles), 4, 4, dtype=torch.bool, device=tiles.device)
    for place in order.unbind(1):
        row, column = place // 4, place % 4
        kept[tile, row, column] = (kept[tile, row].sum(-1) < 2) & (kept[tile, :, column].sum(-1) < 2)
    return kept.view(rows // 4, columns // 4, 4, 4).transpose(1, 2).reshape(rows, columns)


def is_two_four(weight: Tensor) -> bool:
    """Return whether each four neighbours in a row hold at most two values that are not zero. InputError as
    `two_four_mask`."""
    return bool((_groups(weight).count_nonzero(-1) <= 2).all())


def check_two_four(weight: Tensor) -> None:
    """Raise InputError, naming the row, where of four neighbours more than two are not zero; and as `is_two_four`."""
    if len(wrong := (_groups(weight).count_nonzero(-1) > 2).nonzero()):
        row, group = wrong[0].tolist()
        where = f"row {row}, columns {4 * group} to {4 * group + 3}"
        raise InputError(f"{where} hold more than that; at most two values of four that are not zero are accepted")


@torch.no_grad()
def prune_two_four(linear: nn.Linear) -> nn.Linear:
    """Set to zero what `two_four_mask` does not keep, in place; returns the layer. InputError for a module that is no
    plain nn.Linear, and as `two_four_mask`."""
    weight = checked_linear(linear).weight
    weight.masked_fill_(~two_four_mask(weight), 0)
    return linear


def bound(tokens: int, d_in: int, d_out: int, rates: Rates, *, transposable: bool = False) -> dict[str, float]:
    """Return by its formula how many times as fast as dense each product of a linear layer can be at most, in 16 bits,
    with a 2:4 weight [d_out, d_in]. It takes as long as the longest of its operations, its bytes of memory, and what
    the tiles of the result fetch from the L2 cache. rates: such as `analysis.predict.rates_of("H100 SXM")`.
    transposable: whether W is 2:4 along its columns as well. InputError for sizes that are no whole numbers from 1
    up."""
    for name, count in (("tokens", tokens), ("d_in", d_in), ("d_out", d_out)):
        check_count(name, count)

    def seconds(m: int, n: int, k: int, halved: bool) -> float:
        first, second, result = m * k * (1.125 if halved else 2), 2 * k * n, 2 * m * n
        fetched = -(-n // TILE) * first + -(-m // TILE) * second
        operations = 2 * m * n * k / (2 if halved else 1)
        return max(operations / rates.matmul, (first + second + result) / rates.bandwidth, fetched / rates.l2)

    products = {
        "y = x W^T": ((d_out, tokens, d_in), True),
        "dx = dy W": ((d_in, tokens, d_out), transposable),
        "dW = dy^T x": ((d_out, d_in, tokens), False),
    }
    return {name: seconds(*size, False) / seconds(*size, sparse) for name, (size, sparse) in products.items()}
