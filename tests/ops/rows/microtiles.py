"""Cases of `microtiles`: finding columns that hold anything, and multiplying them, by height of a stripe."""

from functools import partial

import torch

from tests.ops.table import Case, shifted
from twell_lab.ops import microtiles

SHAPES = [(32, 37, 1048), (64, 70, 528), (128, 130, 264)]  # height, rows, width
TYPES = (torch.bfloat16, torch.float16)


def draw(rows, width, dtype, share=0.3, odd=True):
    """Columns of 16 rows that hold random values, a share of them; zeros of both signs elsewhere; one NaN if `odd`."""
    generator = torch.Generator().manual_seed(rows + width)
    values = torch.randn(rows, width, generator=generator)
    used = torch.rand(-(-rows // 16), width, generator=generator) < share
    signs = torch.where(torch.rand(rows, width, generator=generator) < 0.5, -0.0, 0.0)
    a = torch.where(used.repeat_interleave(16, 0)[:rows], values, signs)
    if odd:
        a[rows // 2, width // 3] = torch.nan
    return a.to(dtype)


def read(found):
    """Clear what lies past each stripe's count, and show the bits of the values."""
    counts, columns, values = found
    past = torch.arange(columns.shape[1]) >= counts[:, None]
    bits = values.view(torch.int16).masked_fill(past[..., None], 0)
    return counts, columns.masked_fill(past, 0), bits


def finding(height, rows, width, dtype, version, share=0.3, off=False):
    return Case(
        f"find_microtiles_v{version}{' off' * off}: {rows} x {width} in {height}, {share:.0%}, {dtype}",
        (microtiles.FIND,),
        lambda: (shifted(draw(rows, width, dtype, share)) if off else draw(rows, width, dtype, share),),
        partial(microtiles.find, height=height, version=version),
        partial(microtiles.find_reference, height=height),
        reads=read,
    )


def product(height, rows, width, n, dtype, version, share=0.3, large=False):
    def arguments():
        a = draw(rows, width, dtype, share, odd=False)
        counts, columns, values = microtiles.find_reference(a, height)
        past = torch.arange(width) >= counts[:, None]  # what lies past is never read
        columns, values = columns.masked_fill(past, 2**30), values.masked_fill(past[..., None], torch.nan)
        b = torch.randn(width, n, generator=torch.Generator().manual_seed(n)).to(dtype)
        return counts, columns, values, b

    name = f"microtiles_v{version}: {rows} x {width} x {n} in {height}, {share:.0%}, {dtype}"
    operation = partial(microtiles.product, rows=rows, version=version)
    exact = partial(microtiles.product_reference, rows=rows)
    return Case(name, (microtiles.MICROTILES,), arguments, operation, exact, microtiles.TOLERANCE, large=large)


CASES = [
    *(finding(*shape, dtype, version) for shape in SHAPES for dtype in TYPES for version in (1, 2)),
    *(finding(32, 40, 1032, torch.bfloat16, version, share) for version in (1, 2) for share in (0.0, 1.0)),
    finding(32, 1, 7, torch.float16, 1),
    finding(32, 37, 1048, torch.float16, None, off=True),
    *(
        product(height, rows, width, n, dtype, version)
        for height, rows, width, n in ((32, 45, 200, 264), (64, 64, 40, 8), (128, 100, 136, 72))
        for dtype in TYPES
        for version in (1, 2)
    ),
    *(product(32, 96, 24, 16, torch.bfloat16, version, 0.0) for version in (1, 2)),
    *(
        product(height, 513, 2048, 256, dtype, version, share, large=True)
        for height in microtiles.HEIGHTS
        for dtype in TYPES
        for version in (1, 2)
        for share in (0.01, 1.0)
    ),
]
