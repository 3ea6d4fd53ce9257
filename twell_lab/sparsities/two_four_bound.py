"""What 2:4 can gain: the three products of a linear layer, counted.

    y, dx, dw = linear_products(tokens=4096, d_in=4096, d_out=4096)
    bound([y], rates)            # how many times as fast as dense at most, at a GPU's rates

The instruction multiplies a first operand [m, k] that is 2:4 along k with a dense second one [k, n]:

- y = x W^T, computed as y^T = W x^T: k is in. It gains if W is 2:4 along its rows.
- dx = dy W, computed as dx^T = W^T dy^T: k is out. It gains only if W is 2:4 along its columns too, as
  `two_four_mask(transposable=True)` prunes (Hubara et al., arXiv 2102.08124).
- dW = dy^T x: k is the tokens. It gains only if dy or x is 2:4 along the tokens, as activations after a squared ReLU
  can be made (Haziza et al., arXiv 2503.16672).

**Why about 1.6x and not 2x**: half of the operations are left, but not half of the bytes. A kept value of 16 bits
brings 2 bits that say where it was, so W shrinks to 56%; x and y do not shrink at all. With few tokens that is 1.78x at
most. With many, each tile of y still fetches all of its part of x, now in half the time; by this count what the L2
cache has to serve then takes longest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..layers.paths.cost import Rates
from .checks import check_count

# Rows and columns of the result for which operands are fetched once: what two blocks of 128 x 256 make that share what
# they fetch, as Hopper's clusters do.
TILE = (256, 256)


class Product(NamedTuple):
    """One product of a linear layer in 16 bits, first operand [m, k] times second [k, n]. sparse: whether the first
    operand is 2:4; where it is not, both counts are those of the dense product."""

    name: str
    m: int
    n: int
    k: int
    sparse: bool

    def seconds(self, rates: Rates, two_four: bool) -> dict[str, float]:
        """Return what its operations, its bytes of memory (each operand and the result once), and what the tiles of the
        result fetch from the L2 cache take, each alone."""
        down, across = -(-self.m // TILE[0]), -(-self.n // TILE[1])
        halved = two_four and self.sparse
        # As 2:4 half of the values, and 2 bits for each of these.
        first, second, result = self.m * self.k * (1.125 if halved else 2), 2 * self.k * self.n, 2 * self.m * self.n
        operations = 2 * self.m * self.n * self.k / (2 if halved else 1)
        return {
            "operations": operations / rates.matmul,
            "memory": (first + second + result) / rates.bandwidth,
            "fetched": (across * first + down * second) / rates.l2,
        }


def linear_products(
    tokens: int, d_in: int, d_out: int, *, transposable: bool = False
) -> tuple[Product, Product, Product]:
    """Return the three products of a linear layer with a 2:4 weight [d_out, d_in]: y, dx and dW.

    transposable: whether W is 2:4 along its columns as well. InputError for sizes that are no whole numbers from 1
    up."""
    for name, count in (("tokens", tokens), ("d_in", d_in), ("d_out", d_out)):
        check_count(name, count)
    return (
        Product("y = x W^T", d_out, tokens, d_in, True),
        Product("dx = dy W", d_in, tokens, d_out, transposable),
        Product("dW = dy^T x", d_out, d_in, tokens, False),
    )


def bound(products: Iterable[Product], rates: Rates) -> float:
    """Return how many times as fast as dense these products, one after the other, can be at most with 2:4.

    Each takes as long as the longest of its `seconds`; launches are not counted. rates: such as
    `analysis.predict.rates_of("H100 SXM")`."""
    chosen = list(products)
    dense, two_four = (sum(max(one.seconds(rates, how).values()) for one in chosen) for how in (False, True))
    return dense / two_four
