"""INT8 rows, and what their products have to be, bit for bit: shared by the tests on a CPU and on a GPU."""

import torch
from torch import Tensor

from twell_lab.ops import int8_products
from twell_lab.ops.int8_products import VERSIONS, Weight


def rows(number: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Values and scales: some rows of the largest magnitudes, whose sums are largest, and one of zeros."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-127, 128, (number, columns), generator=generator, dtype=torch.int8)
    values[::5] = torch.where(values[::5] < 0, -127, 127).to(torch.int8)
    values[3:4] = 0
    return values, torch.rand(number, generator=generator) * 2**-9 + 2**-12


def weight(out: int, columns: int, dtype: torch.dtype, seed: int = 1, bias: bool = True) -> Weight:
    """Rows, and a bias that is about as large as the products."""
    values, scale = rows(out, columns, seed)
    drawn = torch.randn(out, generator=torch.Generator().manual_seed(seed)) * columns**0.5 * 127**2 * 2**-20
    return Weight(values, scale, drawn.to(dtype) if bias else None)


def product(x: Tensor, scale: Tensor, w: Weight, dtype: torch.dtype) -> Tensor:
    """y, in steps that say what is rounded: the sums are exact, one multiplication in float32 follows, then one with the
    bias added, which float64 holds but for the last bits of the bias."""
    sums = x.double() @ w.values.double().t()
    first = sums.float() * scale[:, None]
    wide = first.double() * w.scale.double()
    wide = wide if w.bias is None else wide + w.bias.double()
    return wide.float().to(dtype)


def gate_up(x: Tensor, scale: Tensor, gate: Weight, up: Weight, dtype: torch.dtype) -> Tensor:
    """h, by torch's operations on the two products."""
    return product(x, scale, gate, dtype).relu() * product(x, scale, up, dtype)


def same(found: Tensor, expected: Tensor) -> bool:
    """Whether all bits are the same, NaN aside, whose bits may be any NaN's."""
    if found.dtype != expected.dtype or not torch.equal(found.isnan(), expected.isnan()):
        return False
    return torch.equal(*(each.nan_to_num(0.0, torch.inf, -torch.inf).view(torch.int16) for each in (found, expected)))


def check(tokens: int, inner: int, out: int, dtype: torch.dtype, tile: str | None = None, bias: bool = True) -> None:
    """Both products in every version on a GPU, of a padded x, bit by bit."""
    x, scale = rows(tokens + 7, inner)
    w, up = weight(out, inner, dtype, bias=bias), weight(out, inner, dtype, 2, bias)
    wanted = product(x[:tokens], scale[:tokens], w, dtype), gate_up(x[:tokens], scale[:tokens], w, up, dtype)
    there = lambda w: Weight(*(None if t is None else t.cuda() for t in w))  # noqa: E731
    short = x.cuda(), scale.cuda()
    for version in (None, *VERSIONS):
        y = int8_products.product(*short, there(w), dtype, tokens, version, tile)
        h = int8_products.gate_up(*short, there(w), there(up), dtype, tokens, version, tile)
        assert same(y.cpu(), wanted[0]) and same(h.cpu(), wanted[1])
