"""Cases of `spmm`: COO, CSR and ELL, each version, densities, rows that are full, empty or skewed, any width."""

from functools import partial

import torch

from tests.ops.table import Case
from twell_lab.formats import CSR, ELL
from twell_lab.formats.matrix import rows_of
from twell_lab.ops import spmm

TYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = [(9, 70, 264, 0.1), (5, 700, 40, 0.4), (300, 3, 16, 0.5), (4, 20, 8, 0), (17, 33, 8, 1), (0, 5, 8, 0.5)]
ANY_WIDTH = [(3, 9, 7, 0.3), (1, 1, 1, 1), (40, 517, 77, 0.1)]  # for versions 1 and 2
LARGE = [(700, 1024, 1032, 0.01), (2049, 3, 520, 0.5), (1, 4096, 8, 0.1), (4096, 4096, 4096, 0.01)]


def draw(rows, columns, density, dtype):
    """A [rows, columns]; with three rows and more, one is full and one is empty."""
    generator = torch.Generator().manual_seed(rows + columns)
    a = torch.randn(rows, columns, generator=generator)
    a *= torch.rand(rows, columns, generator=generator) < density
    if rows > 2 and 0 < density < 1:
        a[1], a[2] = torch.randn(columns, generator=generator), 0
    return a.to(dtype)


def skewed(dtype):
    """Rows of 0 to 1,500 entries: full ones first, last, side by side and alone, and many empty rows in between."""
    counts = torch.zeros(60, dtype=torch.long)
    counts[[0, 20, 21, 59]], counts[[22, 40, 41, 42]], counts[43:50] = 1500, torch.tensor([256, 257, 1, 31]), 33
    generator = torch.Generator().manual_seed(1)
    a = torch.zeros(60, 1500)
    for row, count in enumerate(counts.tolist()):
        a[row, torch.randperm(1500, generator=generator)[:count]] = torch.randn(count, generator=generator)
    return a.to(dtype)


def arguments(form, a, n):
    """What an operation gets of A, and B [columns, n]."""
    b = torch.randn(a.shape[1], n, generator=torch.Generator().manual_seed(2)).to(a.dtype)
    order = (a != 0).sum(1).argsort(descending=True, stable=True).int()
    if form == "ell":
        made = ELL.from_dense(a)
        return made.count.int(), made.column.int(), made.value, b, order
    made = CSR.from_dense(a)
    if form == "csr":
        return made.pointer.long(), made.column.int(), made.value, b, order
    return rows_of(made.pointer).int(), made.column.int(), made.value, b, torch.zeros(len(a), n, dtype=a.dtype)


def dense_of(form, where, column, values, b, last):
    """A B by torch's dense product."""
    rows = len(last)
    a = values.new_zeros(rows, len(b))
    if form == "ell":
        for row, count in enumerate(where.tolist()):
            a[row, column[row, :count].long()] = values[row, :count]
    else:
        a[(rows_of(where) if form == "csr" else where).long(), column.long()] = values
    return a @ b


def case(form, version, name, make, n, large=False):
    source, operation = (spmm.SPMM_COO, spmm.coo) if form == "coo" else (spmm.SPMM, by_rows)
    title, draw = f"{form}_v{version}: {name}, {n}", lambda: arguments(form, make(), n)
    operation, exact = partial(operation, version=version), partial(dense_of, form)
    return Case(title, (source,), draw, operation, exact, spmm.TOLERANCE, large=large)


def by_rows(call, *given, version):
    """`spmm.by_rows` with up to four rows that a block each computes."""
    return spmm.by_rows(call, *given, version=version, heavy=min(4, len(given[-1])))


def drawn(form, version, rows, columns, n, density, dtype, large=False):
    name = f"{rows} x {columns}, {density:.0%}, {dtype}"
    return case(form, version, name, lambda: draw(rows, columns, density, dtype), n, large)


FORMS = ("coo", "csr", "ell")
CASES = [
    *(drawn(form, v, *SHAPES[0], dtype) for form in FORMS for v in spmm.VERSIONS for dtype in TYPES),
    *(drawn(form, v, *shape, torch.float16) for form in FORMS for v in spmm.VERSIONS for shape in SHAPES[1:]),
    *(drawn(form, v, *shape, dtype) for form in FORMS for v in (1, 2) for shape in ANY_WIDTH for dtype in TYPES[1:]),
    *(case(f, v, "skewed", lambda: skewed(torch.bfloat16), 16) for f in FORMS for v in spmm.VERSIONS),
    *(drawn(form, v, *shape, torch.bfloat16, True) for form in FORMS for v in (2, 3, 4) for shape in LARGE),
]
