"""Cases of `blocks`: every tile of the kernel, blocks that several tiles share, densities, tiles that are not full."""

from functools import partial

import torch

from tests.ops.table import Case
from twell_lab.ops import blocks
from twell_lab.sparsities.blocks import to_bsr

# (high, wide): every tile of the kernel, and blocks that several tiles share.
SIZES = [(16, 16), (16, 32), (32, 32), (64, 64), (128, 128), (48, 96), (32, 16), (128, 32)]


def draw(high, wide, rows, columns, dtype, density):
    """W of rows x columns blocks; of three rows of blocks and more one is full and one is empty."""
    generator = torch.Generator().manual_seed(high + wide)
    kept = torch.rand(rows, 1, columns, 1, generator=generator) < density
    if rows > 2 and 0 < density < 1:
        kept[1], kept[2] = True, False
    return (torch.randn(rows, high, columns, wide, generator=generator) * kept).reshape(rows * high, -1).to(dtype)


def case(size, version, tokens, rows, columns, density, dtype, bias=True, large=False):
    def arguments():
        w = draw(*size, rows, columns, dtype, density)
        weight = blocks.BlockOperand(to_bsr(w, size))
        generator = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, w.shape[1], generator=generator).to(dtype)
        b = torch.randn(len(w), generator=generator).to(dtype) if bias else None
        return x, weight.pointer, weight.column, weight.values, b, weight.order

    name = f"blocks_v{version}: {size}, {tokens} tokens, {rows} x {columns}, {density:.0%}, {dtype}, {bias}"
    operation, sources = partial(blocks.blocks, version=version), (blocks.BLOCKS,)
    return Case(name, sources, arguments, operation, blocks.reference, blocks.TOLERANCE, large=large)


CASES = [
    *(
        case(size, v, 21, 3, 5 if size[1] <= 32 else 2, 0.5, blocks.DTYPES[at % 2])
        for at, size in enumerate(SIZES)
        for v in blocks.VERSIONS
    ),
    *(case((16, 16), v, 3, 2, 2, density, torch.bfloat16, False) for v in blocks.VERSIONS for density in (0, 1)),
    *(case((32, 32), v, 260, 3, 5, 0.5, torch.float16) for v in blocks.VERSIONS),
    *(
        case(size, v, tokens, 7, 6, density, dtype, large=True)
        for size in SIZES
        for v in blocks.VERSIONS
        for tokens in (1, 777)
        for density in (0.1, 1)
        for dtype in blocks.DTYPES
    ),
]
