"""Products C = A B, A [m, k] with zeros in it and B [k, n] dense, by every method that skips zeros, beside torch's
dense product: zeros in patterns, and formats of torch over the density.

A method is measured on unstructured zeros and on the pattern that it was made for. What it has to do for new zeros, its
conversion, is timed by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag, linear

from ..formats import COO, CSR, ELL, TwELL
from ..ops import accuracy, spmm
from ..ops import blocks as block_kernels
from ..ops import clock as clocks
from ..ops.functional import packed_down
from ..sparsities import blocks, microtiles, two_four
from ..sparsities.microtiles import find_microtiles
from ..sparsities.weights import PRODUCTS, SparseLinear
from . import rows
from .rows import DENSE

KIND, DENSITY = "comparison", "matmul_density"
SPARSITIES = (0.5, 0.75, 0.9, 0.95, 0.99, 0.999)
SCATTERED, BLOCKS, TALL, WIDE, TWO_FOUR = "scattered", "blocks 32 x 32", "tiles 32 x 1", "tiles 1 x 32", "2:4"
PIECES = {SCATTERED: (1, 1), BLOCKS: (32, 32), TALL: (32, 1), WIDE: (1, 32)}  # what is zero together
NESTED, NESTED_SIZE = "2:4 in blocks 128 x 128", 128
CHECKED = 64  # rows of a result that are compared with float64
WRONG = 4.0  # times as far off as this project's kernels may be (ops.accuracy): others sum in other orders
TILED = "micro-tiles 32 x 1"
SIZES = {"cpu": (256, 2048, 1024), "cuda": (4096, 5632, 2048)}  # rows, columns, width of the products over densities
DENSITIES = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.3]


# ---- the matrices ----


def patterned(pattern: str, m: int, k: int, sparsity: float, *, dtype, device, seed: int = 0) -> Tensor:
    """Return A [m, k] whose zeros come in this pattern, the other values normal and at least 0.1 away from zero.

    In each band of pieces (rows of one, blocks side by side, ...) equally many stay: round((1 - sparsity) * pieces), at
    least one below a sparsity of 1, at random places. Of "2:4" each four neighbours in a row keep two. Of "2:4 in
    blocks 128 x 128", from 0.5 on, they do where blocks stay, so that twice as many stay as of others."""
    generator = torch.Generator(device).manual_seed(seed)
    values = torch.randn(m, k, generator=generator, device=device)
    values += 0.1 * torch.where(values < 0, -1.0, 1.0)  # or a value could round to a zero

    def places(high: int, wide: int, count: int) -> Tensor:
        order = torch.rand(high, wide, generator=generator, device=device)
        return torch.zeros_like(order, dtype=torch.bool).scatter_(1, order.topk(count).indices, True)

    keep = places(m * k // 4, 4, 2).view(m, k) if pattern in (TWO_FOUR, NESTED) else torch.ones_like(values).bool()
    if pattern != TWO_FOUR:
        high, wide = PIECES.get(pattern, (NESTED_SIZE, NESTED_SIZE))
        share = (1 - sparsity) * (2 if pattern == NESTED else 1)
        stay = round(share * (k // wide)) or int(sparsity < 1)
        keep &= places(m // high, k // wide, stay).repeat_interleave(high, 0).repeat_interleave(wide, 1)
    return values.masked_fill_(~keep, 0).to(dtype)


def scattered(rows: int, columns: int, per_row: int, *, dtype=torch.float32, device="cpu", seed: int = 0) -> Tensor:
    """Return [rows, columns] with exactly `per_row` values in each row, at random places, zeros elsewhere."""
    return patterned(SCATTERED, rows, columns, 1 - per_row / columns, dtype=dtype, device=device, seed=seed)


# ---- the methods ----


@dataclass(frozen=True)
class Method:
    """A way to compute A B. convert: from A [m, k] to what the method multiplies. multiply: of that and B. patterns:
    those it is measured on. least: from which sparsity on; a naive kernel would take minutes below. gpu: whether only a
    GPU has it. turned: whether it takes B^T [n, k] and gives C^T [n, m], as a linear layer has them."""

    name: str
    convert: Callable[[Tensor], object]
    multiply: Callable[[Any, Tensor], Tensor]
    patterns: tuple[str, ...] = (SCATTERED,)
    least: float = 0.0
    gpu: bool = False
    turned: bool = False

    def measured(self, pattern: str, sparsity: float, device: str) -> bool:
        """Return whether the record has it for this pattern and sparsity, on a "cuda" or a "cpu"."""
        return pattern in self.patterns and sparsity >= self.least and (device == "cuda" or not self.gpu)


def ell_matmul(a: ELL, b: Tensor) -> Tensor:
    """Return a @ b [columns, width]: each slot gathers a row of b. Unused slots have column 0, value 0."""
    if a.slots == 0:
        return b.new_zeros(a.shape[0], b.shape[1])
    return embedding_bag(a.column, b, per_sample_weights=a.value, mode="sum")


def _two_four(a: Tensor) -> Tensor:
    return two_four.tensor_kind(a.shape, a.dtype, a.device, "cusparselt").from_dense(a)


def _pruned(a: Tensor, product: str) -> SparseLinear:
    """Return A as the pruned weight of a layer."""
    layer = nn.Linear(a.shape[1], a.shape[0], False, "meta", a.dtype)
    layer.weight = nn.Parameter(a, requires_grad=False)
    return SparseLinear.from_linear(layer, product=product)


_ANY, _IN_BLOCKS = tuple(PIECES), (SCATTERED, BLOCKS, NESTED)
METHODS: tuple[Method, ...] = (
    Method("CSR (torch)", Tensor.to_sparse_csr, torch.matmul, _ANY),
    *(
        Method(
            f"{form.__name__.lower()}_v3",  # the version that is taken
            lambda a, form=form: spmm.SparseOperand(form.from_dense(a)),
            lambda operand, b: operand(b, 3),
            _ANY,
            gpu=True,
        )
        for form in (COO, CSR, ELL)
    ),
    Method("ELL (torch: embedding_bag)", ELL.from_dense, ell_matmul, least=0.9),
    *(
        Method(f"SparseLinear ({name})", partial(_pruned, product=name), SparseLinear.__call__, least=0.9, turned=True)
        for name in PRODUCTS
    ),
    Method(
        "blocks_v2",
        lambda a: block_kernels.BlockOperand(blocks.to_bsr(a, 32)),
        lambda operand, x: operand(x, None, 2),
        _IN_BLOCKS,
        gpu=True,
        turned=True,
    ),
    Method("BSR 32 x 32 (torch)", partial(blocks.to_bsr, size=32), torch.matmul, _IN_BLOCKS),
    Method("2:4 (torch: cuSPARSELt)", _two_four, torch.matmul, (TWO_FOUR,)),
    Method(
        "2:4 (torch: cuSPARSELt, searched)",
        lambda a: two_four.searched(_two_four(a), a.shape[1]),
        lambda weight, x: linear(x, weight),
        (TWO_FOUR,),
        turned=True,
    ),
    Method(TILED, find_microtiles, microtiles.product, (SCATTERED, TALL)),
    Method("TwELL", TwELL.from_dense, lambda packed, b: packed_down(packed, b.t()), _ANY, gpu=True),  # a CPU unpacks it
)
FORMATS = (
    Method("COO", lambda a: a.to_sparse_coo().coalesce(), torch.sparse.mm),
    Method("CSR", Tensor.to_sparse_csr, torch.matmul),
    Method("ELL", ELL.from_dense, ell_matmul),
    Method("CSR + conversion", Tensor.contiguous, lambda a, b: a.to_sparse_csr() @ b),  # as for fresh activations
)


def leading(table: Iterable[dict]) -> list[dict]:
    """Return the rows of the dense product and of METHODS, with their conversions; records of earlier code have other
    versions of kernels too."""
    shown = {DENSE, *(method.name for method in METHODS)}
    return [row for row in table if row["path"].removeprefix("part: ").removesuffix(", conversion") in shown]


# ---- what is timed ----


def off(c: Tensor, a: Tensor, b: Tensor, dense: Tensor) -> float:
    """Return the error of the worst of `CHECKED` rows of C = A B over what is allowed, against float64."""
    picked = torch.linspace(0, len(a) - 1, min(CHECKED, len(a)), device=a.device).long()
    return accuracy.worst_row(c[picked], dense[picked], a[picked].double() @ b.double())[0]


@torch.no_grad()
def beside(
    a: Tensor, bs: list[Tensor], methods: Sequence[Method], kind: str, workload: str, seconds: float
) -> list[dict]:
    """Return a row for the dense product A [m, k] times each B [k, n] in turn and one for each method that gives the
    same here; of KIND also one for what each does for new zeros, "part: NAME, conversion". The dense row has
    `left_out`, {name: why}: methods that this device does not have, and those whose result was wrong."""
    turned, dense, left_out = [b.t().contiguous() for b in bs], a @ bs[0], dict[str, str]()

    def entry(method: Method) -> rows.Entry:
        given = turned if method.turned else bs
        call = partial(method.multiply, method.convert(a))
        c = call(given[0])
        ratio = rows.hold("a row", off(c.t() if method.turned else c, a, bs[0], dense), WRONG)
        return rows.over(call, given), {"error_over_allowed": ratio}

    calls, facts = rows.admit({method.name: partial(entry, method) for method in methods}, left_out)
    nonzero = int((a != 0).sum())
    shared = rows.of_layer(kind, dense, a.shape[1], workload)
    shared |= {"nnz": round(nonzero / len(a), 2), "density": nonzero / a.numel()}
    plain, facts = rows.over(partial(torch.matmul, a), bs), facts | {DENSE: {"left_out": left_out}}
    made = rows.measured(shared, {DENSE: plain, **calls}, facts, seconds)
    parts = {f"part: {way.name}, conversion": rows.over(way.convert, [a]) for way in methods if way.name in calls}
    return made + (rows.measured(shared, parts, None, seconds, base=None, rounds=10) if parts and kind == KIND else [])


@dataclass(frozen=True)
class Shape:
    """Sizes of A [m, k] and B [k, n], and what they hold. seconds: of each comparison, on a CPU."""

    m: int = 4096
    k: int = 4096
    n: int = 4096
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"
    seconds: float = 1.0


def product_rows(
    pattern: str, sparsity: float, shape: Shape = Shape(), methods: Sequence[Method] = METHODS
) -> list[dict]:
    """Return the rows of `beside` of kind "comparison", for the methods that take this pattern and sparsity."""
    a = patterned(pattern, shape.m, shape.k, sparsity, dtype=shape.dtype, device=shape.device)
    normal = {"generator": torch.Generator(shape.device).manual_seed(1), "device": shape.device}
    bs = [torch.randn(shape.k, shape.n, **normal).to(shape.dtype) for _ in range(clocks.ROTATED)]
    chosen = [method for method in methods if method.measured(pattern, sparsity, a.device.type)]
    made = beside(a, bs, chosen, KIND, f"{pattern}, {sparsity:.1%} zeros", shape.seconds)
    return [row | {"pattern": pattern} for row in made]


def sections(shape: Shape = Shape()) -> rows.Sections:
    """Return the steps of the record: one for each pattern and sparsity, the highest first, which take least."""
    cases = [(TWO_FOUR, 0.5), *((pattern, share) for share in SPARSITIES[::-1] for pattern in (*PIECES, NESTED))]
    return {"products": [partial(product_rows, *case, shape) for case in cases]}


# ---- formats of torch over the density ----


def against_density(
    columns: int, width: int, rows: int, densities: list[float], device: str, dtype: torch.dtype, seconds: float = 0.4
) -> list[dict]:
    """Return the rows of `beside` for each of FORMATS at each density, of [rows, columns] times [columns, width]; the
    dense product's path is "dense"."""
    b = torch.randn(columns, width, generator=torch.Generator(device).manual_seed(1), device=device).to(dtype)
    table = []
    for density in densities:
        a = scattered(rows, columns, max(1, round(density * columns)), dtype=dtype, device=device)
        table += beside(a, [b], FORMATS, DENSITY, SCATTERED, seconds)
    return [row | {"path": "dense" if row["path"] == DENSE else row["path"]} for row in table]


def zeros_rows(count: int, columns: int, width: int, device: str, dtype: torch.dtype, seconds: float) -> list[dict]:
    """Return two rows of the dense product alone, of random values and of nothing but zeros, of kind "matmul_data"."""
    b = scattered(columns, width, width, dtype=dtype, device=device)
    full, empty = (scattered(count, columns, per_row, dtype=dtype, device=device) for per_row in (columns, 0))
    calls: rows.Calls = {"random": lambda turn: full @ b, "zeros": lambda turn: empty @ b}
    shared = rows.of_layer("matmul_data", full @ b, columns, "")
    made = rows.measured(shared, calls, None, seconds, base=None)
    return [row | {"workload": row["path"], "path": "dense"} for row in made]


def density_sections(left_out: dict | None = None) -> rows.Sections:
    """Return the steps of the record of formats over the density, on a GPU or, where there is none, the CPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    how = (device, clocks.dtype_for(device), 3.0)
    count, columns, width = SIZES[device]
    return {
        "formats": [partial(against_density, columns, width, count, [density], *how) for density in DENSITIES],
        "zeros": [partial(zeros_rows, count, columns, width, *how)],
    }


def quantile(samples: Sequence[float], share: float) -> float:
    """Return the number below which this share of the samples lies."""
    return float(torch.tensor(samples, dtype=torch.float64).quantile(share))
