"""2:4: of each four neighbouring weights of a row at most two are not zero, which tensor cores from sm_80 on skip.

    prune(model, mask=two_four_mask)        # sparsities.magnitude: the two largest of each four stay, and train on
    sparse = packed(prune_two_four(linear).weight)    # on a GPU: torch's 2:4 tensor (CUTLASS, cuSPARSELt)
    y = product(x, sparse, linear.bias)     # under torch.no_grad(): it has no gradient
    tl.sparsify(model, "two_four")          # as a path of feed-forward layers whose weights are 2:4
    bound(4096, 4096, 4096, rates)          # how many times as fast as dense each product can be at most

Method: Mishra et al., arXiv 2104.08378, who prune once by magnitude and train again with these zeros; Zhou et al.,
arXiv 2102.04010, choose the two largest anew while it trains. The instruction multiplies a first operand [m, k] that is
2:4 along k with a dense [k, n]: y^T = W x^T gains if W is 2:4 along its rows, dx^T = W^T dy^T if it is along its
columns, too (Hubara et al., arXiv 2102.08124), and dW = dy^T x if dy or x is along the tokens
(`sparsities.two_four_training`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core import DeviceError, InputError
from ..formats.matrix import dtype_names
from ..layers.paths.cost import Rates
from ..ops import checks
from .checks import check_count, check_gpu, checked_linear, checked_weight, refusals
from .products import Product, Products

TILE = (
    256  # rows and columns of the result for which operands are fetched once, by two blocks of one of Hopper's clusters
)
OLDEST = (8, 0)  # compute capability
DTYPES = (torch.float16, torch.bfloat16)  # of torch's: float32 would be 1:2, int8 is no weight that trains
_CUSPARSELT = torch.sparse.SparseSemiStructuredTensorCUSPARSELT
BACKENDS: dict[str, tuple[Any, tuple[int, int]]] = {  # torch's classes, and of what rows and columns are multiples
    "cutlass": (torch.sparse.SparseSemiStructuredTensorCUTLASS, (32, 64)),
    "cusparselt": (_CUSPARSELT, (16, 16)),
}


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
    """Return whether no four neighbours in a row hold more than two values beside zeros. InputError as the mask."""
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


def bound(tokens: int, d_in: int, d_out: int, rates: Rates) -> dict[str, float]:
    """Return by its formula how many times as fast as dense each product of a linear layer can be at most, in 16 bits,
    with a weight [d_out, d_in] that is 2:4 along its rows: half of the operations, but 9/16 of the weight's bytes (2
    bits say where a value was) and all of x and y, also of what the tiles of the result fetch from the L2 cache. rates:
    as of `analysis.predict.rates_of`. InputError for sizes that are no whole numbers from 1 up."""
    for name, count in (("tokens", tokens), ("d_in", d_in), ("d_out", d_out)):
        check_count(name, count)

    def seconds(m: int, n: int, k: int, halved: bool) -> float:
        first, second, result = m * k * (1.125 if halved else 2), 2 * k * n, 2 * m * n
        fetched = -(-n // TILE) * first + -(-m // TILE) * second
        operations = 2 * m * n * k / (2 if halved else 1)
        return max(operations / rates.matmul, (first + second + result) / rates.bandwidth, fetched / rates.l2)

    forward = d_out, tokens, d_in
    return {"y = x W^T": seconds(*forward, False) / seconds(*forward, True), "dx = dy W": 1.0, "dW = dy^T x": 1.0}


def usual_backend() -> str:
    """Return "cusparselt" where this build of torch has it, "cutlass" elsewhere."""
    return "cusparselt" if torch.backends.cusparselt.is_available() else "cutlass"


def tensor_kind(shape: Sequence[int], dtype: torch.dtype, device: torch.device, backend: str | None = None) -> Any:
    """Return torch's class of 2:4 tensors of a backend, for a weight (out, in) like this one. InputError for what is no
    backend, and for dtypes and shapes that it does not take; DeviceError for a CPU, a GPU before sm_80, and where this
    build of torch has no such backend."""
    backend = backend or usual_backend()
    if backend not in BACKENDS:
        raise InputError(f"backend is {backend!r:.80}; accepted: {', '.join(map(repr, BACKENDS))}")
    check_gpu(device, OLDEST, "2:4 products")
    kind, by = BACKENDS[backend]
    if dtype not in DTYPES or len(shape) != 2 or any(n % step or not n for n, step in zip(shape, by)):
        raise InputError(
            f"the weight holds {dtype} {[*shape]}; {backend} accepts {dtype_names(DTYPES)}, multiples of {by[0]} rows "
            f"and {by[1]} columns"
        )
    if backend == "cusparselt" and not torch.backends.cusparselt.is_available():
        raise DeviceError("this build of torch has no cuSPARSELt; backend='cutlass' is accepted")
    return kind


def product(x: Tensor, sparse: Any, bias: Tensor | None = None) -> Tensor:
    """Return y = x W^T + b with torch's 2:4 tensor W [out, in], as torch.nn.functional.linear gives it, of x [..., in].
    cuSPARSELt's product is called at once, so that y is written as it is wanted and not as y^T, unless something
    watches or changes operations. InputError for another sparse, x or bias, where one of them needs a gradient, and
    under autocast to another dtype."""
    if not isinstance(sparse, torch.sparse.SparseSemiStructuredTensor):
        raise InputError(f"sparse is a {type(sparse).__name__}; a 2:4 tensor of torch is accepted")
    if checks.needs_gradient(x, bias):
        raise InputError("x or bias needs a gradient, which this product does not have; torch.no_grad() is accepted")
    device = sparse.device.type
    if torch.is_autocast_enabled(device) and (cast := torch.get_autocast_dtype(device)) != sparse.dtype:
        raise InputError(f"autocast is to {cast}, and the weight holds {sparse.dtype}; autocast to that is accepted")
    watched = checks.watched(x, bias) or not checks.plain_eager()
    if watched or type(sparse) is not _CUSPARSELT or sparse.packed_t is not None:
        return F.linear(x, sparse, bias)
    out, inner = sparse.shape
    rows = x.reshape(-1, x.shape[-1]).contiguous()  # torch takes its strides for those of whole rows
    checks.check_tensor("x", rows, shape=(None, inner), dtype=sparse.dtype, device=sparse.device)
    if bias is not None:
        checks.check_tensor("bias", bias, shape=(out,), dtype=sparse.dtype, device=sparse.device)
    if not len(rows):
        return x.new_empty(*x.shape[:-1], out)
    missing = -len(rows) % _CUSPARSELT._DTYPE_SHAPE_CONSTRAINTS[x.dtype].dense_min_rows
    if missing:
        rows = F.pad(rows, (0, 0, 0, missing))
    elif rows.data_ptr() % 16:
        rows = rows.clone()
    how = {"bias": bias, "transpose_result": True, "alg_id": sparse.alg_id_cusparselt}
    y = torch._cslt_sparse_mm(sparse.packed, rows.t(), **how)
    return (y[:-missing] if missing else y).view(*x.shape[:-1], out)


@torch.no_grad()
def packed(weight: Tensor, backend: str | None = None) -> Any:
    """Return a 2:4 weight [out, in] on a GPU as torch's tensor, once it multiplied a row. backend: "cutlass" or
    "cusparselt"; None takes cuSPARSELt where torch has it. InputError for another weight; errors as `tensor_kind`."""
    backend, weight = backend or usual_backend(), weight.detach()
    kind = tensor_kind(weight.shape, weight.dtype, weight.device, backend)
    check_two_four(weight)
    with refusals(f"torch's {backend}"):
        sparse = kind.from_dense(weight.contiguous())
        product(weight.new_zeros(1, weight.shape[1]), sparse)
    return sparse


def searched(sparse: Any, tokens: int) -> Any:
    """Return the given tensor of cuSPARSELt [out, in], made fit for y = x W^T of about so many tokens: with the fastest
    algorithm, and so that y is written as it is wanted. It is not done unasked, because it can end a process: with
    torch 2.11 one algorithm was an illegal instruction. InputError for another tensor or number."""
    check_count("tokens", tokens)
    if not isinstance(sparse, _CUSPARSELT):
        raise InputError(f"sparse is a {type(sparse).__name__}; a 2:4 tensor of cuSPARSELt is accepted")
    sparse.fuse_transpose_cusparselt = True  # torch's newer releases always do
    x = torch.zeros(tokens + -tokens % 16, sparse.shape[1], dtype=sparse.dtype, device=sparse.device)
    sparse.alg_id_cusparselt = torch._cslt_sparse_mm_search(sparse.packed, x.t(), transpose_result=True)
    return sparse


class TwoFour(Products):
    """Torch's 2:4 products for each projection that is 2:4 and that they take. Exact. GPUs from sm_80 on. The layer
    owns the kept values, 56% of the weights' bytes."""

    name = "two_four"
    patterned = True

    def product(self, weight: Tensor) -> Product:
        return partial(product, sparse=packed(weight))
