"""Checks of this notebook's exercises, for course.exercises."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from ...sparsities import magnitude
from ..verdicts import NotYet, close, near, same, skipping, written
from .data import pays_after


def _keep_largest(answer) -> str:
    for count in (0, 1, 7, 20, 24):
        sizes = torch.randint(0, 6, (4, 6)).float()  # many are equal
        asked = f"keep_largest(torch.tensor({sizes.tolist()}), {count})"
        got = written(answer(sizes.clone(), count))
        if got.shape != sizes.shape or got.dtype != torch.bool:
            raise NotYet(f"bool {list(sizes.shape)} is asked for; yours is {got.dtype} {list(got.shape)}.")
        same(int(got.sum()), count, f"the number kept by {asked}")
        if not torch.equal(got, magnitude.largest(sizes, count)):
            raise NotYet(f"{asked} keeps as many as it should, but others: of equal ones the first in row order stay.")
    return "exactly as many as asked, ties included."


def _two_four(answer) -> str:
    for rows, groups in ((1, 1), (3, 5), (8, 16)):
        weight = torch.randn(rows, 4 * groups).round(decimals=1)
        got = written(answer(weight.clone()))
        if got.shape != weight.shape or got.dtype != torch.bool:
            raise NotYet(f"bool {list(weight.shape)} is asked for; yours is {got.dtype} {list(got.shape)}.")
        each = got.view(rows, groups, 4).sum(-1)
        if (each != 2).any():
            row, group = (each != 2).nonzero()[0].tolist()
            raise NotYet(
                f"of row {row}, columns {4 * group} to {4 * group + 3}, two should stay of "
                f"{weight[row, 4 * group : 4 * group + 4].tolist()}; yours keeps {each[row, group]}."
            )
        kept, best = (weight.abs().view(rows, groups, 4) * got.view(rows, groups, 4)).sum(-1), weight.abs()
        best = best.view(rows, groups, 4).topk(2).values.sum(-1)
        if not torch.allclose(kept, best):
            raise NotYet("two of four stay everywhere, but not always the two of largest magnitude.")
    return "the two largest of each four, whatever their sign."


def _two_four_bytes(answer) -> str:
    for rows, columns, size in ((2048, 5632, 2), (32, 64, 2), (16, 16, 1), (128, 256, 4)):
        half = rows * columns // 2
        same(answer(rows, columns, size), half * size + half // 4, f"two_four_bytes({rows}, {columns}, {size})")
    return "half of the values, and 2 bits for the place of each: at 16 bits 56% of dense, not 50%."


def _empty_blocks(answer) -> str:
    for sparsity, size in ((0.9, 1), (0.99, 16), (0.999, 32), (0.5, 2), (random.random(), 3)):
        near(answer(sparsity, size), sparsity ** (size * size), f"empty_blocks({sparsity:.4g}, {size})")
    return "a block is empty only if all of its values are zero together."


def _pays_after(answer) -> str:
    for given in (
        (10.0, 1.0, 2.0),
        (10.0, 1.0, 5.0),
        (3.0, 2.0, 2.0),
        (3.0, 4.0, 2.0),
        (0.5, 1.0, 4.0),
        (7.0, 1.0, 8.0),
    ):
        want, got = pays_after(*given), answer(*given)
        if got != want:
            raise NotYet(f"pays_after{given} should be {want}; yours gave {got!r}.")
    return "and None where a product gains nothing that could pay for the conversion."


def _quantise_row(answer) -> str:
    for row in (torch.randn(12), torch.randn(40) * 1e-3, torch.tensor([0.0, -2.54, 1.0]), torch.zeros(5)):
        asked = f"quantise_row(torch.tensor({[round(each, 4) for each in row.tolist()]}))"
        values, scale = written(answer(row.clone()))
        if not torch.equal(values, values.round()) or values.abs().max() > 127:
            raise NotYet(f"{asked} gives {values.tolist()}; whole numbers from -127 to 127 are asked for.")
        near(float(scale), float(row.abs().max()) / 127, f"the scale of {asked}") if row.any() else None
        off = float((values * scale - row).abs().max())
        if not off <= 0.51 * float(row.abs().max()) / 127:
            raise NotYet(
                f"{asked} is off by {off:.3g}, and half a scale, {float(row.abs().max()) / 254:.3g}, would do."
            )
    return "the largest magnitude becomes 127, and no value is off by more than half a scale."


def _block_product(answer) -> str:
    for high, wide, share in ((3, 4, 0.5), (2, 2, 0.0), (5, 3, 1.0)):
        size, width = 4, 7
        blocks = {(i, j): torch.randn(size, size) for i in range(high) for j in range(wide) if random.random() < share}
        b, whole = torch.randn(wide * size, width), torch.zeros(high * size, wide * size, dtype=torch.float64)
        for (i, j), block in blocks.items():
            whole[i * size : (i + 1) * size, j * size : (j + 1) * size] = block.double()
        asked = f"block_product of {len(blocks)} of {high * wide} blocks"
        most = 2 * len(blocks) * size * size * width
        got = skipping(answer, (blocks, b, size, high * size), most, asked)
        close(got, whole @ b.double(), asked)
    return "each block once, and nothing for the empty ones."


CHECKS: dict[str, Callable[[Callable], str]] = {
    "keep_largest": _keep_largest,
    "two_four": _two_four,
    "two_four_bytes": _two_four_bytes,
    "empty_blocks": _empty_blocks,
    "pays_after": _pays_after,
    "block_product": _block_product,
    "quantise_row": _quantise_row,
}
